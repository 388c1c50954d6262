"""Scheduler: which request sits in which slot; it knows no array.

A request goes through four states: *queued* with its group; *prefilled*, when the group's
prompt was handed to a prefill and the request waits for a slot; *placed* in a slot that draws
its tokens; *completed*, by a stop token or by the length limit, which frees the slot. Requests
of one group share a prompt: it is prefilled once, and at most one prefill is held at a time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple


@dataclass(frozen=True)
class Request:
    """One response to generate.

    Attributes:
      request_id: Unique in a call, in [0, 2**32); part of the sampling seed.
      prompt_tokens: Token ids; at least one.
      group: Requests of one group have the same prompt, which is prefilled once.
    """

    request_id: int
    prompt_tokens: tuple[int, ...]
    group: int


@dataclass(frozen=True)
class Completion:
    """One response.

    Attributes:
      tokens: What the policy drew, the stop token included.
      logps: Log-probability of each token at the sampling temperature.
      truncated: Ended by the length limit, not by a stop token.
      version: Version of the weights that drew it.
      choice_TLk: Experts that the prompt's and the response's tokens went through, all but the last; None if not asked.
    """

    request_id: int
    tokens: tuple[int, ...]
    logps: tuple[float, ...]
    truncated: bool
    version: int
    choice_TLk: Any = field(default=None, compare=False, repr=False)


class Placement(NamedTuple):
    """Insert row `row` of the newest prefill into `slot`, to answer `request_id`."""

    row: int
    slot: int
    request_id: int


class Drawn(NamedTuple):
    """Tokens that one slot drew since it was last read.

    Attributes:
      active: Whether its response goes on; if not, the slot is free.
    """

    slot: int
    tokens: list[int]
    logps: list[float]
    active: bool


@dataclass
class _Slot:
    request: Request | None = None
    tokens: list[int] = field(default_factory=list)
    logps: list[float] = field(default_factory=list)


class Scheduler:
    """Queue, slots and partial responses of one call.

    The driver repeats, until `finished`: if `refill_due`, then while `placeable`, `take_prompts`
    if `prefill_due` and `place`; decode; `record` what each placed request drew.
    """

    def __init__(self, requests: Sequence[Request], *, slots: int, stop_tokens: Sequence[int], version: int) -> None:
        groups: dict[int, list[Request]] = {}
        for request in requests:
            groups.setdefault(request.group, []).append(request)
        self._check(requests, groups)
        self._groups = deque(groups.values())
        self._prefilled: deque[tuple[int, Request]] = deque()
        self._slots = [_Slot() for _ in range(slots)]
        self._free = deque(range(slots))
        self._stop_tokens = frozenset(stop_tokens)
        self._version = version
        self._unplaced = len(requests)

    @staticmethod
    def _check(requests: Sequence[Request], groups: dict[int, list[Request]]) -> None:
        if len({request.request_id for request in requests}) < len(requests):
            raise ValueError("two requests have the same request_id and would be drawn alike; make the ids unique")
        for group, members in groups.items():
            if len({member.prompt_tokens for member in members}) > 1:
                raise ValueError(f"requests of group {group} have different prompts; a group shares one prefill")

    @property
    def finished(self) -> bool:
        """Every request has its completion."""
        return not self._unplaced and len(self._free) == len(self._slots)

    @property
    def refill_due(self) -> bool:
        """Enough slots are free to be worth a prefill: an eighth of all, or one for each request left."""
        return 0 < min(self._unplaced, max(1, len(self._slots) // 8)) <= len(self._free)

    @property
    def waiting(self) -> bool:
        """A request has no slot yet."""
        return self._unplaced > 0

    @property
    def placeable(self) -> bool:
        """A slot is free and a request waits for one."""
        return bool(self._free) and self._unplaced > 0

    @property
    def prefill_due(self) -> bool:
        """The prompts prefilled last have all their responses in slots, and more are queued."""
        return not self._prefilled and bool(self._groups)

    def take_prompts(self, most: int) -> list[tuple[int, ...]]:
        """Prompts of the next groups in the queue, to be prefilled in this order of rows."""
        assert self.prefill_due, "prompts prefilled earlier still wait for slots"
        prompts = []
        for row in range(min(most, len(self._groups))):
            members = self._groups.popleft()
            prompts.append(members[0].prompt_tokens)
            self._prefilled.extend((row, member) for member in members)
        return prompts

    def place(self, most: int) -> list[Placement]:
        """Put waiting requests of the prefilled prompts into free slots."""
        placements = []
        for _ in range(min(most, len(self._free), len(self._prefilled))):
            row, request = self._prefilled.popleft()
            slot = self._free.popleft()
            self._slots[slot] = _Slot(request)
            self._unplaced -= 1
            placements.append(Placement(row, slot, request.request_id))
        return placements

    def record(self, slot: int, tokens: Sequence[int], logps: Sequence[float], *, active: bool) -> Completion | None:
        """Append what a slot drew; when it is no longer active, free it and return the response."""
        state = self._slots[slot]
        assert state.request is not None, f"slot {slot} is free and cannot draw tokens"
        state.tokens.extend(tokens)
        state.logps.extend(logps)
        if active:
            return None
        self._slots[slot] = _Slot()
        self._free.append(slot)
        return Completion(
            request_id=state.request.request_id,
            tokens=tuple(state.tokens),
            logps=tuple(state.logps),
            truncated=state.tokens[-1] not in self._stop_tokens,
            version=self._version,
        )

"""Keys and values that wait on the host for a response to go on, under whatever weights come then.

A response under way has those of all its tokens but the newest, which is run when it goes on: nothing is computed
again, and what earlier weights left is attended to as it is.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxrlhf.batch import Array
from jaxrlhf.engine.buckets import fit
from jaxrlhf.engine.cache.kv_cache import PageCache, SlotCache
from jaxrlhf.engine.compiled import EngineShardings
from jaxrlhf.engine.prefill import Kind, Prefill
from jaxrlhf.engine.programs import Insertion, Prefilled, Prompts, Shape, Slots, seated
from jaxrlhf.models import Prefix
from jaxrlhf.models.config import ModelConfig


@dataclass(frozen=True)
class HeldCache:
    """Keys and values of one response under way, in host memory.

    Attributes:
      prefix: Arrays `[L, 1, S, K, H]` of S tokens: the prompt's, and all that were drawn but the newest.
      offset: Difference of positions and indices behind its images.
    """

    prefix: Prefix
    offset: int = 0

    @property
    def length(self) -> int:
        """S, tokens that it holds."""
        return self.prefix.key_LPSKH.shape[2]


class HeldRows(NamedTuple):
    """Responses that are moved together, by their places in a list, and the sizes that their programs have.

    Attributes:
      width: Tokens that each is padded to.
      rows: Rows of the arrays; those past the responses are padding.
    """

    places: list[int]
    width: int
    rows: int


def can_hold(config: Any) -> bool:
    """True if a response's cache is keys and values alone, which a slot gives away and takes back as they are."""
    return isinstance(config, ModelConfig) and config.linear is None


def together(lengths: Sequence[int], prefill: Prefill) -> Iterator[HeldRows]:
    """Rows that are moved together, about as long as each other, so that memory has a bound."""
    left = sorted(range(len(lengths)), key=lambda place: lengths[place])
    while left:
        width = fit(lengths[left[-1]], prefill.past_widths)
        rows = prefill.most(Kind(1, width))
        yield HeldRows(left[-rows:], width, rows)
        del left[-rows:]


def taken(
    cache: SlotCache | PageCache, slots: Slots, slot_B: Sequence[int], lengths: Sequence[int], prefill: Prefill
) -> list[HeldCache]:
    """Keys and values of responses in slots, copied to the host.

    Args:
      slots: State of all slots, in their order.
      lengths: Tokens of each response in the cache.
    """
    offset_B = None if slots.offset_B is None else np.asarray(jax.device_get(slots.offset_B))
    found: dict[int, HeldCache] = {}
    for places, width, rows in together(lengths, prefill):
        asked = [slot_B[place] for place in places]
        prefix = jax.device_get(cache.prefix(asked + asked[:1] * (rows - len(asked)), width=width))
        for row, place in enumerate(places):
            own = jax.tree.map(lambda leaf, row=row, end=lengths[place]: leaf[:, row : row + 1, :end].copy(), prefix)
            found[place] = HeldCache(own, 0 if offset_B is None else int(offset_B[slot_B[place]]))
    return [found[place] for place in range(len(lengths))]


def prefilled_of(
    held: Sequence[HeldCache], slots: Sequence[int], group: HeldRows, layout: EngineShardings, *, put: Any, version: int
) -> Prefilled:
    """Responses as a prefill would leave their prompts, to be placed in these slots.

    Their tokens stand for no text: keys and values of equal tokens may be of other weights, so none are shared.
    """

    def padded(*leaves: np.ndarray) -> np.ndarray:
        whole = np.zeros((leaves[0].shape[0], group.rows, group.width, *leaves[0].shape[3:]), leaves[0].dtype)
        for row, leaf in enumerate(leaves):
            whole[:, row, : leaf.shape[2]] = leaf[:, 0]
        return whole

    prefix = put(jax.tree.map(padded, *[one.prefix for one in held]), layout.prompts.prefix)
    length_P = np.ones(group.rows, np.int32)
    length_P[: len(held)] = [one.length for one in held]
    prompts = Prompts(None, prefix, put(length_P, layout.prompts.length_P))  # type: ignore[arg-type]  # nothing to draw
    unshared = tuple((-1 - slot,) * one.length for one, slot in zip(held, slots, strict=True))
    return Prefilled(prompts, unshared, version)


class Newest(NamedTuple):
    """Newest tokens of I responses that go on, which are run next.

    Attributes:
      cached_I: Tokens before each, which are in the cache.
      offset_I: Difference of positions and indices behind images.
    """

    token_I: Array
    cached_I: Array
    offset_I: Array


def go_on(slots: Slots, newest: Newest, insertion: Insertion, *, shape: Shape) -> Slots:
    """Have responses go on in slots from their newest tokens; `place` puts what was held into the cache."""
    offset, kept = None if slots.offset_B is None else newest.offset_I, None if slots.kept_BK is None else -1
    state = newest.token_I, 0.0, newest.cached_I, insertion.drawn_B, True
    return seated(slots, insertion, *state, offset, kept)

"""KV caches of interrupted responses in host memory, until the responses continue under possibly newer weights.

The cache of a response in progress covers all tokens but the newest, which is run when the response continues. Nothing
is recomputed: later tokens attend to the keys and values of earlier weights as they are.
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
    """Keys and values of one response in progress, in host memory.

    Attributes:
      prefix: Arrays `[L, 1, S, K, H]` of S tokens: the prompt's, and all sampled tokens but the newest.
      offset: Difference between positions and token indices after the images (M-RoPE).
    """

    prefix: Prefix
    offset: int = 0

    @property
    def length(self) -> int:
        """S, number of cached tokens."""
        return self.prefix.key_LPSKH.shape[2]


class HeldRows(NamedTuple):
    """Group of responses that are moved together, and the sizes of their programs.

    Attributes:
      places: Indices of the responses in a list.
      width: Number of tokens that each response is padded to.
      rows: Number of rows of the arrays; rows past the responses are padding.
    """

    places: list[int]
    width: int
    rows: int


def can_hold(config: Any) -> bool:
    """Return True if a response's cache is keys and values alone, so it can leave a slot and come back unchanged."""
    return isinstance(config, ModelConfig) and config.linear is None


def together(lengths: Sequence[int], prefill: Prefill) -> Iterator[HeldRows]:
    """Yield groups of responses of similar length that are moved together, so that memory is bounded."""
    left = sorted(range(len(lengths)), key=lambda place: lengths[place])
    while left:
        width = fit(lengths[left[-1]], prefill.past_widths)
        rows = prefill.most(Kind(1, width))
        yield HeldRows(left[-rows:], width, rows)
        del left[-rows:]


def taken(
    cache: SlotCache | PageCache, slots: Slots, slot_B: Sequence[int], lengths: Sequence[int], prefill: Prefill
) -> list[HeldCache]:
    """Copy the keys and values of responses from their slots to the host.

    Args:
      slots: Device state of all slots, in the order of the slots.
      slot_B: Slot of each response.
      lengths: Number of cached tokens of each response.
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
    """Return held responses in the form of prefilled prompts, to be placed in these slots.

    Their token ids are unique dummies, so that no pages are shared: the keys and values of equal tokens may come from
    different weights.
    """

    def padded(*leaves: np.ndarray) -> np.ndarray:
        whole = np.zeros((leaves[0].shape[0], group.rows, group.width, *leaves[0].shape[3:]), leaves[0].dtype)
        for row, leaf in enumerate(leaves):
            whole[:, row, : leaf.shape[2]] = leaf[:, 0]
        return whole

    prefix = put(jax.tree.map(padded, *[one.prefix for one in held]), layout.prompts.prefix)
    length_P = np.ones(group.rows, np.int32)
    length_P[: len(held)] = [one.length for one in held]
    prompts = Prompts(None, prefix, put(length_P, layout.prompts.length_P))  # type: ignore[arg-type]  # nothing sampled
    unshared = tuple((-1 - slot,) * one.length for one, slot in zip(held, slots, strict=True))
    return Prefilled(prompts, unshared, version)


class Newest(NamedTuple):
    """Newest tokens of I continued responses, which are run next.

    Attributes:
      cached_I: Number of cached tokens before each newest token.
      offset_I: Difference between positions and token indices after images (M-RoPE).
    """

    token_I: Array
    cached_I: Array
    offset_I: Array


def go_on(slots: Slots, newest: Newest, insertion: Insertion, *, shape: Shape) -> Slots:
    """Set the state of slots so that responses continue from their newest tokens; `place` restores their caches."""
    offset, kept = None if slots.offset_B is None else newest.offset_I, None if slots.kept_BK is None else -1
    state = newest.token_I, 0.0, newest.cached_I, insertion.drawn_B, True
    return seated(slots, insertion, *state, offset, kept)

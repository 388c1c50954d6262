"""Shardings of the engine's arrays."""

from typing import Any

from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxrlhf.engine import programs
from jaxrlhf.models import Pipeline
from jaxrlhf.models.attention.pages import PagedCache


class EngineShardings:
    """Shardings of the arrays of the engine's programs.

    A prefill splits its rows, but what it returns is whole on every replica (heads stay
    split), so that any slot can take any prompt: one all-gather for a prefill, none for an insertion.
    What belongs to a layer lies on the devices of its stage only.
    """

    def __init__(
        self, mesh: Mesh, slot_axes: tuple[str, ...], kv_head_axis: str | None, pipeline: Pipeline | None
    ) -> None:
        stages = pipeline.axes if pipeline else ()

        # Any, because the trees below hold shardings where their types say arrays.
        def sharding(*axes: Any) -> Any:
            return NamedSharding(mesh, PartitionSpec(*axes))

        self.whole = sharding()
        self.rows = sharding(slot_axes)
        prefix = sharding(stages or None, None, None, kv_head_axis)
        self.prompts = programs.Prompts(self.whole, prefix, self.whole, self.whole)
        self.slots = programs.Slots(*[sharding(slot_axes)] * len(programs.Slots._fields))
        self.cache = sharding((*stages, *slot_axes), kv_head_axis)
        self.pages = PagedCache(sharding(slot_axes, None, kv_head_axis), sharding(slot_axes))


def same_layout(old: tuple[bool, list], new: tuple[bool, list]) -> bool:
    """True if programs compiled for the old arrays take the new ones, whose layers have a stack if they did."""
    (stacked, before), (still_stacked, now) = old, new
    return (
        stacked == still_stacked
        and len(before) == len(now)
        and all(a[:2] == b[:2] and a[2].is_equivalent_to(b[2], len(a[0])) for a, b in zip(before, now, strict=True))
    )

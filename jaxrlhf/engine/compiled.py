"""Cache of ahead-of-time compiled programs, keyed by size, and the shardings of their arrays."""

from collections.abc import Callable
from functools import partial
from time import perf_counter
from typing import Any

import jax
from jax.experimental.layout import Format, Layout
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxrlhf.engine import programs
from jaxrlhf.engine.programs import Shape
from jaxrlhf.models import LayerCache, Pipeline, Prefix
from jaxrlhf.models.attention.kv_cache import is_ring
from jaxrlhf.models.attention.pages import PagedCache
from jaxrlhf.sharding.described import are_here, described

Size = str | int | None

BY_POSITION = ("tpu",)
"""Platforms on which slot caches are stored position by position in memory, the order in which decoding uses them.

In any other order XLA would transpose the whole cache at every dispatch, and hold it twice.
"""


class Compiled:
    """Compiled programs of one engine. A new size compiles a new program; any other difference is an error.

    Args:
      whole: Sharding of arguments that come from the host.

    Attributes:
      shape: Sizes that all programs share.
      programs: Compiled programs by name and sizes.
      seconds: Seconds in which each was traced and compiled, or loaded from the compilation cache.
      has_devices: False if the devices are only described: programs are lowered, not run, and return shapes with
        shardings.
      lowered: Lowered programs by name and sizes, if the devices are only described.
    """

    def __init__(self, shape: Shape, whole: NamedSharding) -> None:
        self.shape, self._whole, self.has_devices = shape, whole, are_here(list(whole.mesh.devices.flat))
        self.programs: dict[tuple[Size, ...], jax.stages.Compiled] = {}
        self.seconds: dict[tuple[Size, ...], float] = {}
        self.lowered: dict[str, jax.stages.Lowered] = {}

    def __len__(self) -> int:
        return len(self.programs)

    def put(self, arrays: Any, sharding: Any) -> Any:
        """Put host arrays on the devices."""
        return jax.device_put(arrays, sharding) if self.has_devices else described(arrays, sharding)

    def run(self, sizes: tuple[Size, ...], program: Callable, *arguments: Any, out: Any, donate: Any = ()) -> Any:
        """Call the program for these sizes, compiling it at the first call; `sizes[0]` is the program's name."""
        if sizes not in self.programs or not self.has_devices:
            start_s = perf_counter()
            layout = jax.tree.map(lambda leaf: _placement(leaf) or self._whole, arguments)
            jitted = jax.jit(
                partial(program, shape=self.shape), in_shardings=layout, out_shardings=out, donate_argnums=donate
            )
            lowered = jitted.lower(*arguments)
            if not self.has_devices:
                return self._outputs(sizes, lowered, out)
            self.programs[sizes], self.seconds[sizes] = lowered.compile(), perf_counter() - start_s
        return self.programs[sizes](*arguments)

    def _outputs(self, sizes: tuple[Size, ...], lowered: jax.stages.Lowered, out: Any) -> Any:
        """Return the shapes and shardings of the outputs without running; the compiler shards them if `out` is None."""
        name, *rest = map(str, sizes)
        self.lowered[f"{name}[{', '.join(rest)}]" if rest else name] = lowered
        return described(lowered.out_info, lowered.compile().output_shardings if out is None else out)


def _placement(leaf: Any) -> Any:
    """Return the sharding of an argument, with its memory layout if that is not the default; None for a host array."""
    given = getattr(leaf, "format", None)
    if given is None:
        return None
    usual = given.layout is None or given.layout.major_to_minor == tuple(range(leaf.ndim))
    return given.sharding if usual else given


class EngineShardings:
    """Shardings of the arrays of the engine's programs.

    A prefill splits its rows. Its result is replicated on every replica (heads stay split), so that any slot can take
    any prompt: one all-gather per prefill, none per insertion. The arrays of a layer are on the devices of the layer's
    pipeline stage only.
    """

    def __init__(
        self,
        mesh: Mesh,
        slot_axes: tuple[str, ...],
        kv_head_axis: str | None,
        pipeline: Pipeline | None,
        cache_axes: tuple[str, ...] = (),
    ) -> None:
        stages = pipeline.axes if pipeline else ()

        # Any, because the trees below hold shardings although their types say arrays.
        def sharding(*axes: Any) -> Any:
            return NamedSharding(mesh, PartitionSpec(*axes))

        self.whole = sharding()
        self.rows = sharding(slot_axes)
        keys = sharding(stages or None, None, cache_axes or None, kv_head_axis)
        prefix: Any = Prefix(keys, keys, sharding(stages or None, None, None, kv_head_axis), keys)
        self.prompts = programs.Prompts(self.whole, prefix, self.whole, self.whole, self.whole)
        self.slots = programs.Slots(*[sharding(slot_axes)] * len(programs.Slots._fields))
        slots = (*stages, *slot_axes), kv_head_axis
        self.cache = sharding(*slots)
        self._of_keys, self._of_values = sharding(*slots, None, cache_axes), sharding(*slots, cache_axes)
        self._alike = not cache_axes
        self.pages = PagedCache(sharding(slot_axes, None, kv_head_axis), sharding(slot_axes))
        self._by_position = mesh.devices.flat[0].platform in BY_POSITION
        self._head_ways = mesh.shape[kv_head_axis] if kv_head_axis else 1

    def of_slots(self, cache: Any) -> Any:
        """Return the shardings of a slot cache or of one of its layers, with memory layouts other than the default."""
        if self._alike and not self._by_position:
            return self.cache
        return jax.tree.map(self._of_layer, cache, is_leaf=lambda stored: isinstance(stored, LayerCache))

    def _of_layer(self, stored: Any) -> Any:
        if not isinstance(stored, LayerCache):
            return self.cache
        layout: Any = (self.cache, self.cache) if is_ring(stored) else (self._of_keys, self._of_values)
        if not self._by_position:
            return type(stored)(*layout)
        # Registers tile the last two dimensions: a single head would fill an eighth of a register.
        one_head = stored.key_BKHS.shape[1] <= self._head_ways
        key, value = ((0, 1, 3, 2), (0, 1, 2, 3)) if one_head else ((0, 3, 1, 2), (0, 2, 1, 3))
        formats: Any = [
            Format(Layout(major_to_minor=order), sharding) for order, sharding in zip((key, value), layout, strict=True)
        ]
        return type(stored)(*formats)


def same_layout(old: tuple[bool, list], new: tuple[bool, list]) -> bool:
    """Return True if programs compiled for the old weights accept the new weights.

    Args:
      old, new: Flag for stacked layers, and shape, dtype and sharding of each leaf.
    """
    (stacked, before), (still_stacked, now) = old, new
    return (
        stacked == still_stacked
        and len(before) == len(now)
        and all(a[:2] == b[:2] and a[2].is_equivalent_to(b[2], len(a[0])) for a, b in zip(before, now, strict=True))
    )

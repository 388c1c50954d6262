"""Counts of a compiled program: bytes between devices, bytes on devices, and transfers to the host."""

import itertools
import math
import re
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

from jaxrlhf import models
from jaxrlhf.engine import Engine
from jaxrlhf.engine.cache.kv_cache import PageCache
from jaxrlhf.engine.prefill import FEWER_ROWS
from jaxrlhf.models.config import ModelConfig

_ITEM_BYTES = {"f32": 4, "s32": 4, "u32": 4, "bf16": 2, "f16": 2, "s8": 1, "u8": 1, "pred": 1}
_KINDS = "all-gather|all-reduce|reduce-scatter|collective-permute|all-to-all|collective-broadcast|ragged-all-to-all"
_INSTRUCTION = re.compile(rf" = (?P<result>.*?) (?P<kind>{_KINDS})(?P<start>-start)?\((?P<rest>.*)$")


class Collective(NamedTuple):
    """One collective of a program.

    Attributes:
      groups: Device positions that exchange; pairs of source and target for a permutation.
      received_bytes: Most that one device gets from others.
    """

    kind: str
    groups: frozenset[frozenset[int]]
    received_bytes: int


def to_read(program: jax.stages.Lowered) -> jax.stages.Compiled:
    """A program that is looked at and never run: its instructions, bytes and counts, for half of the seconds.

    XLA decides all of these before LLVM makes machine code, the other half, which is left as it comes.
    """
    return program.compile(compiler_options={"xla_backend_optimization_level": 0})


def collectives(program: jax.stages.Lowered) -> list[Collective]:
    """Compile and read every collective of the optimised program."""
    lines = to_read(program).as_text().splitlines()
    found = [match for line in lines if (match := _INSTRUCTION.search(line))]
    results = [_second(match["result"]) if match["start"] else match["result"] for match in found]
    return [_collective(match["kind"], _bytes(text), match["rest"]) for match, text in zip(found, results, strict=True)]


def _collective(kind: str, result_bytes: int, rest: str) -> Collective:
    if kind == "collective-permute":
        listed = re.search(r"source_target_pairs=\{(.*?\})\}", rest)
        assert listed is not None, rest
        pairs = [frozenset(map(int, pair.split(","))) for pair in re.findall(r"\{([\d,]+)", listed[1])]
        return Collective(kind, frozenset(pairs), result_bytes if any(len(pair) == 2 for pair in pairs) else 0)
    groups = _groups(rest)
    (size,) = {len(group) for group in groups}
    if kind == "all-reduce":  # around a ring, once to add up and once to tell
        return Collective(kind, groups, 2 * result_bytes * (size - 1) // size)
    # Of the result, a device of a group of n had its own n-th part.
    assert kind == "all-gather" or kind == "all-to-all", f"no rule for the bytes of {kind}"
    return Collective(kind, groups, result_bytes * (size - 1) // size)


def _second(start: str) -> str:
    """The result among what an asynchronous collective starts with: operands, results, and more at times."""
    depths = np.cumsum([(mark in "([{") - (mark in ")]}") for mark in start])
    commas = [at for at, mark in enumerate(start) if mark == "," and depths[at] == 1]
    return start[commas[0] : commas[1] if len(commas) > 1 else None]


def _bytes(result: str) -> int:
    arrays = re.findall(r"(\w+)\[([\d,]*)\]", result)
    return sum(_ITEM_BYTES[kind] * math.prod(int(n) for n in dims.split(",") if n) for kind, dims in arrays)


def _groups(rest: str) -> frozenset[frozenset[int]]:
    """Replica groups, in any of the three ways in which XLA writes them."""
    numbers = r"\[([\d,]+)\]"
    order = r"(?:T\(([\d,]+)\))?"
    if listed := re.search(r"replica_groups=\{(\{.*?\})\}", rest):
        return frozenset(frozenset(_integers(group)) for group in re.findall(r"\{([\d,]+)\}", listed[1]))
    if iota := re.search(rf"replica_groups={numbers}<={numbers}{order}", rest):
        return _rows(_iota(iota[2], iota[3]).reshape(_integers(iota[1])))
    named = re.search(rf"replica_groups=mesh\[(.*?)\](?:, device_ids=\({numbers}{order}\))? \{{([^}}]*)\}}", rest)
    assert named is not None, rest
    sizes = {name: int(size) for name, size in re.findall(r"'(\w+)'=(\d+)", named[1])}
    listed_parts = re.findall(r"'(\w+)'(?::\((\d+)\)(\d+))?(?=,|$)", named[4])
    assert len(listed_parts) == len(named[4].split(",")), rest
    parts = [part for name, size in sizes.items() for part in _parts(size, _ranges(name, size, listed_parts))]
    ids = _iota(named[2] or str(math.prod(sizes.values())), named[3]).reshape([size for size, _ in parts])
    along = [at for at, (_, exchanged) in enumerate(parts) if exchanged]
    across = [at for at, (_, exchanged) in enumerate(parts) if not exchanged]
    return _rows(ids.transpose(across + along).reshape(-1, math.prod(ids.shape[axis] for axis in along)))


def _ranges(name: str, size: int, listed: list[tuple[str, str, str]]) -> list[tuple[int, int]]:
    """The listed parts of one axis, from and to which product of its factors: `'a':(2)2` is 2 to 4."""
    own = [(before, count) for axis, before, count in listed if axis == name]
    return [(int(before), int(before) * int(count)) if before else (1, size) for before, count in own]


def _parts(size: int, ranges: list[tuple[int, int]]) -> list[tuple[int, bool]]:
    """An axis as a product of factors, each inside one of the ranges or outside all."""
    bounds = sorted({1, size, *(bound for bounds in ranges for bound in bounds)})
    return [
        (high // low, any(start <= low and high <= end for start, end in ranges))
        for low, high in itertools.pairwise(bounds)
    ]


def _integers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


def _iota(shape: str, order: str | None) -> np.ndarray:
    """0, 1, 2 … in this shape, with its dimensions in this order."""
    ids = np.arange(math.prod(_integers(shape))).reshape(_integers(shape))
    return ids.transpose(_integers(order)) if order else ids


def _rows(ids: np.ndarray) -> frozenset[frozenset[int]]:
    return frozenset(frozenset(group.tolist()) for group in ids)


def joined(collections: list[frozenset[frozenset[int]]]) -> set[frozenset[int]]:
    """Devices that exchange with each other through any of the collectives, directly or in steps."""
    merged: list[set[int]] = []
    for group in (group for groups in collections for group in groups):
        touching = [other for other in merged if other & group]
        merged = [other for other in merged if not other & group] + [set(group).union(*touching)]
    return {frozenset(group) for group in merged}


def live_bytes() -> dict[int, int]:
    """Bytes in buffers of each device's own memory, by device id; arrays that share a buffer count once."""
    buffers = {}
    for array in jax.live_arrays():
        for shard in array.addressable_shards:
            if shard.data.sharding.memory_kind in (None, shard.device.default_memory().kind):
                buffers[shard.device.id, shard.data.unsafe_buffer_pointer()] = shard.data.nbytes
    totals: dict[int, int] = defaultdict(int)
    for (device, _), size in buffers.items():
        totals[device] += size
    return {device.id: totals[device.id] for device in jax.devices()}


@contextmanager
def host_reads() -> Iterator[list[Any]]:
    """Shapes of the arrays that were read into host memory within the block.

    A transfer guard sees no reads on CPU devices, where an array is already in host memory,
    so this counts where arrays are converted to numpy, by users or inside `jax.device_put`. One
    conversion may count more than once.
    """
    array_type: Any = type(jnp.zeros(()))
    seen: list[Any] = []

    def counting(original: Any) -> Any:
        def counted(array: jax.Array, *arguments: Any, **options: Any) -> Any:
            seen.append(array.shape)
            return original(array, *arguments, **options)

        return counted

    methods = ("__array__", "_single_device_array_to_np_array_did_copy")
    counted_methods = {name: counting(getattr(array_type, name)) for name in methods}
    with mock.patch.multiple(array_type, _value=property(counting(array_type._value.fget)), **counted_methods):
        yield seen


def most_compilations(engine: Engine) -> int:
    """Bound on the programs that an engine compiles, whatever it generates from whole prompts."""
    config, cache = engine._shape.config, engine.cache
    rows, prompts = len(engine._slot_counts), len(engine.prefill.buckets) * (1 + len(FEWER_ROWS))
    unstacked = 1
    if isinstance(config, ModelConfig):  # a program for each part of each stack
        unstacked = len([*models.layer_parts(models.param_dims(config, "lm"))]) * len(config.kinds)
    states = unstacked + prompts + rows * (1 + len(FEWER_ROWS)) + rows + rows**2  # of slots: insert, empty, keep
    sizes, resized = len(cache.sizes), rows * (rows - 1)
    if isinstance(cache, PageCache):
        return states + sizes * (1 + prompts + rows)
    sizes_of_all = {"slots": engine.slots, "capacity": engine.context_tokens, "execution": engine.execution}
    layers = jax.eval_shape(lambda: models.empty_cache(config, **sizes_of_all))
    of_layer = sizes * (prompts * rows + resized) + (sizes - 1) * rows
    return states + rows + sizes * rows + len({*map(type, layers)}) * of_layer


def named(engine: Engine, name: str) -> list[jax.stages.Compiled]:
    """The programs of an engine of this name, one for each of its sizes."""
    return [program for (first, *_), program in engine.compiled.programs.items() if first == name]

"""Collectives and matrix products of a compiled program, parsed from the text of its HLO.

A collective is reported with its mesh axes and the bytes that each device receives. Instructions in a loop count once
per iteration.
"""

import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

KINDS = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")

_ITEM_BYTES = {
    **dict.fromkeys(("pred", "s8", "u8", "f8e4m3fn", "f8e5m2"), 1),
    **dict.fromkeys(("s16", "u16", "f16", "bf16"), 2),
    **dict.fromkeys(("s32", "u32", "f32"), 4),
    **dict.fromkeys(("s64", "u64", "f64"), 8),
}
_HEADER = re.compile(r"^(?:ENTRY )?(%[\w.\-]+) \(.*\{$")
_INSTRUCTION = re.compile(r"^\s*(ROOT )?(%[\w.\-]+) = (.*?) ([a-z][a-z0-9\-]*)\((.*)$")
_CALLED = re.compile(r"(?:calls|to_apply|body|condition)=(%[\w.\-]+)|branch_computations=\{([^}]*)\}")


@dataclass(frozen=True)
class Collective:
    """Sum of all collectives of one kind over the same mesh axes.

    Attributes:
      kind: One of `KINDS`.
      axes: Mesh axes whose devices take part.
      count: Number of runs; a loop with an unknown number of iterations, such as the loop over tokens, counts once.
      bytes: Total bytes that each device receives.
    """

    kind: str
    axes: tuple[str, ...]
    count: int
    bytes: int


class _Instruction(NamedTuple):
    root: str | None
    name: str
    type: str
    operation: str
    rest: str


def collectives(text: str, mesh_shape: Mapping[str, int]) -> list[Collective]:
    """Return the collectives of a program, sorted by bytes, largest first.

    Args:
      mesh_shape: Size of every axis of the mesh that the program runs on.
    """
    counts: Counter[tuple[str, tuple[str, ...]]] = Counter()
    received: Counter[tuple[str, tuple[str, ...]]] = Counter()
    for instruction, types, times in _run(text, lambda each: _kind(each) in KINDS):
        kind = _kind(instruction)
        axes, moved = _of_instruction(kind, instruction, types, mesh_shape)
        if moved:
            counts[kind, axes] += times
            received[kind, axes] += times * moved
    return [Collective(*key, counts[key], size) for key, size in received.most_common()]


def product_flops(text: str) -> int:
    """Return the FLOPs of a device's matrix products, without products inside kernels such as attention."""
    return sum(times * _flops(instruction, types) for instruction, types, times in _run(text, _multiplies))


def _kind(instruction: _Instruction) -> str:
    return instruction.operation.removesuffix("-start")


def _multiplies(instruction: _Instruction) -> bool:
    if instruction.operation == "custom-call":
        return '"__cublas$' in instruction.rest
    return instruction.operation in ("dot", "convolution")


def _flops(instruction: _Instruction, types: Mapping[str, str]) -> int:
    """Return the FLOPs of a product: twice its number of outputs times the length of its sums."""
    first, second = (_dims(types.get(operand, "")) for operand in _operands(instruction)[:2])
    out = math.prod(_dims(instruction.type))
    if instruction.operation != "convolution":
        found = re.search(r'lhs_contracting_dim(?:ension)?s"?[=:]\s*[\[{]([\d,"\s]*)[\]}]', instruction.rest)
        assert found is not None, f"product without contracting dimensions: {instruction.rest}"
        return 2 * out * math.prod(first[int(dim)] for dim in re.findall(r"\d+", found[1]))
    # TPUs express products as convolutions without spatial dimensions, or with batch dimensions in their place. Then
    # the sum is over the input features.
    labels = re.search(r"dim_labels=\w+_(\w+)->", instruction.rest)
    assert labels is not None, f"convolution without dimension labels: {instruction.rest}"
    space = 1
    if window := re.search(r"window=\{size=([\dx]+)([^}]*)\}", instruction.rest):
        sums = "pad" not in window[2] and "dilate" not in window[2] and "rhs_reversal" not in window[2]
        space = math.prod(map(int, window[1].split("x"))) if sums else 1
    return 2 * out * space * second[labels[1].index("i")]


def _run(text: str, wanted: Callable[[_Instruction], bool]) -> Iterator[tuple[_Instruction, Mapping[str, str], int]]:
    """Yield the wanted instructions of a program, the types in their computation, and how often each runs."""
    computations = dict(_computations(text))
    entry = re.search(r"^ENTRY (%[\w.\-]+) ", text, re.MULTILINE)
    assert entry is not None, "not the text of a compiled program"
    runs: set[str] = set()
    for name, instructions in computations.items():  # a called computation comes before its callers
        called = (called for each in instructions for called in _called(each.rest))
        if any(map(wanted, instructions)) or any(each in runs for each in called):
            runs.add(name)

    def visit(name: str, times: int) -> Iterator[tuple[_Instruction, Mapping[str, str], int]]:
        if name not in runs:
            return
        types = {instruction.name: instruction.type for instruction in computations[name]}
        for instruction in computations[name]:
            if wanted(instruction):
                yield instruction, types, times
            turns = _turns(instruction, computations) if instruction.operation == "while" else 1
            for called in _called(instruction.rest):
                yield from visit(called, times * turns)

    return visit(entry[1], 1)


def _computations(text: str) -> Iterator[tuple[str, list[_Instruction]]]:
    name, instructions = "", list[_Instruction]()
    for line in text.splitlines():
        if header := _HEADER.match(line):
            name, instructions = header[1], []
        elif line == "}" and name:
            yield name, instructions
            name = ""
        elif name and (found := _INSTRUCTION.match(line)):
            instructions.append(_Instruction(*found.groups()))


def _called(rest: str) -> list[str]:
    """Return the computations that an instruction runs, without loop conditions, which have no collectives."""
    called = []
    for match in _CALLED.finditer(rest):
        if match[0].startswith(("condition", "to_apply")):
            continue
        called += [match[1]] if match[1] else [name.strip() for name in match[2].split(",")]
    return called


def _turns(loop: _Instruction, computations: Mapping[str, Sequence[_Instruction]]) -> int:
    """Return the number of iterations of a loop that counts to a constant; 1 for any other loop."""
    if known := re.search(r'"known_trip_count":\{"n":"(\d+)"\}', loop.rest):
        return int(known[1])
    condition = re.search(r"condition=(%[\w.\-]+)", loop.rest)
    instructions = computations.get(condition[1], ()) if condition else ()
    limits = [int(found[1]) for each in instructions if (found := re.match(r"(\d+)\)", each.rest)) and _is_limit(each)]
    result = next((each for each in instructions if each.root), None)
    counts = result is not None and result.operation == "compare" and "direction=LT" in result.rest
    return limits[0] if len(limits) == 1 and counts else 1


def _is_limit(instruction: _Instruction) -> bool:
    return instruction.operation == "constant" and instruction.type.startswith("s32[]")


def _of_instruction(
    kind: str, instruction: _Instruction, types: Mapping[str, str], mesh_shape: Mapping[str, int]
) -> tuple[tuple[str, ...], int]:
    """Return the mesh axes of a collective, and the bytes that each device receives."""
    size = sum(_type_bytes(types.get(operand, "")) for operand in _operands(instruction))
    if kind == "collective-permute":
        pairs = [tuple(map(int, pair)) for pair in re.findall(r"\{(\d+),(\d+)\}", instruction.rest)]
        moving = [pair for pair in pairs if pair[0] != pair[1]]
        return _axes(moving, mesh_shape), size if moving else 0
    groups = _groups(instruction.rest, mesh_shape)
    ways = groups.shape[1]
    per_operand = {
        "all-gather": ways - 1,
        "all-reduce": 2 * (ways - 1) / ways,
        "reduce-scatter": (ways - 1) / ways,
        "all-to-all": (ways - 1) / ways,
    }[kind]
    return _axes(groups, mesh_shape), round(size * per_operand)


def _operands(instruction: _Instruction) -> list[str]:
    return re.findall(r"%[\w.\-]+", instruction.rest.partition(")")[0])


def _dims(type_text: str) -> list[int]:
    """Return the dimensions of an array type, or of the first array of a tuple type."""
    found = re.search(r"\w+\[([\d,]*)\]", type_text)
    return [int(dim) for dim in found[1].split(",") if dim] if found else []


def _type_bytes(type_text: str) -> int:
    """Return the bytes of all arrays of a type."""
    found = re.findall(r"(\w+)\[([\d,]*)\]", type_text)
    return sum(_ITEM_BYTES.get(item, 0) * math.prod(int(dim) for dim in dims.split(",") if dim) for item, dims in found)


def _groups(rest: str, mesh_shape: Mapping[str, int]) -> np.ndarray:
    """Return the device numbers of each replica group, `[groups, devices of a group]`."""
    devices = math.prod(mesh_shape.values())
    if listed := re.search(r"replica_groups=\{(\{[\d,{}]*\})\}", rest):
        return np.array([list(map(int, group.split(","))) for group in re.findall(r"\{([\d,]+)\}", listed[1])])
    if iota := re.search(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", rest):
        return _transposed(*iota.group(2, 3)).reshape([int(each) for each in iota[1].split(",")])
    ordered = r"(?:,? device_ids=\(\[([\d,]+)\](?:T\(([\d,]+)\))?\))?"
    if named := re.search(rf"replica_groups=mesh\[([^\]]*)\]{ordered} \{{([^}}]*)\}}", rest):
        mesh, dims, order, axes = named.groups()
        numbers = np.arange(devices) if dims is None else _transposed(dims, order).reshape(-1)
        return numbers[_named_groups(mesh, axes)]
    assert "replica_groups" not in rest or "replica_groups={}" in rest, f"unknown form of replica groups: {rest}"
    return np.arange(devices)[None]


def _transposed(dims: str, order: str | None) -> np.ndarray:
    """Return the device numbers as an array of dimensions `dims`, transposed to `order`."""
    numbers = np.arange(math.prod(map(int, dims.split(",")))).reshape([int(dim) for dim in dims.split(",")])
    return numbers if order is None else numbers.transpose([int(dim) for dim in order.split(",")])


def _named_groups(mesh: str, axes: str) -> np.ndarray:
    """Return the positions in the mesh of each group's devices.

    Args:
      mesh: Axes of the mesh with their sizes: `'a'=4,'b'=2`.
      axes: Axes of a group: `'a'`, or a part of an axis such as `'a':(1)2`, the 2 parts after a prefix of size 1.
    """
    sizes = {name: int(size) for name, size in re.findall(r"'(\w+)'=(\d+)", mesh)}
    shape: list[int] = []
    chosen: list[int] = []
    for name, size in sizes.items():
        part = re.search(rf"'{name}'(?::\((\d+)\)(\d+))?", axes)
        if part is None:
            shape.append(size)
        elif part[1] is None:
            chosen.append(len(shape))
            shape.append(size)
        else:
            before, own = int(part[1]), int(part[2])
            chosen.append(len(shape) + 1)
            shape += [before, own, size // (before * own)]
    numbers = np.arange(math.prod(shape)).reshape(shape)
    rest = [axis for axis in range(len(shape)) if axis not in chosen]
    return numbers.transpose(*rest, *chosen).reshape(-1, math.prod(shape[axis] for axis in chosen))


def _axes(groups: np.ndarray | Sequence[tuple[int, ...]], mesh_shape: Mapping[str, int]) -> tuple[str, ...]:
    """Return the mesh axes along which the devices of a group differ."""
    if not len(groups):
        return ()
    names, sizes = list(mesh_shape), list(mesh_shape.values())
    places = np.stack(np.unravel_index(np.asarray(groups), sizes), axis=-1)
    return tuple(name for index, name in enumerate(names) if (places[..., index] != places[:, :1, index]).any())

"""Collectives and matrix products of a compiled program, read from the text of its HLO.

Collectives are there with the devices that take part and what each receives; loops count as often as they turn.
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
    """All collectives of one kind over the same mesh axes.

    Attributes:
      kind: One of `KINDS`.
      axes: Mesh axes whose devices take part.
      count: Times that they run; one turn counts of a loop that does not say how many it makes, such as that of tokens.
      bytes: Bytes that each device receives in all of them.
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
    """Collectives of a program, those that move most first.

    Args:
      mesh_shape: Size of every axis of the mesh whose devices, in order, run the program.
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
    """FLOPs of a device's matrix products; those inside kernels, such as attention's, are not seen."""
    return sum(times * _flops(instruction, types) for instruction, types, times in _run(text, _multiplies))


def _kind(instruction: _Instruction) -> str:
    return instruction.operation.removesuffix("-start")


def _multiplies(instruction: _Instruction) -> bool:
    if instruction.operation == "custom-call":
        return '"__cublas$' in instruction.rest
    return instruction.operation in ("dot", "convolution")


def _flops(instruction: _Instruction, types: Mapping[str, str]) -> int:
    """Twice the product's outputs, times the length of its sums."""
    first, second = (_dims(types.get(operand, "")) for operand in _operands(instruction)[:2])
    out = math.prod(_dims(instruction.type))
    if instruction.operation != "convolution":
        found = re.search(r'lhs_contracting_dim(?:ension)?s"?[=:]\s*[\[{]([\d,"\s]*)[\]}]', instruction.rest)
        assert found is not None, f"a product says what it sums over: {instruction.rest}"
        return 2 * out * math.prod(first[int(dim)] for dim in re.findall(r"\d+", found[1]))
    # TPUs multiply by convolutions without space, or with batches in place of it: of the sum there is one feature.
    labels = re.search(r"dim_labels=\w+_(\w+)->", instruction.rest)
    assert labels is not None, f"a convolution names its dimensions: {instruction.rest}"
    space = 1
    if window := re.search(r"window=\{size=([\dx]+)([^}]*)\}", instruction.rest):
        sums = "pad" not in window[2] and "dilate" not in window[2] and "rhs_reversal" not in window[2]
        space = math.prod(map(int, window[1].split("x"))) if sums else 1
    return 2 * out * space * second[labels[1].index("i")]


def _run(text: str, wanted: Callable[[_Instruction], bool]) -> Iterator[tuple[_Instruction, Mapping[str, str], int]]:
    """Instructions of a program that are wanted, the types of all beside them, and how often each runs."""
    computations = dict(_computations(text))
    entry = re.search(r"^ENTRY (%[\w.\-]+) ", text, re.MULTILINE)
    assert entry is not None, "this is no text of a compiled program"
    runs: set[str] = set()
    for name, instructions in computations.items():  # those called come before their callers
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
    """Computations that an instruction runs; a condition of a loop has no collectives, and is passed over."""
    called = []
    for match in _CALLED.finditer(rest):
        if match[0].startswith(("condition", "to_apply")):
            continue
        called += [match[1]] if match[1] else [name.strip() for name in match[2].split(",")]
    return called


def _turns(loop: _Instruction, computations: Mapping[str, Sequence[_Instruction]]) -> int:
    """Turns of a loop that counts to a constant; 1 of any other."""
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
    """Mesh axes of a collective, and the bytes that each device receives in it."""
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
    """Dimensions of an array, or of the first of several."""
    found = re.search(r"\w+\[([\d,]*)\]", type_text)
    return [int(dim) for dim in found[1].split(",") if dim] if found else []


def _type_bytes(type_text: str) -> int:
    """Bytes of all arrays of a type."""
    found = re.findall(r"(\w+)\[([\d,]*)\]", type_text)
    return sum(_ITEM_BYTES.get(item, 0) * math.prod(int(dim) for dim in dims.split(",") if dim) for item, dims in found)


def _groups(rest: str, mesh_shape: Mapping[str, int]) -> np.ndarray:
    """Device numbers of each group, `[groups, devices of a group]`."""
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
    assert "replica_groups" not in rest or "replica_groups={}" in rest, f"groups of a form of their own: {rest}"
    return np.arange(devices)[None]


def _transposed(dims: str, order: str | None) -> np.ndarray:
    """Device numbers in an array of such dimensions, transposed."""
    numbers = np.arange(math.prod(map(int, dims.split(",")))).reshape([int(dim) for dim in dims.split(",")])
    return numbers if order is None else numbers.transpose([int(dim) for dim in order.split(",")])


def _named_groups(mesh: str, axes: str) -> np.ndarray:
    """Places of each group, of axes of a mesh: `'a'=4,'b'=2`, or `'a':(1)2`, parts of 2 after those of 1."""
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
    """Axes along which the devices of a group differ."""
    if not len(groups):
        return ()
    names, sizes = list(mesh_shape), list(mesh_shape.values())
    places = np.stack(np.unravel_index(np.asarray(groups), sizes), axis=-1)
    return tuple(name for index, name in enumerate(names) if (places[..., index] != places[:, :1, index]).any())

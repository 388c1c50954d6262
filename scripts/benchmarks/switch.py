"""Benchmark of the switch from the training to the generation layout and back, for 0.3 billion float32 parameters.

    python -m scripts.benchmarks.switch [--json FILE]

Runs on the devices of JAX's default backend; on CPU, on eight devices. Each row switches the same weights: refining
layouts, where a device's generation part contains its training part; the same sizes in the vanilla order of axes; a
pair of layouts that do not refine; and the refining layouts with plain `jax.device_put`. Bytes are counted in two ways:
elements that a device lacks, and elements that the collectives of the compiled programs send to a device. On CPU
devices a copy through the host costs nothing, so seconds say little. On accelerators the command fails if the compiled
switch is slower than `jax.device_put` in either direction.
"""

import argparse
import json
import os
import runpy
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

os.environ.setdefault("JAX_NUM_CPU_DEVICES", "8")
os.environ.setdefault("NPROC", "32")  # before JAX starts

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh
from rich.console import Console
from rich.table import Table

from jaxrlhf.config import Layout
from jaxrlhf.models.config import ModelConfig
from jaxrlhf.models.counts import weight_counts
from jaxrlhf.models.parameters import param_dims, param_shapes
from jaxrlhf.resharding.hybrid import HybridEngine
from jaxrlhf.sharding.described import described
from jaxrlhf.sharding.mesh import factored_mesh, generation_mesh
from jaxrlhf.sharding.rules import shardings
from scripts.benchmarks import workload as bench
from scripts.pages import ROOT

MODEL = ModelConfig("qwen3", 32_768, 1024, 2816, 24, 16, 8, 64, qk_norm=True, tie_embeddings=True)
UNCOMPILED = "no program, copies through the host"
READER = ROOT / "tests" / "support" / "compiled.py"
collectives = runpy.run_path(str(READER))["collectives"]  # the same reader as in the tests


@dataclass(frozen=True)
class Row:
    """Figures of one way to switch; `back` in a name means the switch to the training layout.

    Attributes:
      formula_bytes: Bytes that a device receives by the paper's formula; None if the formula does not apply.
      bytes_per_device: Maximum bytes that a device lacks before the switch, by the indices of its shards.
      received_bytes: Bytes that a device receives in the compiled programs; None without compiled programs.
      there: Collectives of the compiled programs to the generation layout.
      there_s: Median seconds of one switch to the generation layout.
      there_gbps: `bytes_per_device` divided by `there_s`, in 1e9 bytes a second.
    """

    name: str
    layout: str
    formula_bytes: int | None
    bytes_per_device: int
    bytes_back_per_device: int
    received_bytes: int | None
    received_back_bytes: int | None
    there: str
    back: str
    there_s: float
    back_s: float
    there_gbps: float


@dataclass(frozen=True)
class Sizes:
    """Sizes d, t and t_g of the layouts on a power of two of devices."""

    data: int
    tensor: int
    generation_tensor: int

    @classmethod
    def of(cls, count: int) -> "Sizes":
        tensor = min(4, count)
        return cls(count // tensor, tensor, max(1, tensor // 2))


def refining(sizes: Sizes, devices: list[jax.Device]) -> HybridEngine:
    return by_layout(Layout(tensor=sizes.tensor, generation_tensor=sizes.generation_tensor), devices)


def not_refining(sizes: Sizes, devices: list[jax.Device]) -> HybridEngine:
    """Return an engine whose generation has more tensor shards than training; training shards over fsdp instead."""
    tensor = sizes.generation_tensor
    return by_layout(Layout(fsdp=len(devices) // tensor, tensor=tensor, generation_tensor=sizes.tensor), devices)


def by_layout(layout: Layout, devices: list[jax.Device]) -> HybridEngine:
    meshes = factored_mesh(layout, devices), generation_mesh(layout, devices)
    return HybridEngine.by_rules(*meshes, param_dims(MODEL, "lm"), param_shapes(MODEL, "lm"), dtype=jnp.float32)


def vanilla(sizes: Sizes, devices: list[jax.Device]) -> HybridEngine:
    """Return an engine with the micro axis outside the tensor axis, as in the usual order of groups."""
    shape = (sizes.data, sizes.tensor // sizes.generation_tensor, sizes.generation_tensor)
    mesh = Mesh(np.asarray(devices).reshape(shape), ("data", "micro", "tensor"), axis_types=(AxisType.Auto,) * 3)
    dims, shapes = param_dims(MODEL, "lm"), param_shapes(MODEL, "lm")
    split = ("heads", "kv_heads", "mlp", "vocab")
    train, generate = (shardings(mesh, dims, dict.fromkeys(split, axes)) for axes in (("micro", "tensor"), ("tensor",)))
    return HybridEngine(described(shapes, train), described(shapes, generate))


def formula(sizes: Sizes) -> int:
    """Return (t - t_g) / (t_g t) of the bytes of sharded weights, so without the scales of norms."""
    dims, shapes = param_dims(MODEL, "lm"), param_shapes(MODEL, "lm")
    leaves = zip(jax.tree.leaves(dims, is_leaf=lambda x: isinstance(x, tuple)), jax.tree.leaves(shapes), strict=True)
    split = sum(4 * x.size for names, x in leaves if set(names) - {"layers", None})
    return split * (sizes.tensor - sizes.generation_tensor) // (sizes.tensor * sizes.generation_tensor)


def measure(name: str, layout: str, engine: HybridEngine, *, expected: int | None, switch: bool, repeats: int) -> Row:
    """Time one way to switch, after a first switch that compiles.

    Args:
      switch: Whether the engine switches; otherwise `jax.device_put` moves the weights between its layouts.
    """
    build = jax.jit(
        lambda: jax.tree.map(lambda x: jnp.ones(x.shape, x.dtype), engine.generation_shapes),
        out_shardings=engine.train,
    )
    params = build()
    seconds: list[tuple[float, float]] = []
    for _ in range(1 + repeats):
        start = time.perf_counter()
        weights = engine.to_generation(params)[0] if switch else put(params, engine.generate)
        middle = time.perf_counter()
        params = engine.to_training(weights, params)[0] if switch else put(weights, engine.train)
        seconds.append((middle - start, time.perf_counter() - middle))
    there_s, back_s = (median(way) for way in zip(*seconds[1:], strict=True))
    there, back = map(movements, engine.lower()) if switch else [Movement(None, UNCOMPILED)] * 2
    return Row(
        name=name,
        layout=layout,
        formula_bytes=expected,
        bytes_per_device=engine.bytes_per_device,
        bytes_back_per_device=engine.bytes_back_per_device,
        received_bytes=there.received_bytes,
        received_back_bytes=back.received_bytes,
        there=there.collectives,
        back=back.collectives,
        there_s=round(there_s, 4),
        back_s=round(back_s, 4),
        there_gbps=round(engine.bytes_per_device / there_s / 1e9, 3),
    )


def put(tree: Any, layout: Any) -> Any:
    """Move a tree to a layout without an engine, and delete the arrays that moved."""
    moved = jax.block_until_ready(jax.device_put(tree, layout))
    for old, new in zip(jax.tree.leaves(tree), jax.tree.leaves(moved), strict=True):
        if not old.sharding.is_equivalent_to(new.sharding, new.ndim):
            old.delete()
    return moved


class Movement(NamedTuple):
    """Bytes that a device receives in compiled programs, None without programs, and the collectives as text."""

    received_bytes: int | None
    collectives: str


def movements(programs: list[jax.stages.Lowered]) -> Movement:
    """Return the movement of the programs of one direction."""
    found = [one for program in programs for one in collectives(program)]
    kinds = Counter(one.kind for one in found)
    names = ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items())) or "none"
    return Movement(sum(one.received_bytes for one in found), names)


def tables(rows: list[Row], *, title: str) -> Iterator[Table]:
    """Yield two tables: bytes and seconds of each switch, and the collectives of its programs."""
    numbers = ("formula", "lacks", "gets", "s", "lacks back", "gets back", "s back")
    title = f"{title}; MB per device"
    figures = Table(title=title, title_justify="left", box=None, pad_edge=False, header_style="bold")
    programs = Table(title="\ncollectives", title_justify="left", box=None, pad_edge=False, header_style="bold")
    for heading in ("switch", *numbers):
        figures.add_column(heading, justify="right" if heading in numbers else "left", no_wrap=True)
    for heading in ("switch", "layouts", "there", "back"):
        programs.add_column(heading)
    for row in rows:
        there = megabytes(row.formula_bytes), megabytes(row.bytes_per_device), megabytes(row.received_bytes)
        back = megabytes(row.bytes_back_per_device), megabytes(row.received_back_bytes)
        figures.add_row(row.name, *there, f"{row.there_s:.3f}", *back, f"{row.back_s:.3f}")
        programs.add_row(row.name, row.layout, row.there, row.back)
    yield figures
    yield programs


def megabytes(count: int | None) -> str:
    """Format bytes as 1e6 bytes."""
    return "-" if count is None else f"{count / 1e6:.1f}"


def machine(devices: list[jax.Device]) -> dict[str, Any]:
    """Return devices, machine, versions and model size of the measurement."""
    return {
        "devices": f"{len(devices)} x {devices[0].device_kind}",
        **bench.about("jax"),
        "load_average": round(os.getloadavg()[0], 1),  # of the last minute; other programs may have used the machine
        "parameters": weight_counts(MODEL).total,
        "megabytes": round(4 * weight_counts(MODEL).total / 1e6, 1),
    }


def main() -> None:
    """Measure and print; write JSON if requested."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="file to write the figures to")
    parser.add_argument("--repeats", type=int, default=5, help="switches that are timed")
    flags = parser.parse_args()
    devices = jax.devices()
    devices = devices[: 1 << (len(devices).bit_length() - 1)]
    if len(devices) < 2:
        parser.exit(2, "a switch moves weights between devices, and there is one; nothing to measure\n")
    sizes = Sizes.of(len(devices))
    ways = f"1-{sizes.tensor}-{sizes.data} to 1-{sizes.generation_tensor}"
    other = f"fsdp {len(devices) // sizes.generation_tensor} x t {sizes.generation_tensor} to t {sizes.tensor}"
    expected = formula(sizes)
    rows = []
    for name, layout, make, paper, switch in (
        ("refining", ways, refining, expected, True),
        ("vanilla order", ways, vanilla, None, True),
        ("not refining", other, not_refining, None, True),
        ("jax.device_put", ways, refining, expected, False),
    ):
        engine = make(sizes, devices)
        rows.append(measure(name, layout, engine, expected=paper, switch=switch, repeats=flags.repeats))
    facts = machine(devices)
    title = f"{facts['parameters'] / 1e9:.2f}B float32 parameters, {facts['megabytes']:.0f} MB, on {facts['devices']}"
    Console().print(*tables(rows, title=title), sep="\n")
    if flags.json:
        record = {"machine": facts, "rows": [asdict(row) for row in rows]}
        flags.json.write_text(json.dumps(record, indent=2) + "\n")
    check(rows[0], rows[-1], expected, on_cpu=devices[0].platform == "cpu")


def check(switch: Row, plain: Row, expected: int, *, on_cpu: bool) -> None:
    """Exit if the compiled switch moves other bytes than the formula says, or is slower than plain copies."""
    if not switch.bytes_per_device == switch.received_bytes == expected:
        found = f"lacks {switch.bytes_per_device} bytes and receives {switch.received_bytes}"
        sys.exit(f"in the refining switch a device {found}; the formula says {expected}")
    if not on_cpu and (switch.there_s > plain.there_s or switch.back_s > plain.back_s):
        sys.exit("the compiled switch is slower than jax.device_put")


if __name__ == "__main__":
    main()

"""Compiled programs of a plan: memory and collectives as reported by the chip's compiler."""

import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import jax
from jax.sharding import NamedSharding

from jaxrlhf.config import Refusal
from jaxrlhf.planner.cost.programs import Expected, ExpectedPrograms
from jaxrlhf.planner.hardware import Hardware, gib
from jaxrlhf.planner.hlo import Collective, collectives, product_flops

_SIZED = ("decode", "place", "add pages", "prefill", "insert", "resize", "keep")
"""Programs that a run compiles for several sizes; only the largest size is checked."""


@dataclass(frozen=True)
class CompiledProgram:
    """Program compiled for the plan's hardware. Bytes are per device.

    Attributes:
      name: Name of the form `role.program[sizes]`.
      seconds: Seconds of compilation.
      alias_bytes: Bytes of outputs that use the memory of donated arguments.
      needed_bytes: Peak memory of the program, which the compiler compares with the chip's memory. On TPUs the peak is
        below `compiled_bytes`, because `compiled_bytes` counts temporaries that share memory one after another. 0 if
        the compiler does not count the peak; `compiled_bytes` is then used instead.
      estimated_bytes: Estimate of `compiled_bytes` by the plan; None if plans do not count the program.
      beside_bytes: Bytes of everything else in the device's memory while the program runs, by the plan.
      collectives: Collectives, largest first; None if the compiler cannot print the program.
      flops: FLOPs of a device's matrix products, without products inside kernels; None if `collectives` is None.
    """

    name: str
    seconds: float
    argument_bytes: int
    temporary_bytes: int
    output_bytes: int
    alias_bytes: int
    needed_bytes: int
    estimated_bytes: float | None
    beside_bytes: float
    collectives: tuple[Collective, ...] | None
    flops: int | None

    @property
    def compiled_bytes(self) -> int:
        """Bytes of arguments, temporaries, and outputs that alias no argument."""
        return self.argument_bytes + self.temporary_bytes + self.output_bytes - self.alias_bytes

    @property
    def peak_bytes(self) -> float:
        """Bytes in a device's memory while the program runs."""
        return (self.needed_bytes or self.compiled_bytes) + self.beside_bytes

    def seconds_at_best(self, hardware: Hardware) -> float:
        """Return the roofline time: the longest of computing, accessing memory and receiving, at the chip's peak rates.

        Memory access counts reading arguments and writing outputs.
        """
        multiplied = (self.flops or 0) / hardware.matmul_flops_per_s
        moved = sum(each.bytes for each in self.collectives or ())
        in_memory = (self.argument_bytes + self.output_bytes) / hardware.memory_bytes_per_s
        return max(multiplied, in_memory, moved / hardware.link_bytes_per_s)


def largest(names: Sequence[str]) -> list[str]:
    """Return the names of the programs, with only the largest size of each program in `_SIZED`."""
    kept: dict[str, tuple[tuple[int, ...], str]] = {}
    for name in names:
        base = name.partition("[")[0]
        key = base if base.rpartition(".")[2] in _SIZED else name
        sizes = tuple(map(int, re.findall(r"\d+", name[len(base) :])))
        if key not in kept or kept[key][0] < sizes:
            kept[key] = sizes, name
    return [name for _, name in kept.values()]


def compile_programs(
    lowered: Mapping[str, jax.stages.Lowered],
    expected: ExpectedPrograms,
    *,
    options: dict[str, bool | str] | None = None,
    progress: Callable[[str, int, int], None] = lambda name, done, total: None,
) -> list[CompiledProgram]:
    """Compile the programs, the largest size of each.

    Args:
      options: Compiler flags that a run has in its environment, from `topology.compiler_options`.
      progress: Callback with the name of the next program, the number of compiled programs, and the total number.

    Raises:
      Refusal: The compiler refuses a program, for example for lack of memory.
    """
    names, compiled = largest(list(lowered)), []
    for done, name in enumerate(names):
        progress(name, done, len(names))
        compiled.append(_compiled(name, lowered[name], expected.of(name), options))
    progress("", len(names), len(names))
    return compiled


def _compiled(
    name: str, lowered: jax.stages.Lowered, expected: Expected, options: dict[str, bool | str] | None
) -> CompiledProgram:
    start = time.perf_counter()
    try:
        program = lowered.compile(compiler_options=options)
    except Exception as error:  # Mosaic and Triton raise error classes of their own
        raise Refusal(f"{name} does not compile for this hardware: {str(error).partition(chr(10))[0]}") from error
    seconds = time.perf_counter() - start
    memory, text = program.memory_analysis(), _text(program)
    assert memory is not None, "compilers of accelerators report memory"
    counted = {"nothing": 0, "arguments": memory.argument_size_in_bytes}
    counted["arguments and outputs"] = counted["arguments"] + memory.output_size_in_bytes
    return CompiledProgram(
        name,
        seconds,
        memory.argument_size_in_bytes,
        memory.temp_size_in_bytes,
        memory.output_size_in_bytes,
        memory.alias_size_in_bytes,
        memory.peak_memory_in_bytes,
        expected.program,
        expected.beside - counted[expected.within],
        None if text is None else _collectives(program, text),
        None if text is None else product_flops(text),
    )


def _text(program: jax.stages.Compiled) -> str | None:
    """Return the compiled program as text; None if the compiler cannot print it (some asynchronous collectives)."""
    try:
        return program.as_text()
    except jax.errors.JaxRuntimeError:
        return None


def _collectives(program: jax.stages.Compiled, text: str) -> tuple[Collective, ...]:
    shardings = jax.tree.leaves((program.input_shardings, program.output_shardings))
    meshes = [sharding.mesh for sharding in shardings if isinstance(sharding, NamedSharding)]
    if not meshes or meshes[0].size == 1:
        return ()
    return tuple(collectives(text, dict(meshes[0].shape)))


def check_fits(programs: Sequence[CompiledProgram], hardware: Hardware) -> None:
    """Raise `Refusal` if a program needs more device memory than a plan may fill; the message says what would help."""
    usable = hardware.memory_bytes * hardware.usable_memory
    fullest = max(programs, key=lambda program: program.peak_bytes)
    if fullest.peak_bytes <= usable:
        return
    base = fullest.name.partition("[")[0].rpartition(".")[2]
    estimate, needed = fullest.estimated_bytes, fullest.peak_bytes - fullest.beside_bytes
    counted = "" if estimate is None else f" (plans count {gib(estimate)} for it)"
    raise Refusal(
        f"the step does not fit {hardware.name}: {fullest.name} needs {gib(needed)} according to its compiler"
        f"{counted}, and everything else takes {gib(fullest.beside_bytes)}; a plan may fill {gib(usable)} "
        f"of a device. {_HELP.get(base, _HELP['gradient'])}"
    )


_HELP = {
    "gradient": "Fewer tokens_per_microbatch, remat='full', or a layout that splits the role further would help",
    "forward": "Fewer tokens_per_microbatch, or a layout that splits the role further would help",
    "optimizer update": "offload=(...), or a layout that splits the role's weights over more devices would help",
    "decode": "Fewer rollout.slots, more generation_tensor, or shorter responses would help",
    "prefill": "More generation_tensor, or shorter prompts would help",
}


def compiled_to_json(programs: Sequence[CompiledProgram], hardware: Hardware) -> dict[str, Any]:
    """Return the programs as printed by `--json`, whether all fit, and the names of programs that do not fit."""
    usable = hardware.memory_bytes * hardware.usable_memory
    rows = [
        {
            **asdict(program),
            "compiled_bytes": program.compiled_bytes,
            "peak_bytes": program.peak_bytes,
            "seconds_at_best": program.seconds_at_best(hardware),
        }
        for program in programs
    ]
    peak = max(program.peak_bytes for program in programs)
    large = [program.name for program in programs if program.peak_bytes > usable]
    return {"programs": rows, "peak_bytes": peak, "usable_bytes": usable, "fits": not large, "does_not_fit": large}

"""Programs of a plan, compiled: what the chip's own compiler says of their memory and of what they send."""

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
"""Programs that a run compiles for several sizes; the largest stands for them."""


@dataclass(frozen=True)
class CompiledProgram:
    """One program, compiled for one device of the plan's hardware. Bytes are per device.

    Attributes:
      name: `role.program[sizes]`.
      alias_bytes: Outputs that take the memory of donated arguments.
      needed_bytes: Most of all these that there is at a time, which the compiler compares with its chip's memory; on
        TPUs less than `compiled_bytes`, as their temporaries are counted with those that took their place. 0
        of a compiler that does not count it, whose `compiled_bytes` are taken for it.
      estimated_bytes: Bytes that plans count for `compiled_bytes`; None of a program that they do not count.
      beside_bytes: Bytes of all else that is in memory while it runs, by the plan.
      collectives: Largest first; None where the compiler cannot print the program.
      flops: Operations of a device's matrix products, those inside kernels left out; None where collectives are.
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
        """Arguments, temporaries, and outputs that alias nothing."""
        return self.argument_bytes + self.temporary_bytes + self.output_bytes - self.alias_bytes

    @property
    def peak_bytes(self) -> float:
        """All that is in a device's memory while the program runs."""
        return (self.needed_bytes or self.compiled_bytes) + self.beside_bytes

    def seconds_at_best(self, hardware: Hardware) -> float:
        """Seconds of multiplying, of reading arguments and writing outputs, and of receiving, one beside another.

        All are at the chip's peaks: its roofline.
        """
        multiplied = (self.flops or 0) / hardware.matmul_flops_per_s
        moved = sum(each.bytes for each in self.collectives or ())
        in_memory = (self.argument_bytes + self.output_bytes) / hardware.memory_bytes_per_s
        return max(multiplied, in_memory, moved / hardware.link_bytes_per_s)


def largest(names: Sequence[str]) -> list[str]:
    """Names without those that serve smaller sizes of what another does."""
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
    """Compile the programs, the largest of each kind.

    Args:
      options: Flags of the compiler that a run has in its environment, from `topology.compiler_options`.
      progress: Told which program is compiled next, how many are done, and how many there are.

    Raises:
      Refusal: A program that the compiler refuses, such as for lack of memory.
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
    except Exception as error:  # Mosaic's and Triton's have classes of their own
        raise Refusal(f"{name} does not compile for this hardware: {str(error).partition(chr(10))[0]}") from error
    seconds = time.perf_counter() - start
    memory, text = program.memory_analysis(), _text(program)
    assert memory is not None, "a compiler of accelerators says what a program needs"
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
    """The program as its compiler prints it; None where it cannot, as some with asynchronous collectives."""
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
    """Raise `Refusal` if a program needs more than a plan may fill of a device, with what would help."""
    usable = hardware.memory_bytes * hardware.usable_memory
    fullest = max(programs, key=lambda program: program.peak_bytes)
    if fullest.peak_bytes <= usable:
        return
    base = fullest.name.partition("[")[0].rpartition(".")[2]
    estimate, needed = fullest.estimated_bytes, fullest.peak_bytes - fullest.beside_bytes
    counted = "" if estimate is None else f" (plans count {gib(estimate)} for it)"
    raise Refusal(
        f"the step does not fit {hardware.name}: {fullest.name} needs {gib(needed)} by its compiler's "
        f"word{counted}, and {gib(fullest.beside_bytes)} is there beside it; a plan may fill {gib(usable)} "
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
    """Programs as `--json` prints them, whether all of them fit, and the names of those that do not."""
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

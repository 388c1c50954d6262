"""Report of compiled programs: their memory and collectives, and the program that needs the most memory."""

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from jaxrlhf.planner.compiled import CompiledProgram
from jaxrlhf.planner.hardware import Hardware
from jaxrlhf.planner.hlo import Collective
from jaxrlhf.planner.report import LOOK, machines, seconds_text

_GIB, _MIB = 2**30, 2**20
_SMALL = 0.16 * _MIB
"""Bytes below which a collective is left out of the table."""

_NAME_WIDTH = 16
"""Smallest width of a program's name, in terminal columns."""


def compiled_report(programs: Sequence[CompiledProgram], hardware: Hardware) -> RenderableType:
    """Return the tables of programs and collectives, and a sentence on the program that needs the most memory."""
    title = f"compiled for {hardware.devices} devices ({machines(hardware)}), GiB per device"
    table = Table(title=title, padding=(0, 1, 0, 0), **LOOK)
    table.add_column("program", overflow="fold", min_width=_NAME_WIDTH)  # narrowed before figures are truncated
    for heading in ("compile s", "args", "temp", "out", "all", "plan", "beside", "TFLOP", "least s"):
        table.add_column(heading, justify="right", no_wrap=True)
    for program in programs:
        fresh = program.output_bytes - program.alias_bytes
        parts = [program.argument_bytes, program.temporary_bytes, fresh, program.compiled_bytes]
        estimated = "" if program.estimated_bytes is None else f"{program.estimated_bytes / _GIB:.2f}"
        table.add_row(
            program.name,
            f"{program.seconds:.1f}",
            *(f"{size / _GIB:.2f}" for size in parts),
            estimated,
            f"{program.beside_bytes / _GIB:.2f}",
            "" if program.flops is None else f"{program.flops / 1e12:.3g}",
            seconds_text(program.seconds_at_best(hardware)),
        )
    received = Table(title="received by each device", show_header=False, **LOOK)
    received.add_column(no_wrap=True)
    received.add_column()
    for program in programs:
        if text := collectives_text(program.collectives):
            received.add_row(program.name, text)
    moved: list[RenderableType] = [received, Text()] if received.row_count else []
    fullest = max(programs, key=lambda program: program.peak_bytes)
    usable = hardware.memory_bytes * hardware.usable_memory
    return Group(
        table,
        Text(),
        *moved,
        Text(
            f"fullest: {fullest.name}, {fullest.peak_bytes / _GIB:.1f} of the {usable / _GIB:.1f} GiB that a plan may "
            f"fill; all {len(programs)} programs compiled in {sum(program.seconds for program in programs):.0f} s"
        ),
    )


def collectives_text(found: Sequence[Collective] | None) -> str:
    """Return collectives as text, such as `28 all-gather over fsdp 12.3 GiB`."""
    if found is None:
        return "the compiler cannot print this program"
    parts = []
    for each in found:
        if each.bytes >= _SMALL:
            over = "+".join(each.axes) or "no axis"
            parts.append(f"{each.count} {each.kind} over {over} {_size(each.bytes)}")
    return ", ".join(parts)


def _size(number: int) -> str:
    return f"{number / _GIB:.2f} GiB" if number >= 0.1 * _GIB else f"{number / _MIB:.1f} MiB"

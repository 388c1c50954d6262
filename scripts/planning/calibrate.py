"""Measurement of the devices of this machine, for `python -m jaxrlhf.plan --hardware FILE`.

    python -m scripts.planning.calibrate [--out FILE] [--devices N] [--seconds S] [--multihost]

The command is the same for CPU, GPU and TPU. `JAX_NUM_CPU_DEVICES=8` splits a CPU into eight devices. With
`--multihost` it is started once on every host, and also measures the network.
"""

from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from jaxrlhf.config import CommandLine, Refusal, run_command
from jaxrlhf.config.cli.hosts import join_hosts
from jaxrlhf.config.cli.outputs import check_file

if TYPE_CHECKING:
    import jax

MOST_SECONDS = 600


def main() -> None:
    """Run the command."""
    command = CommandLine(
        prog="python -m scripts.planning.calibrate",
        description="Measure the devices that JAX sees.",
        examples=[("--out mine.json", "for jaxrlhf plan --hardware mine.json")],
    )
    command.add_argument("--out", default="hardware.json", metavar="FILE", help="to write; default: %(default)s")
    command.add_argument("--devices", type=int, metavar="N", help="how many to use; default: all")
    command.add_argument(
        "--seconds",
        type=float,
        default=4.0,
        metavar="S",
        help="about how long each figure is measured, without compilation; default: %(default)s",
    )
    command.add_argument("--multihost", action="store_true", help="join all hosts on which this command was started")
    flags = command.parse_args()
    _check(flags)

    import jax

    if flags.multihost:
        join_hosts()
    devices = jax.devices()
    if (flags.devices or 0) > len(devices):
        raise Refusal(
            f"--devices {flags.devices} was asked for and JAX sees {len(devices)} {devices[0].platform} devices; "
            f"give fewer, or on CPU start with JAX_NUM_CPU_DEVICES={flags.devices}"
        )
    _measure(devices[: flags.devices], flags)


def _check(flags: Namespace) -> None:
    check_file("--out", Path(flags.out), ".json")
    if not 0 < flags.seconds <= MOST_SECONDS:
        raise Refusal(f"--seconds must be above 0 and at most {MOST_SECONDS}, got {flags.seconds}")
    if flags.devices is not None and flags.devices < 1:
        raise Refusal(f"--devices must be 1 or more, got {flags.devices}")
    if flags.devices is not None and flags.multihost:
        raise Refusal("--devices and --multihost were both given; several hosts use all of their devices")


def _measure(devices: Sequence["jax.Device"], flags: Namespace) -> None:
    import jax
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from jaxrlhf.planner.hardware import save_hardware
    from jaxrlhf.tracking import SettingsTable, default_console, say
    from jaxrlhf.tracking.console import is_live
    from scripts.planning.calibration.calibrate import FIGURES, calibrate, datasheet, measured_rows

    console = default_console()
    columns = (TextColumn("{task.description:<15}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not is_live(console)) as bars:
        bar = bars.add_task("", total=len(FIGURES))
        measured = calibrate(
            devices,
            seconds_per_figure=flags.seconds,
            progress=lambda figure, done, total: bars.update(bar, description=figure, completed=done, total=total),
        )
    if jax.process_index() > 0:
        return  # every process has measured; the first one reports
    save_hardware(measured, flags.out)
    say(f"{measured.source}\n")
    console.print(SettingsTable(measured_rows(measured, datasheet(devices))))
    say(f"\nwrote {flags.out}; plan with it:\n  python -m jaxrlhf.plan --config NAME --hardware {flags.out}")


if __name__ == "__main__":
    run_command(main)

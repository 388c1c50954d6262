"""Terminal output of a run: a line per step, a bar for the run, and bars for its long phases."""

import math
import os
import sys
from collections.abc import Mapping, Sequence

from rich.console import Console, ConsoleOptions, RenderResult
from rich.padding import Padding
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.table import Table
from rich.text import Text

# Metrics of a step's line, and the formats of their values.
COLUMNS: Mapping[str, str] = {
    "supervised/loss": "loss {:.4f}",
    "preference/loss": "loss {:.4f}",
    "preference/accuracy": "ranked right {:.3f}",
    "steps/loss": "loss {:.4f}",
    "score/mean": "score {:.3f}",
    "eval/accuracy_at_start": "accuracy before {:.3f}",
    "eval/accuracy": "accuracy {:.3f}",
    "eval/loss": "held-out loss {:.4f}",
    "response/length_mean": "length {:.1f}",
    "kl/ref": "kl {:.4f}",
    "throughput/generated_tokens_per_s": "generates {:,.0f} tokens/s",
    "time/step_s": "{:.2f} s/step",
}
PLAIN_WIDTH = 120
"""Width in characters of tables in logs and notebooks."""
MIN_NOTE_WIDTH = 40
"""Smallest width in characters of notes next to their rows."""


class SettingsTable:
    """Table of settings, from rows of (section, name, value, note).

    A section is named once, and a blank line follows the section. Notes that do not fit are printed below their
    rows.
    """

    def __init__(self, rows: Sequence[tuple[str, str, object, str]], *, title: str | None = None) -> None:
        self._rows, self._title = rows, title

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        columns = list(zip(*((section, name, str(value)) for section, name, value, _ in self._rows), strict=True))
        width = sum(max(map(len, column), default=0) + 2 for column in columns)
        yield from self._wide() if options.max_width - width >= MIN_NOTE_WIDTH else self._narrow()

    def _wide(self) -> RenderResult:
        table = Table(title=self._title, title_justify="left", box=None, pad_edge=False, header_style="bold")
        for heading in ("section", "setting"):
            table.add_column(heading, no_wrap=True)
        table.add_column("value", justify="right", no_wrap=True)
        table.add_column("note", style="dim")
        for number, (section, name, value, note) in enumerate(self._rows):
            if number and self._starts_section(number):
                table.add_row()
            cells = (section if self._starts_section(number) else "", name, str(value), note)
            table.add_row(*map(Text, cells))
        yield table

    def _narrow(self) -> RenderResult:
        if self._title is not None:
            yield Text(self._title, style="italic")
        width = max(len(name) for _, name, _, _ in self._rows)
        for number, (section, name, value, note) in enumerate(self._rows):
            if self._starts_section(number):
                yield Text(f"{chr(10) if number else ''}{section}", style="bold")
            yield Text(f"  {name:<{width}}  {value}")
            if note:
                yield Padding(Text(note, style="dim"), (0, 0, 0, 6))

    def _starts_section(self, number: int) -> bool:
        return number == 0 or self._rows[number - 1][0] != self._rows[number][0]


class RunConsole:
    """Progress display of a run, and a logger of its metrics.

    On a terminal, bars stay below the lines. Elsewhere (continuous integration, files, notebooks) there are only
    the lines.

    Args:
      steps: Number of steps of the whole run; 0 shows no bar of steps.
      first_step: Number of steps that were done before the run was resumed.
      columns: Metrics in the line of a step, with the formats of their values; absent metrics are left out.
      console: Console to print to; None is standard output.
    """

    def __init__(
        self,
        *,
        steps: int,
        first_step: int = 0,
        columns: Mapping[str, str] = COLUMNS,
        console: Console | None = None,
    ) -> None:
        self._steps = steps
        self._columns = columns
        self._console = console or default_console()
        self._bars: Progress | None = None
        self._phase_bars: dict[str, TaskID] = {}
        if is_live(self._console):
            self._bars = Progress(
                TextColumn("{task.description:<10}"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
                TimeRemainingColumn(),
                console=self._console,
                refresh_per_second=4,
            )
            self._run_bar = self._bars.add_task("steps", total=steps, completed=first_step, visible=steps > 0)
            self._bars.start()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Print the line of a step and move the bar."""
        shown = [
            text.format(metrics[name])
            for name, text in self._columns.items()
            if name in metrics and math.isfinite(metrics[name])
        ]
        width = len(str(self._steps))
        self.print(Text("  ".join([f"step {step:>{width}}/{self._steps}", *shown])))
        if self._bars:
            self._bars.update(self._run_bar, completed=step)

    def progress(self, phase: str, done: int, total: int) -> None:
        """Move the bar of a phase; the bar appears with the first call and disappears when all is done."""
        if not self._bars:
            return
        if phase not in self._phase_bars:
            self._phase_bars[phase] = self._bars.add_task(f"  {phase}", total=total)
        self._bars.update(self._phase_bars[phase], completed=done, total=total)
        if done >= total:
            self._bars.remove_task(self._phase_bars.pop(phase))

    def print(self, content: SettingsTable | Table | Text | str) -> None:
        """Print above the bars; square brackets in a text are not read as markup."""
        if isinstance(content, SettingsTable | Table):
            self._console.print(content)
        else:
            self._console.print(content, markup=False, highlight=False, soft_wrap=True)

    def close(self) -> None:
        """Stop the bars, and leave their last state on the screen."""
        if self._bars:
            self._bars.stop()

    def __enter__(self) -> "RunConsole":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class BytesBar:
    """Progress bar of bytes read or written; on a terminal only. A context manager.

    Attributes:
      total: Number of all bytes; 0 until it is known.
    """

    def __init__(self, label: str) -> None:
        console = default_console()
        columns = (TextColumn(label), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
        self._bars = Progress(*columns, console=console, transient=True, disable=not is_live(console))
        self._bar = self._bars.add_task("", total=None)
        self.total = 0

    def __call__(self, done: int, total: int) -> None:
        self.total = total
        self._bars.update(self._bar, completed=done, total=total)

    def __enter__(self) -> "BytesBar":
        self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bars.stop()


class _Output(Console):
    """Console that lets the program continue after a broken pipe; the run's files have the whole output."""

    def on_broken_pipe(self) -> None:
        self.quiet = True
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # so that `print` works, too


def default_console() -> Console:
    """Return a console for standard output. Without a terminal it is wide enough for tables and never redrawn."""
    console = _Output()
    return console if console.file.isatty() else _Output(width=PLAIN_WIDTH, force_interactive=False)


def say(text: str) -> None:
    """Print a text unchanged, without markup and in lines of any length."""
    default_console().print(text, markup=False, highlight=False, soft_wrap=True)


def is_live(console: Console) -> bool:
    """Return whether the console can redraw its printed lines."""
    return console.is_terminal and console.is_interactive and not console.is_jupyter

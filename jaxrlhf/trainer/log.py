"""Log of a phase: metrics, samples, learning curve and timeline."""

import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import MappingProxyType
from typing import Any

from jaxrlhf.tracking import (
    Call,
    JsonLines,
    Logger,
    MetricsWriter,
    RunConsole,
    Sample,
    SampleFile,
    StepCalls,
    TimelineFile,
    TrackedRun,
    Trackers,
    read_samples,
    save_learning_curve,
    save_step_picture,
    show_samples,
    time_spent,
    time_table,
    typical,
)
from jaxrlhf.tracking.files import CURVE, EVALUATION, METRICS, PROFILE, SAMPLES, TIMELINE, TIMELINE_PICTURE
from jaxrlhf.tracking.records import read_records
from jaxrlhf.trainer.failures import writing


def last_metrics(directory: Path) -> dict[str, float]:
    """Return the finite metrics of the last step in a run's folder."""
    if not (directory / METRICS).exists():
        return {}
    last = deque(read_records(directory / METRICS), maxlen=1)
    return {name: value for record in last for name, value in record.items() if name != "step" and value is not None}


class PhaseLog:
    """Log of one phase of a run.

    Args:
      directory: Folder of the log's files.
      steps: Number of steps of the phase.
      first_step: Steps done before the phase was resumed; records of later steps are removed from the files.
      loggers: The user's loggers, in addition to the built-in ones; not closed here.
      trackers: Names of tracking services that receive metrics and samples.
      settings: Configuration in JSON types, for the trackers.
      start_s: Start of the phase on the clock of `time.perf_counter`, before data and models are read; None is now.
    """

    def __init__(
        self,
        directory: Path,
        *,
        steps: int,
        first_step: int,
        loggers: Sequence[Logger] = (),
        trackers: Sequence[str] = (),
        settings: Mapping[str, Any] = MappingProxyType({}),
        start_s: float | None = None,
    ) -> None:
        resumed = first_step or None
        self._directory = directory
        metrics = JsonLines(directory / METRICS, resumed_step=resumed)
        self._loggers = loggers
        self._samples = SampleFile(directory / SAMPLES, resumed_step=resumed)
        self._evaluation = SampleFile(directory / EVALUATION, resumed_step=resumed)
        self._timeline = TimelineFile(directory / TIMELINE, resumed=resumed is not None)
        tracked = TrackedRun(settings.get("name", directory.name), directory, settings, resumed)
        self._trackers = Trackers(trackers, tracked)
        # Last: the console shows progress bars from here on, and a refused file would leave them on the screen.
        self.console = RunConsole(steps=steps, first_step=first_step)
        self._metrics = MetricsWriter([metrics, self._trackers, self.console])
        self._ready_s = time.perf_counter()
        self._start_s = self._ready_s if start_s is None else start_s
        self._steps: list[StepCalls] = []
        self._outside: list[Call] = []
        self._compiled: dict[str, float] = {}

    def step(self, number: int, metrics: Mapping[str, float]) -> None:
        """Log the metrics of a step."""
        self._compiled = {name: value for name, value in metrics.items() if name.startswith("compile/")}
        with writing(self._directory / METRICS):
            self._metrics.log(number, metrics)
        for logger in self._loggers:
            logger.log(number, metrics)

    def rollout(self, samples: Sequence[Sample]) -> None:
        """Write the responses that a step was trained on."""
        with writing(self._directory / SAMPLES):
            self._samples.add(samples)
        self._trackers.samples("samples", samples)

    def evaluation(self, samples: Sequence[Sample]) -> None:
        """Write the answers to the held-out problems."""
        with writing(self._directory / EVALUATION):
            self._evaluation.add(samples)
        self._trackers.samples("evaluation", samples)

    def calls(self, calls: Sequence[Call]) -> None:
        """Write calls that ran outside of steps to the timeline."""
        with writing(self._directory / TIMELINE):
            self._timeline.append(calls)
        self._outside += calls

    def step_calls(self, step: StepCalls) -> None:
        """Write calls that ran in a step to the timeline."""
        with writing(self._directory / TIMELINE):
            self._timeline.append(step.calls)
        self._steps.append(step)

    def profile_folder(self, number: int) -> Path:
        """Return the folder of a step's profiler traces."""
        return self._directory / PROFILE / f"step_{number}"

    def finish(self, *, title: str, show: int) -> None:
        """Draw the learning curve, print `show` of the last answers, and show where the time went."""
        with writing(self._directory / CURVE):
            curve = save_learning_curve(self._directory / METRICS, self._directory / CURVE, title=title)
        answered = self._directory / EVALUATION
        last = answered if answered.stat().st_size else self._directory / SAMPLES
        if last.stat().st_size:
            show_samples(read_samples(last, n=show))
        self.console.print(f"learning curve: {curve}")
        if self._steps:
            self._show_time(title)

    def _show_time(self, title: str) -> None:
        """Print the time table, and draw the timeline of a typical step."""
        clock = {"start_s": self._start_s, "ready_s": self._ready_s, "end_s": time.perf_counter()}
        lines = time_spent(self._steps, self._outside, **clock)
        compiled = (
            "XLA so far: {compile/count:.0f} programs in {compile/seconds:.1f} s, "
            "{compile/loaded:.0f} of them loaded from the compilation cache"
        )
        steady = "the only step" if len(self._steps) == 1 else "the first step, which compiles, is not in the median"
        first = f"the first step ended {self._steps[0].end_s - self._start_s:.0f} s after the start"
        caption = f"{first}\n{compiled.format_map(self._compiled)}\n{steady}"
        self.console.print(time_table(lines, title=f"{title}: where the time went", caption=caption))
        step = typical(self._steps)
        with writing(self._directory / TIMELINE_PICTURE):
            picture = save_step_picture(step, self._directory / TIMELINE_PICTURE, title=title)
        everything = self._directory / TIMELINE
        self.console.print(
            f"timeline of step {step.number}: {picture}; of all steps: {everything} (open in ui.perfetto.dev)"
        )

    def close(self) -> None:
        """Close every file, even if closing one of them fails."""
        with writing(self._directory), ExitStack() as stack:
            for file in (self._timeline, self._evaluation, self._samples, self._metrics):
                stack.callback(file.close)

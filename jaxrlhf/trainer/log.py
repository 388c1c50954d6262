"""The log of a phase: metrics, samples, the curve, and where the time went."""

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
    """Metrics of the last step in a run's folder, without those that were not finite."""
    if not (directory / METRICS).exists():
        return {}
    last = deque(read_records(directory / METRICS), maxlen=1)
    return {name: value for record in last for name, value in record.items() if name != "step" and value is not None}


class PhaseLog:
    """The log of one phase of a run.

    Args:
      directory: Folder of its files.
      steps: Steps of the phase.
      first_step: Steps already done when the phase was resumed; what was logged after it is cut off.
      loggers: The user's loggers, beside the built-in ones; they are not closed here.
      trackers: Names of services that take metrics and samples.
      settings: Configuration in JSON's types, for them.
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
        # Last: from here on its bars are on the screen, and a file that is refused would leave them there.
        self.console = RunConsole(steps=steps, first_step=first_step)
        self._metrics = MetricsWriter([metrics, self._trackers, self.console])
        self._start_s = time.perf_counter()
        self._steps: list[StepCalls] = []
        self._outside: list[Call] = []
        self._compiled: dict[str, float] = {}

    def step(self, number: int, metrics: Mapping[str, float]) -> None:
        """Log the numbers of a step."""
        self._compiled = {name: value for name, value in metrics.items() if name.startswith("compile/")}
        with writing(self._directory / METRICS):
            self._metrics.log(number, metrics)
        for logger in self._loggers:
            logger.log(number, metrics)

    def rollout(self, samples: Sequence[Sample]) -> None:
        """Keep the responses that a step was trained on."""
        with writing(self._directory / SAMPLES):
            self._samples.add(samples)
        self._trackers.samples("samples", samples)

    def evaluation(self, samples: Sequence[Sample]) -> None:
        """Keep the answers to the held-out problems."""
        with writing(self._directory / EVALUATION):
            self._evaluation.add(samples)
        self._trackers.samples("evaluation", samples)

    def calls(self, calls: Sequence[Call]) -> None:
        """Keep calls that ran outside of steps."""
        with writing(self._directory / TIMELINE):
            self._timeline.append(calls)
        self._outside += calls

    def step_calls(self, step: StepCalls) -> None:
        """Keep calls that ran in a step."""
        with writing(self._directory / TIMELINE):
            self._timeline.append(step.calls)
        self._steps.append(step)

    def profile_folder(self, number: int) -> Path:
        """Folder of the traces of a step."""
        return self._directory / PROFILE / f"step_{number}"

    def finish(self, *, title: str, show: int) -> None:
        """Draw the curve, print some of the last answers, and show where the time went."""
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
        """The table of the seconds, and the picture of a typical step."""
        lines = time_spent(self._steps, self._outside, start_s=self._start_s, end_s=time.perf_counter())
        compiled = (
            "XLA so far: {compile/count:.0f} programs in {compile/seconds:.1f} s, "
            "{compile/loaded:.0f} of them loaded from the compilation cache"
        )
        steady = "the only step" if len(self._steps) == 1 else "the first step, which compiles, is not in the median"
        caption = f"{compiled.format_map(self._compiled)}\n{steady}"
        self.console.print(time_table(lines, title=f"{title}: where the time went", caption=caption))
        step = typical(self._steps)
        with writing(self._directory / TIMELINE_PICTURE):
            picture = save_step_picture(step, self._directory / TIMELINE_PICTURE, title=title)
        everything = self._directory / TIMELINE
        self.console.print(
            f"timeline of step {step.number}: {picture}; of all: {everything} (opens in ui.perfetto.dev)"
        )

    def close(self) -> None:
        """Close every file, also if one of them fails to."""
        with writing(self._directory), ExitStack() as stack:
            for file in (self._timeline, self._evaluation, self._samples, self._metrics):
                stack.callback(file.close)

"""The loop around an algorithm's step: evaluate, log, save, resume, stop when asked."""

import importlib
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from jaxrlhf.tracking.run_log import RunLog

from jaxrlhf.batch import Problem
from jaxrlhf.checkpoint import Checkpoints
from jaxrlhf.config import Algorithm, Config
from jaxrlhf.controller.evaluation import evaluate
from jaxrlhf.controller.step import Metrics, StepInput, StepResult
from jaxrlhf.data import Loader
from jaxrlhf.tracking import CompileCounter, peak_memory_bytes
from jaxrlhf.workers import Roles, Span

_PHASE = {
    "generate_sequences": "generate",
    "compute_reward": "reward",
    "compute_log_prob": "prepare",
    "compute_ref_log_prob": "prepare",
    "compute_values": "prepare",
    "update_actor": "update",
    "update_critic": "update",
}
"""Which part of a step's time each verb belongs to."""

OnStep = Callable[[int, Metrics], None]


@dataclass
class Loop:
    """One stage of a run.

    Attributes:
      config: Of the stage.
      roles: What the step calls.
      loader: Where its problems come from.
      held_out: Problems to evaluate on; empty evaluates nothing.
      checkpoints: Of the stage.
      log: Metrics, samples and progress.
      on_step: Called after every step with its number and metrics.
      interrupted: Set when the run shall save and end after the step in progress.
    """

    config: Config
    roles: Roles
    loader: Loader
    held_out: Sequence[Problem]
    checkpoints: Checkpoints
    log: RunLog
    on_step: OnStep | None = None
    interrupted: threading.Event = field(default_factory=threading.Event)

    def run(self) -> bool:
        """Steps from where the stage stands to its end; False if it was interrupted before."""
        step = resolve_dataflow(self.config.algorithm)
        compiled = CompileCounter()
        done, state = self._resume()
        self.log.begin(done, self.config.steps)
        for index in range(done, self.config.steps):
            before = self._evaluate() if index == 0 else {}
            self.roles.timeline.take()
            start = time.perf_counter()
            problems = self.loader.next()
            result = step(self.roles, StepInput(self.config, problems, index, state))
            metrics = {**result.metrics, **self._timing(time.perf_counter() - start, result)}
            state, number = result.state, index + 1
            due = self.config.evaluation.every_steps
            if number == self.config.steps or (due and number % due == 0):
                metrics |= self._evaluate()
            if before:
                metrics["eval/accuracy_at_start"] = before["eval/accuracy"]
            metrics |= {"compile/count": float(compiled.count), "memory/peak_bytes": float(peak_memory_bytes())}
            self.log.step(number, metrics, problems, result)
            if self.on_step is not None:
                self.on_step(number, metrics)
            stop = self.interrupted.is_set()
            due = self.config.checkpoint.every_steps
            if stop or number == self.config.steps or (due and number % due == 0):
                self._save(number, state, metrics)
            if stop and number < self.config.steps:
                self.checkpoints.wait()
                return False
        self.checkpoints.wait()
        return True

    def _evaluate(self) -> Metrics:
        if not self.held_out:
            return {}
        start = time.perf_counter()
        metrics, _, _ = evaluate(self.roles, self.held_out)
        return {**metrics, "time/eval_s": time.perf_counter() - start}

    def _timing(self, step_s: float, result: StepResult) -> Metrics:
        spans: list[Span] = self.roles.timeline.take()
        phases = dict.fromkeys(dict.fromkeys(_PHASE.values()), 0.0)
        for span in spans:
            phases[_PHASE[span.verb]] += span.end_s - span.start_s
        relayout_s = self.roles.actor.worker.take_relayout_s()
        phases["generate"] -= relayout_s
        times = {f"time/{phase}_s": seconds for phase, seconds in phases.items()}
        generated = result.metrics.get("tokens/generated", 0.0)
        trained = sum(value for name, value in result.metrics.items() if name.endswith("/tokens"))
        return {
            **times,
            "time/step_s": step_s,
            "time/relayout_s": relayout_s,
            "throughput/generated_tokens_per_s": generated / max(phases["generate"], 1e-9),
            "throughput/trained_tokens_per_s": trained / max(phases["update"], 1e-9),
        }

    def _save(self, number: int, state: dict[str, float], metrics: Metrics) -> None:
        host = {"step": number, "state": state, "loader": self.loader.state(), "counters": self.roles.counters()}
        metric = metrics.get("eval/accuracy")
        self.checkpoints.save(number, self.roles.trees(), host, metric=metric)

    def _resume(self) -> tuple[int, dict[str, float]]:
        latest = self.checkpoints.latest()
        if latest is None:
            return 0, self.config.algorithm.initial_state()
        trees, host = self.checkpoints.restore(latest, self.roles.trees())
        self.roles.load(trees, host["counters"])
        self.loader.restore(host["loader"])
        return latest, host["state"]


def resolve_dataflow(algorithm: Algorithm) -> Callable[..., StepResult]:
    """The step function that an algorithm's settings name as `module:function`."""
    module, _, function = algorithm.dataflow.partition(":")
    return getattr(importlib.import_module(module), function)


@contextmanager
def stop_on_sigterm(event: threading.Event) -> Iterator[None]:
    """Within the block SIGTERM sets `event`; outside the main thread signals are left alone."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = signal.signal(signal.SIGTERM, lambda *_: event.set())
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)

"""Training loop around an algorithm's step: evaluates, logs, saves, resumes, and stops on request."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, get_args

import numpy as np

from jaxrlhf.batch import Problem
from jaxrlhf.batching.transfer_protocol import Part, parts_of
from jaxrlhf.checkpoint import Checkpoints, Damaged, Item
from jaxrlhf.config import Config, Refusal, function_of, to_json
from jaxrlhf.dataflows.batches.scored import ScoredRollout, mean_scores
from jaxrlhf.dataflows.step import Metrics, StepResult, value_of
from jaxrlhf.single_controller.pools import Roles
from jaxrlhf.tracking import Call, StepCalls
from jaxrlhf.trainer.evaluation import HeldOutSet, evaluations
from jaxrlhf.trainer.failures import DiskFull, afterwards, writing
from jaxrlhf.trainer.log import PhaseLog
from jaxrlhf.trainer.samples import to_samples
from jaxrlhf.trainer.schedule import Synchronous
from jaxrlhf.trainer.signals import Stop

OnStep = Callable[[int, Metrics], None]


@dataclass
class Loop:
    """Training loop of one phase of a run.

    Attributes:
      config: Configuration of the phase.
      roles: Roles that the step calls.
      schedule: Runs the algorithm's steps.
      held_out: Problems to evaluate on; empty evaluates nothing.
      sets: Further problems to evaluate on.
      checkpoints: Checkpoints of the phase.
      log: Function that opens the phase's log, given the number of steps already done.
      decode: Function from token ids to text.
      prompt_lengths: Lengths in tokens of all prompts that the phase may generate from; the programs for these lengths
        are compiled before the first step.
      on_step: Function called after every step with its number and metrics.
      stop: Request to save and end after the step in progress.
    """

    config: Config
    roles: Roles
    schedule: Synchronous
    held_out: Sequence[Problem]
    checkpoints: Checkpoints
    log: Callable[[int], PhaseLog]
    decode: Callable[[Sequence[int]], str]
    sets: Sequence[HeldOutSet] = ()
    prompt_lengths: Sequence[int] = ()
    on_step: OnStep | None = None
    stop: Stop = field(default_factory=Stop)
    _task: str = field(default="", init=False)
    _parts: dict[str, Part] = field(init=False)
    _other_calls: list[Call] = field(init=False, default_factory=list)
    """Calls that an evaluation waited for, of responses for a later step; the next step counts their time."""

    def __post_init__(self) -> None:
        self._parts = parts_of(role.worker_class for role in self.config.all_roles.values())

    def run(self) -> bool:
        """Run the remaining steps; return False if a stop was requested before the last step."""
        done, state = self._resume()
        self.stop.step = done + 1
        with self._telling_what_is_kept():
            log = self.log(done)
            # A save in progress may still complete after an error.
            with (
                afterwards("closing the log", log.close),
                afterwards("the pending save", self._wait_for_save),
            ):
                if self.prompt_lengths and done < self.config.steps:
                    with self._naming_step(done + 1):
                        self._task = "compiling generation"
                        self.roles.actor.compile_generation(self.prompt_lengths).result()
                for number in range(done + 1, self.config.steps + 1):
                    self.stop.step = number
                    with self._naming_step(number):
                        state, metrics = self._step(number, state, log)
                        save = self.stop.asked or _due(number, self.config.saving.every_steps or 0, self.config.steps)
                        if save:
                            self._save(number, state, metrics)
                    if save and self.stop.asked and number < self.config.steps:  # without a save, the next step saves
                        return False
                log.calls(self.roles.timeline.take())
                log.finish(title=self.config.name, show=5)
        return True

    def doing(self) -> str:
        """Return what the controller does at the moment, for messages."""
        return f"in step {self.stop.step} of {self.config.name}, while {self._task or 'starting'}"

    @contextmanager
    def _telling_what_is_kept(self) -> Iterator[None]:
        """Add a note to a `DiskFull` of the block: the last complete checkpoint, and how to continue."""
        try:
            with writing(self.checkpoints.directory.parent):
                yield
        except DiskFull as full:
            latest = self.checkpoints.latest()
            kept = "no checkpoint is complete" if latest is None else f"the last complete checkpoint is step {latest}"
            full.add_note(
                f"{kept}, and later steps are lost; free disk space, or copy the workdir to another disk, then "
                "repeat the command"
            )
            raise

    @contextmanager
    def _naming_step(self, number: int) -> Iterator[None]:
        """Add a note to any exception of the block: the step, and the task at that moment."""
        try:
            yield
        except Exception as error:
            error.add_note(f"in step {number} of {self.config.name}, while {self._task}")
            raise

    def _step(self, number: int, state: dict[str, float], log: PhaseLog) -> tuple[dict[str, float], Metrics]:
        """Run one step of the algorithm, with evaluation and logging around it."""
        before = self._evaluate(0, log) if number == 1 else {}
        self._task = "loading data"
        calls = self.roles.timeline.take()
        log.calls(calls)
        evaluating = self._times(calls)  # not part of the step, except for the weights that the evaluation had sent
        sent = {name: value for name, value in evaluating.items() if name.startswith("transfer/")}
        with self._profiled(number, log):
            start, busy_s = time.perf_counter(), self.roles.timeline.busy_s()
            collected, returned = self.schedule.step(number - 1, state, doing=self._doing)
            result = self._checked(returned)
            self._task = "writing responses"
            self._keep_responses(number, collected, result, log)  # models may still be in training
            by_source = self._observe(collected)
            self._task = "updating models"
            result = result.with_updates()
            step = StepCalls(number, start, time.perf_counter(), tuple(self.roles.timeline.take()))
            idle = _idle_shares(busy_s, self.roles.timeline.busy_s(), step.seconds)
        self._task = "logging"
        log.step_calls(step)
        timing = self._timing(step, collected, result) | idle
        metrics = {**result.metrics, **by_source, **sent, **self.schedule.metrics(), **timing}
        if _due(number, self.config.evaluation.every_steps, self.config.steps):
            metrics |= self._evaluate(number, log)
        if "eval/accuracy" in before:  # an algorithm's own evaluation may not report it
            metrics["eval/accuracy_at_start"] = before["eval/accuracy"]
        self._task = "logging"
        log.step(number, metrics)
        if self.on_step is not None:
            self._task = "calling on_step"
            self.on_step(number, metrics)
        return result.state, metrics

    def _doing(self, task: str) -> None:
        self._task = task

    def _checked(self, result: object) -> StepResult:
        """Return the result of an algorithm's `learn`, or raise `Refusal` if it is not a `StepResult`."""
        if not isinstance(result, StepResult):
            raise Refusal(
                f"learn of {type(self.config.algorithm).__name__} returned a {type(result).__name__}, expected a "
                "StepResult; see jaxrlhf.dataflows.step, and jaxrlhf.dataflows.grpo for an example"
            )
        return result

    def _keep_responses(self, number: int, collected: Any, result: StepResult, log: PhaseLog) -> None:
        if isinstance(collected, ScoredRollout):
            measured = {"logp_BT": result.logp_BT, "entropy_BT": value_of(result.entropy_BT)}
            wanted = self.config.token_records.responses
            log.rollout(to_samples(number, collected, self.decode, **measured, with_tokens=wanted))

    def _observe(self, collected: Any) -> Metrics:
        """Report the scores to the loader for online selection, and return the mean score of each data source."""
        online = self.config.selection.online
        if not (isinstance(collected, ScoredRollout) and (online or self.config.sources)):
            return {}
        score_P = mean_scores(collected)
        if online:
            prompts = [problem.prompt_id for problem in collected.problems]
            sampled = collected.generated_scores or dict(zip(prompts, score_P.tolist(), strict=True))
            self.schedule.loader.observe({prompt: score for prompt, score in sampled.items() if np.isfinite(score)})
        scores: dict[str, list[float]] = {}
        for problem, score in zip(collected.problems, score_P, strict=True):
            if problem.source and np.isfinite(score):
                scores.setdefault(problem.source, []).append(float(score))
        means = {f"source/{name}/score": float(np.mean(given)) for name, given in scores.items()}
        return means | {f"source/{name}/prompts": float(len(given)) for name, given in scores.items()}

    def _profiled(self, number: int, log: PhaseLog) -> AbstractContextManager[None]:
        """Profile the devices within the block, if `profile_steps` contains this step."""
        wanted = number in self.config.profile_steps
        return self.roles.profiled(log.profile_folder(number)) if wanted else nullcontext()

    def _evaluate(self, number: int, log: PhaseLog) -> Metrics:
        if not (self.held_out or self.sets):
            return {}
        self._task = "evaluating"
        log.calls(self.roles.timeline.take())
        start = time.perf_counter()
        with self.schedule.paused():
            self._other_calls = self.roles.timeline.take()
            log.calls(self._other_calls)
            return self._evaluated(number, log, start)

    def _evaluated(self, number: int, log: PhaseLog, start: float) -> Metrics:
        metrics, algorithm = Metrics(), self.config.algorithm
        if self.held_out and algorithm.evaluation is not None:
            metrics |= function_of(algorithm, "evaluation")(self.roles, self.config, self.held_out)
        answered = self.held_out if self.config.answers_held_out else ()
        seconds = time.perf_counter() - start
        for own, answers in evaluations(self.roles, self.config, answered, self.sets, self.decode):
            metrics |= own
            seconds = time.perf_counter() - start
            log.evaluation(to_samples(number, answers, self.decode))
        return {**metrics, "time/eval_s": seconds}

    def _times(self, calls: Sequence[Call]) -> Metrics:
        """Return seconds by part of the step, peak device bytes, and the hosts' further metrics since the last call."""
        times = dict.fromkeys([f"time/{part}_s" for part in get_args(Part)], 0.0)
        for call in calls:
            times[f"time/{self._parts[call.verb]}_s"] += call.end_s - call.start_s
        measured, peaks = self.roles.take_metrics()
        inside_s = measured.pop("time/relayout_s", 0.0)  # the hybrid engine switches within generation
        times["time/generate_s"] -= inside_s
        times["time/relayout_s"] += inside_s
        memory: Metrics = {}
        for verb, count in peaks.items():
            name = f"memory/{self._parts[verb]}_bytes"
            memory[name] = max(float(count), memory.get(name, 0.0))
        return {**times, **measured, **memory}

    def _timing(self, step: StepCalls, collected: Any, result: StepResult) -> Metrics:
        times = self._times([*self._other_calls, *step.calls])
        self._other_calls = []
        # Only the policy's tokens count: a critic's tokens would raise the throughput without training the policy more.
        rates = {}
        if "actor/tokens" in result.metrics:
            rates["throughput/trained_tokens_per_s"] = result.metrics["actor/tokens"] / times["time/update_s"]
        if "tokens/generated" in result.metrics and times["time/generate_s"]:  # 0 if the responses are of earlier steps
            rates["throughput/generated_tokens_per_s"] = result.metrics["tokens/generated"] / times["time/generate_s"]
        return {"time/step_s": step.seconds, **times, **rates}

    def _save(self, number: int, state: dict[str, float], metrics: Metrics) -> None:
        self._task = "saving"
        adapters = {role: to_json(one.lora) for role, one in self.config.trained.items() if one.lora is not None}
        host = {"step": number, "state": state, **self.schedule.state(), "counters": self.roles.counters()}
        host["adapters"] = adapters  # config.json has their scale, too; an export compares the two
        metric = metrics.get("eval/accuracy")
        if metric is None and "eval/loss" in metrics:
            metric = -metrics["eval/loss"]
        with writing(self.checkpoints.directory):
            self.checkpoints.save(number, self._items(), host, metric=metric)

    def _items(self, step: int | None = None) -> dict[str, Item]:
        """Return all checkpoint items; with `step`, only the schedule's items that the existing checkpoint contains."""
        kept = self.schedule.items()
        if step is not None:
            held = self.checkpoints.holds(step)
            kept = {name: item for name, item in kept.items() if name in held}
        return {**self.roles.items(), **kept}

    def _wait_for_save(self) -> None:
        with writing(self.checkpoints.directory):
            self.checkpoints.wait()

    def _resume(self) -> tuple[int, dict[str, float]]:
        latest = self.checkpoints.latest()
        if latest is None:
            return 0, self.config.algorithm.initial_state()
        if latest > self.config.steps:
            raise Refusal(
                f"{self.checkpoints.directory} is at step {latest}, but steps={self.config.steps} of "
                f"{self.config.name}; raise steps, or choose another workdir"
            )
        try:
            host = self.checkpoints.restore(latest, self._items(latest))
            self.roles.set_counters(host["counters"])
            self.schedule.restore(host)
        except Damaged as damage:
            self.checkpoints.pass_over(latest, damage)
            return self._resume()
        return latest, self.config.algorithm.resumed_state(host["state"])


def _due(number: int, every_steps: int, steps: int) -> bool:
    """Return True at the last step and every `every_steps` steps; 0 is only the last step."""
    return number == steps or (every_steps > 0 and number % every_steps == 0)


def _idle_shares(before_s: Mapping[str, float], after_s: Mapping[str, float], seconds: float) -> Metrics:
    """Return, by pool, the share of a step in which no call ran on the pool's devices."""
    return {
        f"time/{lane}_idle_share": max(0.0, 1.0 - (busy_s - before_s.get(lane, 0.0)) / seconds)
        for lane, busy_s in after_s.items()
    }

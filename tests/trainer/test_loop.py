"""The loop around a step: what it does while models are trained, and in what order things are said and saved."""

import errno
import re
import sys
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from math import nan
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from made_steps import done, problem, rollout_of

from jaxrlhf.batch import Scores
from jaxrlhf.config import GRPO, Arithmetic, Checkpointing, Config, EvaluationSet, FromScratch, Rollout, Selection
from jaxrlhf.dataflows.collect import responses
from jaxrlhf.tracking import Call
from jaxrlhf.trainer.evaluation import HeldOutSet
from jaxrlhf.trainer.failures import DiskFull, one_message, writing
from jaxrlhf.trainer.log import PhaseLog
from jaxrlhf.trainer.loop import Loop
from jaxrlhf.trainer.schedule import Synchronous
from jaxrlhf.trainer.signals import Stop

PATIENCE_S = 60.0
PROMPTS, COPIES = 2, 2


class Log:
    """Notes in `events` what a stage's log is given, and in `written` that responses were."""

    def __init__(self, events: list, written: threading.Event) -> None:
        self._events, self._written = events, written

    def rollout(self, samples) -> None:
        self._events.append(("responses", samples[0].step, len(samples)))
        self._written.set()

    def step(self, number, metrics) -> None:
        self._events.append(("metrics", number, metrics["actor/loss"]))

    def close(self) -> None:
        self._events.append("closed")

    def __getattr__(self, name):
        return lambda *_, **__: None


class Roles:
    """Actor, reward and reference; the update runs on a thread until the step's responses are written."""

    def __init__(self, events: list, written: threading.Event, fails_at: int | None) -> None:
        self.actor = self.reward = self.reference = self.timeline = self
        self._events, self._written, self._fails_at = events, written, fails_at
        self._thread = ThreadPoolExecutor(1)
        self._updates, self._calls = 0, []

    def generate_sequences(self, problems, sampling, *, responses_per_prompt, seed) -> Future:
        mask_BT = np.ones((PROMPTS * COPIES, 3), bool)
        mask_BT[:, 0] = False
        return done(rollout_of(mask_BT, [0, 0, 1, 1]))

    def compute_reward(self, problems, rollout) -> Future:
        score_B = np.array([0, 1, 1, 0], np.float32)
        return done(Scores(score_B, np.ones(4, bool), {}))

    def compute_ref_log_prob(self, rollout) -> Future:
        return done(rollout.result().sampler_logp_BT)

    compute_log_prob = compute_ref_log_prob

    def update_actor(self, minibatches, *, objective, settings) -> Future:
        self._updates += 1
        number = self._updates
        self._events.append(("dispatched", number))

        def end() -> dict[str, float]:
            assert self._written.wait(PATIENCE_S), "the responses wait for the update's metrics"
            self._written.clear()
            self._events.append(("trained", number))
            self._calls.append(Call("actor", "update_actor", 0.0, 1.0, "pool"))
            if number == self._fails_at:
                raise FloatingPointError("actor: gradient norms are [nan]")
            return {"actor/loss": float(number), "actor/tokens": 8.0}

        return self._thread.submit(end)

    def take(self) -> list[Call]:
        calls, self._calls = self._calls, []
        return [*calls, Call("actor", "generate_sequences", 0.0, 1.0, "pool")]

    def take_metrics(self):
        return {}, {}

    def items(self):
        return {}

    counters = busy_s = items


def run(
    events: list,
    *,
    fails_at: int | None = None,
    saved: int | None = None,
    algorithm=GRPO,
    held_out=(),
    stop=None,
    directory=Path(),
    log=None,
    every_steps=0,
    online=False,
    **changed,
) -> bool:
    written = threading.Event()
    config = Config(
        name="made",
        algorithm=algorithm(responses_per_update=PROMPTS * COPIES),
        steps=2,
        selection=Selection(online=online),
        checkpoint=Checkpointing(every_steps=every_steps, keep_best=0),
        model=FromScratch(),
        data=Arithmetic(),
        rollout=Rollout(prompts_per_step=PROMPTS, responses_per_prompt=COPIES),
    )
    roles = Roles(events, written, fails_at)
    parts = {
        "roles": roles,
        "loader": SimpleNamespace(next=lambda: [problem(number) for number in range(PROMPTS)], state=dict),
        "checkpoints": SimpleNamespace(
            directory=directory / "checkpoints",
            latest=lambda: saved,
            save=lambda number, *_, **__: events.append(("saved", number)),
            wait=lambda: None,
        ),
        "log": lambda done: Log(events, written) if log is None else log(written),
    }
    for name, value in changed.items():  # as `roles__compute_reward`
        part, _, attribute = name.partition("__")
        if attribute:
            setattr(parts[part], attribute, value)
        else:
            parts[part] = value
    schedule = Synchronous(config, parts["roles"], parts.pop("loader"))
    return Loop(config=config, schedule=schedule, held_out=held_out, decode=str, stop=stop or Stop(), **parts).run()


def test_responses_are_written_down_while_the_models_are_trained():
    events = []
    assert run(events)
    step = [("dispatched", 1), ("responses", 1, 4), ("trained", 1), ("metrics", 1, 1.0)]
    later = [("dispatched", 2), ("responses", 2, 4), ("trained", 2), ("metrics", 2, 2.0)]
    assert [event for event in events if event[0] != "saved"] == [*step, *later, "closed"]
    assert events.index(("saved", 2)) > events.index(("metrics", 2, 2.0))


def test_an_update_that_diverged_ends_its_step_before_anything_is_saved_or_generated():
    events = []
    with pytest.raises(FloatingPointError, match=r"gradient norms are \[nan\]"):
        run(events, fails_at=1)
    # What the policy had answered is there to be looked at, as the message says.
    assert events == [("dispatched", 1), ("responses", 1, 4), ("trained", 1), "closed"]


@pytest.mark.parametrize("asked_in", ["save", "check"])
def test_whoever_asks_to_stop_loses_no_step(asked_in):
    """A signal may come at any moment: while a step is saved, or right after it was seen that none is asked for."""
    events, stop = [], Stop()
    if asked_in == "check":

        class Late(Stop):
            looks = 0

            @property
            def asked(self) -> bool:
                self.looks += 1
                return self.looks > 1

            @asked.setter
            def asked(self, value: bool) -> None: ...

        stop = Late()
        assert run(events, stop=stop)
    else:
        saves = {"checkpoints__save": lambda number, *_, **__: (events.append(("saved", number)), stop.ask())}
        assert not run(events, stop=stop, every_steps=1, **saves)
    trained, saved = ([event[1] for event in events if event[0] == name] for name in ("trained", "saved"))
    assert trained[-1] == saved[-1]


@dataclass(frozen=True)
class Dynamic(GRPO):
    """Learns from some of the groups that it sampled, as dynamic sampling does."""

    collect = staticmethod(
        lambda roles, work: replace(responses(roles, work), generated_scores={0: 0.5, 7: 1.0, 8: nan})
    )


@pytest.mark.parametrize(("algorithm", "known"), [(GRPO, {0: 0.5, 1: 0.5}), (Dynamic, {0: 0.5, 7: 1.0})])
def test_the_loader_is_told_of_every_group_that_was_sampled(algorithm, known):
    told = []
    run([], algorithm=algorithm, online=True, loader__observe=told.append)
    assert told == [known, known]


def test_a_stage_is_not_asked_for_fewer_steps_than_are_done():
    events = []
    with pytest.raises(ValueError, match="checkpoints is at step 3, but steps=2 of made; raise steps"):
        run(events, saved=3)
    assert not events


@dataclass(frozen=True)
class CountsWords(GRPO):
    """With an evaluation of its own, which knows of no accuracy."""

    evaluation = staticmethod(lambda roles, config, problems: {"eval/words": float(len(problems))})


def test_an_evaluation_of_ones_own_has_metrics_of_its_own():
    events = []
    assert run(events, algorithm=CountsWords, held_out=[problem(7)])
    assert [event[1:] for event in events if event[0] == "metrics"] == [(1, 1.0), (2, 2.0)]


def test_the_best_checkpoint_is_of_the_lowest_loss_where_no_answer_is_scored():
    ranked = []

    @dataclass(frozen=True)
    class Loses(GRPO):
        evaluation = staticmethod(lambda roles, config, problems: {"eval/loss": 0.7})

    def save(number, *_, metric):
        ranked.append((number, metric))

    run([], algorithm=Loses, held_out=[problem(7)], checkpoints__save=save)
    assert ranked == [(2, -0.7)]


def test_further_sets_are_answered_beside_an_evaluation_of_ones_own():
    told, asked = [], HeldOutSet(EvaluationSet(name="further", data=Arithmetic()), [problem(n) for n in range(4)])
    scores = Scores(np.array([0, 1, 1, 0], np.float32), np.ones(4, bool), {"arithmetic": np.float32([0, 1, 1, 0])})
    run(
        [],
        algorithm=CountsWords,
        held_out=[problem(7)],
        sets=[asked],
        roles__compute_reward=lambda problems, rollout: done(scores),
        on_step=lambda number, metrics: told.append(metrics),
    )
    assert (told[-1]["eval/words"], told[-1]["eval/further/accuracy"]) == (1.0, 0.5)


def test_metrics_that_cannot_be_gone_on_with_leave_no_bars_on_the_screen(tmp_path, monkeypatch):
    consoles = []
    monkeypatch.setattr("jaxrlhf.trainer.log.RunConsole", lambda **settings: consoles.append(settings))
    (tmp_path / "metrics.jsonl").write_text('no json\n{"step": 1}\n')
    with pytest.raises(ValueError, match=r"metrics\.jsonl, line 1, is not a JSON object"):
        PhaseLog(tmp_path, steps=3, first_step=2)
    assert not consoles


@dataclass(frozen=True)
class ForgetsToReturn(GRPO):
    learn = staticmethod(lambda roles, work, batch: None)


def test_a_step_that_returns_something_else_is_told_what_to_return():
    with pytest.raises(ValueError, match="learn of ForgetsToReturn returned a NoneType, expected a StepResult"):
        run([], algorithm=ForgetsToReturn)


def fails(error: Exception):
    def call(*_, **__):
        raise error

    return call


@pytest.mark.parametrize(
    ("part", "phase"),
    [
        ("loader__next", "loading data"),
        ("roles__compute_reward", "running the algorithm"),
        ("checkpoints__save", "saving"),
        ("on_step", "calling on_step"),
    ],
)
def test_an_error_says_in_which_step_and_phase_it_came(part, phase):
    with pytest.raises(ZeroDivisionError) as info:
        run([], **{part: fails(ZeroDivisionError("a bug"))})
    step = 2 if part == "checkpoints__save" else 1
    assert info.value.__notes__ == [f"in step {step} of made, while {phase}"]


def test_an_update_that_fails_says_in_which_step_it_was():
    with pytest.raises(FloatingPointError) as info:
        run([], fails_at=2)
    assert info.value.__notes__ == ["in step 2 of made, while updating models"]


FULL = OSError(errno.ENOSPC, "No space left on device")
LIMITED = OSError(errno.EFBIG, "File too large")
FROM_TENSORSTORE = ValueError("RESOURCE_EXHAUSTED: Failed to write: No space left on device [os_error_code='28']")


class FileLog(PhaseLog):
    """A stage's log that lets the made-up update continue."""

    def __init__(self, directory: Path, written: threading.Event) -> None:
        super().__init__(directory, steps=2, first_step=0)
        self._written = written

    def rollout(self, samples) -> None:
        self._written.set()
        super().rollout(samples)


@pytest.mark.parametrize(
    ("target", "error", "named"),
    [
        ("jaxrlhf.trainer.log.JsonLines.log", FULL, "metrics.jsonl"),
        ("jaxrlhf.trainer.log.SampleFile.add", LIMITED, "samples.jsonl"),
        ("jaxrlhf.trainer.log.save_learning_curve", FULL, "curve.png"),
        ("", FROM_TENSORSTORE, "checkpoints"),
    ],
)
def test_a_full_disk_is_said_in_one_message(target, error, named, tmp_path, monkeypatch, capsys):
    if target:
        monkeypatch.setattr(target, fails(error))
    monkeypatch.setattr("jaxrlhf.trainer.failures.os._exit", sys.exit)
    compiled = partial(tuple, [dict.fromkeys(["compile/count", "compile/seconds", "compile/loaded"], 0.0), {}])
    saving = {} if target else {"checkpoints__save": fails(error)}
    with pytest.raises(SystemExit) as end, one_message():
        run(
            [],
            directory=tmp_path,
            log=partial(FileLog, tmp_path),
            roles__take_metrics=compiled,
            **saving,
        )
    shown = capsys.readouterr().err
    assert end.value.code == 1
    assert end.value.__context__.__cause__ is error
    assert re.match(rf"error: no space left to write {tmp_path}/{named}: [0-9.]+ of [0-9]+ MB are free there\n", shown)
    assert "no checkpoint is complete, and later steps are lost; free disk space, or copy the workdir to" in shown


def test_a_full_disk_says_what_the_run_goes_on_from():
    class Steps(SimpleNamespace):
        steps = 0

    made = Steps(directory=Path("checkpoints"), latest=lambda: made.steps or None, wait=lambda: None)

    def save(number, *_, **__):
        if number == 2:
            raise FULL
        made.steps = number

    made.save = save
    with pytest.raises(DiskFull) as info:
        run([], checkpoints=made, every_steps=1)
    assert info.value.__notes__[0] == "in step 2 of made, while saving"
    assert info.value.__notes__[1].startswith("the last complete checkpoint is step 1, and later steps are lost")


def test_two_failures_that_come_from_each_other_end_a_write(tmp_path):
    """Calls of a host that died fail one while the other is handled, and the other way round."""
    first, second = RuntimeError("host 1 died"), RuntimeError("host 1 died, too")
    first.__context__, second.__context__ = second, first
    with pytest.raises(RuntimeError) as raised, writing(tmp_path):
        raise first
    assert raised.value is first
    second.__context__, first.__context__ = None, OSError(errno.ENOSPC, "no space left")
    with pytest.raises(DiskFull), writing(tmp_path):
        raise first

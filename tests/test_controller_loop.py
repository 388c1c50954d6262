"""The loop around a step: what it does while models are trained, and in what order things are said and saved."""

import threading
import time
from collections import defaultdict
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import SimpleNamespace

import numpy as np
import pytest
from made_steps import problem, rollout_of

from jaxrlhf.batch import Scores
from jaxrlhf.config import GRPO, Arithmetic, Checkpointing, Config, Evaluation, FromScratch, Rollout
from jaxrlhf.controller.ending import Stop
from jaxrlhf.controller.log import StageLog
from jaxrlhf.controller.loop import Loop, resolve_dataflow
from jaxrlhf.controller.step import StepResult
from jaxrlhf.workers.group import Lane, Postponed, Timeline

PATIENCE_S = 60.0
PROMPTS, COPIES = 2, 2
CHOSEN_BT = np.ones((PROMPTS * COPIES, 3), bool)
CHOSEN_BT[:, 0] = False


class Log:
    """Notes in `events` what a stage's log is given, and in `written` that responses were."""

    def __init__(self, events: list, written: threading.Event) -> None:
        self._events, self._written = events, written

    def rollout(self, samples) -> None:
        self._events.append(("responses", samples[0].step, len(samples)))
        self._written.set()

    def step_calls(self, step) -> None:
        self._events.append(("calls", step.number, step))

    def step(self, number, metrics) -> None:
        self._events.append(("metrics", number, metrics["actor/loss"]))

    def close(self) -> None:
        self._events.append("closed")

    def __getattr__(self, name):
        return lambda *_, **__: None


class Roles:
    """Actor, reward and reference on one pool and a critic on another.

    The actor's update goes on until the step's responses are written down, and in the steps of `beside` until the
    next generation is asked for. The critic's in step 1 goes on until the second generation has ended.
    """

    def __init__(self, events: list, written: threading.Event, *, fails_at: int | None, beside: tuple) -> None:
        self.timeline, self.postponed = Timeline(), Postponed()
        self.actor = self.reward = self.reference = self.critic = self
        self._events, self._written, self._fails_at, self._beside = events, written, fails_at, beside
        self._pool, self._other = (Lane(name, self.timeline, self.postponed) for name in ("pool", "other"))
        self._asked, self._generated = defaultdict(threading.Event), defaultdict(threading.Event)
        self._generations = self._updates = self._values = 0

    def generate_sequences(self, problems, sampling, *, responses_per_prompt, seed):
        self._generations += 1
        self._events.append(("asked", self._generations))
        self._asked[self._generations].set()
        return self._pool.submit("actor", "generate_sequences", self._generate, self._generations)

    def _generate(self, number):
        self._events.append(("generated", number))
        self._generated[number].set()
        return rollout_of(CHOSEN_BT, [0, 0, 1, 1])

    def compute_reward(self, problems, rollout):
        scores = Scores(np.array([0, 1, 1, 0], np.float32), np.ones(4, bool), {})
        return self._pool.submit("reward", "compute_reward", lambda _: scores, rollout)

    def compute_ref_log_prob(self, rollout):
        return self._pool.submit("reference", "compute_ref_log_prob", lambda there: there.sampler_logp_BT, rollout)

    def update_actor(self, minibatches, *, objective, settings):
        self._updates += 1
        self._events.append(("dispatched", self._updates))
        return self._pool.submit("actor", "update_actor", self._update, self._updates)

    def _update(self, number) -> dict[str, float]:
        assert self._written.wait(PATIENCE_S), "the responses wait for the update's metrics"
        self._written.clear()
        if number in self._beside:
            assert self._asked[number + 1].wait(PATIENCE_S), "the next generation waits for the update's metrics"
        self._events.append(("trained", number))
        if number == self._fails_at:
            raise FloatingPointError("actor: gradient norms are [nan]")
        return {"actor/loss": float(number), "actor/tokens": 8.0}

    def update_critic(self):
        self._values += 1
        return self._other.submit("critic", "update_critic", self._update_critic, self._values)

    def _update_critic(self, number) -> dict[str, float]:
        if number == 1:
            assert self._generated[2].wait(PATIENCE_S), "the actor's pool waits for the critic's"
        return {"actor/loss": float(number)}

    def take_metrics(self):
        return self._pool.then(lambda: ({}, {}))

    @contextmanager
    def profiled(self, folder):
        self._events.append("tracing")
        yield
        self._events.append("traced")

    def items(self):
        return {}

    counters = items

    def close(self) -> None:
        for lane in (self._pool, self._other):
            lane.close()


def run(
    events: list,
    *,
    fails_at: int | None = None,
    beside: tuple = (),
    saved: int | None = None,
    algorithm=GRPO,
    held_out=(),
    stop=None,
    on_step=None,
    draw=lambda: [problem(number) for number in range(PROMPTS)],
    **settings,
) -> bool:
    written = threading.Event()
    config = Config(
        name="made",
        algorithm=algorithm(responses_per_update=PROMPTS * COPIES),
        steps=2,
        model=FromScratch(),
        data=Arithmetic(),
        rollout=Rollout(prompts_per_step=PROMPTS, responses_per_prompt=COPIES),
    )
    roles = Roles(events, written, fails_at=fails_at, beside=beside)
    loop = Loop(
        config=replace(config, **settings),
        roles=roles,
        loader=SimpleNamespace(next=draw, state=dict),
        held_out=held_out,
        checkpoints=SimpleNamespace(
            directory="checkpoints",
            latest=lambda: saved,
            save=lambda number, *_, **__: events.append(("saved", number)),
            wait=lambda: None,
        ),
        log=lambda done: Log(events, written),
        decode=str,
        on_step=on_step,
        stop=stop or Stop(),
    )
    try:
        return loop.run()
    finally:
        roles.close()


def of(events: list, *kinds: str) -> list:
    """The events of these kinds; what a call notes while it runs has no fixed place among what the loop does."""
    return [event for event in events if event in kinds or event[0] in kinds]


def test_responses_are_written_down_while_the_models_are_trained():
    events = []
    assert run(events)
    step = [("dispatched", 1), ("responses", 1, 4), ("trained", 1), ("metrics", 1, 1.0)]
    later = [("dispatched", 2), ("responses", 2, 4), ("trained", 2), ("metrics", 2, 2.0)]
    assert of(events, "dispatched", "responses", "trained", "metrics", "closed") == [*step, *later, "closed"]
    assert events.index(("saved", 2)) > events.index(("metrics", 2, 2.0))


def test_the_next_generation_is_dispatched_while_the_models_are_trained():
    events = []
    assert run(events, steps=4, beside=(1, 2, 3))
    ends = [(("asked", n + 1), ("trained", n), ("metrics", n, float(n))) for n in (1, 2, 3, 4)]
    inner = [event for end in ends for event in end]
    inner.remove(("asked", 5))
    assert of(events, "asked", "trained", "metrics") == [("asked", 1), *inner]


@pytest.mark.parametrize(
    ("what", "last"),
    [
        ({"checkpoint": Checkpointing(every_steps=1, keep_best=0)}, ("saved", 1)),
        ({"evaluation": Evaluation(every_steps=1)}, ("metrics", 1, 1.0)),
        ({"profile_steps": (1,)}, "traced"),
        ({"profile_steps": (2,)}, ("metrics", 1, 1.0)),
    ],
    ids=["saved", "evaluated", "traced", "traced next"],
)
def test_a_step_begins_after_all_that_has_to_come_between(what, last):
    events = []
    assert run(events, **what)
    assert events.index(last) < events.index(("asked", 2))
    if "profile_steps" in what:
        [number] = what["profile_steps"]
        inside = events[events.index("tracing") : events.index("traced")]
        assert {event[1] for event in inside[1:]} == {number} and ("trained", number) in inside


def test_an_update_that_diverged_ends_the_run_before_anything_is_saved_or_generated():
    events = []
    with pytest.raises(FloatingPointError, match=r"gradient norms are \[nan\]") as caught:
        run(events, fails_at=1, beside=(1,))
    # What the policy had answered is there to be looked at, as the message says.
    began = [("asked", 1), ("generated", 1), ("dispatched", 1), ("responses", 1, 4)]
    assert events == [*began, ("asked", 2), ("trained", 1), "closed"]
    assert caught.value.__notes__ == ["raised in actor.update_actor", "at the end of step 1"]


def test_what_a_callback_raises_ends_the_run_and_names_its_step():
    def stopping(number, metrics):
        raise LookupError(f"enough: {metrics['actor/loss']}")

    events = []
    with pytest.raises(LookupError, match=r"enough: 1\.0") as caught:
        run(events, beside=(1,), on_step=stopping)
    assert caught.value.__notes__ == ["at the end of step 1"]
    assert of(events, "metrics", "dispatched", "saved") == [("dispatched", 1), ("metrics", 1, 1.0)]


def test_a_stop_that_is_asked_for_while_models_are_trained_ends_with_the_step_that_has_begun():
    stop, events = Stop(), []
    assert not run(events, steps=4, beside=(1,), stop=stop, on_step=lambda number, _: number == 1 and stop.ask())
    assert stop.step == 2
    assert of(events, "metrics", "saved") == [("metrics", 1, 1.0), ("metrics", 2, 2.0), ("saved", 2)]
    assert of(events, "asked") == [("asked", 1), ("asked", 2)]


def slips_in_the_second_step(roles, work):
    if work.index == 1:
        raise LookupError("a slip")
    return resolve_dataflow(GRPO(responses_per_update=1))(roles, work)


@dataclass(frozen=True)
class Slips(GRPO):
    dataflow = staticmethod(slips_in_the_second_step)


def test_a_step_that_fails_at_once_leaves_the_metrics_of_the_one_before():
    events = []
    with pytest.raises(LookupError, match="a slip"):
        run(events, algorithm=Slips)
    assert of(events, "metrics", "asked") == [("asked", 1), ("metrics", 1, 1.0)]


def test_data_that_ends_leaves_the_metrics_of_the_step_before():
    events, left = [], iter([[problem(0), problem(1)]])
    with pytest.raises(StopIteration):
        run(events, draw=left.__next__)
    assert of(events, "metrics", "asked") == [("asked", 1), ("metrics", 1, 1.0)]


def fail_at_once(roles, work):
    roles.actor.generate_sequences(work.problems, None, responses_per_prompt=COPIES, seed=0).result()
    update = roles._pool.submit("actor", "update_actor", lambda: 1 / 0)
    while not update.done():
        pass
    return StepResult({}, dict(work.state), updates=(update,))


@dataclass(frozen=True)
class FailsAtOnce(GRPO):
    dataflow = staticmethod(fail_at_once)


def test_no_step_begins_once_a_model_is_known_to_have_failed():
    events = []
    with pytest.raises(ZeroDivisionError) as caught:
        run(events, algorithm=FailsAtOnce)
    assert of(events, "asked") == [("asked", 1)]
    assert "at the end of step 1" in caught.value.__notes__


@dataclass(frozen=True)
class WaitsForNothing(GRPO):
    dataflow = staticmethod(lambda roles, work: StepResult({"actor/loss": work.index + 1.0}, dict(work.state)))


def test_steps_that_wait_for_nothing_are_all_written_down_in_order():
    events = []
    assert run(events, steps=3, algorithm=WaitsForNothing)
    assert of(events, "metrics") == [("metrics", 1, 1.0), ("metrics", 2, 2.0), ("metrics", 3, 3.0)]


def train_elsewhere(roles, work):
    """The actor's pool only generates."""
    roles.actor.generate_sequences(work.problems, None, responses_per_prompt=COPIES, seed=0).result()
    return StepResult({}, dict(work.state), updates=(roles.critic.update_critic(),))


@dataclass(frozen=True)
class TrainsElsewhere(GRPO):
    dataflow = staticmethod(train_elsewhere)


def test_calls_belong_to_the_step_that_dispatched_them_and_steps_follow_each_other_without_a_gap():
    events = []
    assert run(events, steps=3, algorithm=TrainsElsewhere)
    steps = [step for _, _, step in of(events, "calls")]
    assert [step.number for step in steps] == [1, 2, 3]
    for step in steps:
        assert [call.verb for call in step.calls] == ["generate_sequences", "update_critic"]
    generated, trained = steps[1].calls[0], steps[0].calls[1]
    assert generated.start_s < trained.end_s, "the second generation waited for the critic"
    assert steps[0].calls[0].end_s <= trained.end_s <= steps[0].end_s
    assert [step.end_s for step in steps[:-1]] == [step.start_s for step in steps[1:]]


def forget_a_call(roles, work):
    """Its generation goes on when all that it reports is there."""
    roles._pool.submit("actor", "generate_sequences", time.sleep, 0.05)
    return StepResult({"actor/loss": 1.0}, dict(work.state))


@dataclass(frozen=True)
class ForgetsACall(GRPO):
    dataflow = staticmethod(forget_a_call)


def test_a_call_that_nobody_waits_for_belongs_to_its_step_too():
    events = []
    assert run(events, steps=3, algorithm=ForgetsACall)
    assert [[call.verb for call in step.calls] for _, _, step in of(events, "calls")] == [["generate_sequences"]] * 3


def test_a_stage_is_not_asked_for_fewer_steps_than_are_done():
    events = []
    with pytest.raises(ValueError, match="checkpoints is at step 3, past the 2 steps of made; raise them"):
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


def test_metrics_that_cannot_be_gone_on_with_leave_no_bars_on_the_screen(tmp_path, monkeypatch):
    consoles = []
    monkeypatch.setattr("jaxrlhf.controller.log.RunConsole", lambda **settings: consoles.append(settings))
    (tmp_path / "metrics.jsonl").write_text('no json\n{"step": 1}\n')
    with pytest.raises(ValueError, match=r"metrics\.jsonl, line 1, is not a JSON object"):
        StageLog(tmp_path, steps=3, first_step=2)
    assert not consoles


@dataclass(frozen=True)
class ForgetsToReturn(GRPO):
    dataflow = staticmethod(lambda roles, work: None)


def test_a_step_that_returns_something_else_is_told_what_to_return():
    with pytest.raises(ValueError, match="the step of ForgetsToReturn returned a NoneType; it has to return a StepRes"):
        run([], algorithm=ForgetsToReturn)

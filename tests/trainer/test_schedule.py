"""Schedules: the default one, and that another is a few lines."""

from concurrent.futures import Future
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from made_steps import Made, done, problem, rollout_of

from jaxrlhf.config import GRPO, Arithmetic, Config, FromScratch, KLInLoss, Pool, RayCluster, ReMax, Rollout
from jaxrlhf.single_controller.ray.failure import HostDied, HostId
from jaxrlhf.trainer.schedule import Synchronous

PROMPTS, COPIES, STEPS = 2, 2, 4


@dataclass
class OneStepOff(Synchronous):
    """Every step learns from what was collected while the step before was learnt from."""

    held: tuple[Any, Any] | None = None

    def step(self, index, state, *, doing):
        work, collected = self.held or self.collected(index, state)
        self.held = self.collected(index + 1, state) if index + 1 < self.config.steps else None
        return collected, self.learn(replace(work, state=state), collected)

    def collected(self, index, state):
        work = self.draw(index, state)
        return work, self.collect(work)


@dataclass
class Counting(Made):
    """An actor that counts its updates, and says so in what it samples."""

    version: int = 0

    def generate_sequences(self, problems, sampling, *, responses_per_prompt, seed):
        rollout = (
            super()
            .generate_sequences(problems, sampling, responses_per_prompt=responses_per_prompt, seed=seed)
            .result()
        )
        return done(replace(rollout, version_BT=np.full_like(rollout.version_BT, self.version)))

    def compute_ref_log_prob(self, rollout):
        return self.compute_log_prob(rollout)

    def update_actor(self, minibatches, *, objective, settings):
        self.version += 1
        return super().update_actor(minibatches, objective=objective, settings=settings)


def run(kind: type[Synchronous]) -> tuple[list[int], list[tuple[int, ...]], list[str]]:
    """Versions that each step's responses were sampled by, prompts in the order they were asked, and tasks."""

    def generate(problems, copies):
        ids = np.repeat([one.prompt_id for one in problems], copies)
        return rollout_of(np.ones((len(ids), 3), bool), ids)

    actor = Counting(generate, lambda rollout: rollout.sequences.token_BT[:, 0])
    config = Config(
        name="made",
        algorithm=GRPO(responses_per_update=PROMPTS * COPIES, kl=KLInLoss()),
        steps=STEPS,
        model=FromScratch(),
        data=Arithmetic(),
        rollout=Rollout(prompts_per_step=PROMPTS, responses_per_prompt=COPIES),
    )
    ids = iter(range(100))
    loader = SimpleNamespace(next=lambda: [problem(next(ids)) for _ in range(PROMPTS)], state=lambda: {"next": 7})
    schedule = kind(config, SimpleNamespace(actor=actor, reward=actor, reference=actor), loader)
    state, versions, tasks = config.algorithm.initial_state(), [], []
    for index in range(STEPS):
        collected, result = schedule.step(index, state, doing=tasks.append)
        [version] = set(collected.rollout.result().version_BT.ravel().tolist())
        versions.append(version)
        state = result.state
    assert schedule.state() == {"loader": {"next": 7}}
    return versions, [asked for asked, _, _ in actor.asked], tasks


def test_synchronous_samples_with_the_newest_weights_and_says_what_it_does():
    versions, asked, tasks = run(Synchronous)
    assert versions == [0, 1, 2, 3]
    assert asked == [(0, 1), (2, 3), (4, 5), (6, 7)]
    assert tasks == ["loading data", "running the algorithm"] * STEPS


def test_one_step_off_is_a_schedule_of_a_few_lines_and_no_algorithm_knows():
    versions, asked, _ = run(OneStepOff)
    assert versions == [0, 0, 1, 2], "the weights of the step before, but for the first"
    assert asked == run(Synchronous)[1], "the same prompts in the same order"


def test_what_was_sampled_before_a_host_died_is_sampled_again_with_what_is_sampled_beside_it():
    asked, failures = [], []

    def generate(problems, sampling, *, responses_per_prompt, seed):
        asked.append((sampling.greedy, responses_per_prompt, seed))
        answer: Future = Future()
        if len(asked) == 2:
            answer.set_exception(HostDied(HostId("drawing"), "rollout.generate_sequences", "died"))
        else:
            answer.set_result(rollout_of(np.ones((len(problems), 3), bool), range(len(problems))))
        return answer

    config = Config(
        name="made",
        algorithm=ReMax(responses_per_update=PROMPTS, kl=None),
        steps=1,
        model=FromScratch(),
        data=Arithmetic(),
        rollout=Rollout(prompts_per_step=PROMPTS),
        cluster=RayCluster(restarts=1),
        pools=(Pool("learning", 1, ("actor", "reward")), Pool("drawing", 1, ("rollout",))),
    )
    loader = SimpleNamespace(next=lambda: [problem(0), problem(1)], state=lambda: 5, restore=failures.append)
    roles = SimpleNamespace(
        actor=SimpleNamespace(generate_sequences=generate),
        reward=SimpleNamespace(compute_reward=lambda *_: Future()),  # waits for a host as its responses do
        relaunch=lambda failed: failures.append(failed.host.pool) or True,
    )
    schedule = Synchronous(config, roles, loader)
    collected = schedule.collect(schedule.draw(0, config.algorithm.initial_state()))
    assert failures == ["drawing", 5]
    assert asked[:2] == asked[2:] and [greedy for greedy, _, _ in asked] == [False, True] * 2
    assert collected.beside.rollout.result() is not None


def test_the_data_position_of_further_data_is_kept_and_given_back():
    seen = []
    loaders = [SimpleNamespace(state=lambda n=n: n, restore=lambda saved, n=n: seen.append((n, saved))) for n in (1, 2)]
    schedule = Synchronous(None, None, *loaders)
    assert schedule.state() == {"loader": 1, "examples": 2}
    schedule.restore({"loader": "here", "examples": "there", "step": 3})
    assert seen == [(1, "here"), (2, "there")]
    schedule.restore({"loader": "here"})  # of a run without further data, which begin now
    assert seen == [(1, "here"), (2, "there"), (1, "here")]
    with pytest.raises(KeyError, match="loader"):
        schedule.restore({})

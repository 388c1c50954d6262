"""Reward functions work on responses that have ended while others are still generated."""

import time
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest
from tiny_runs import get_config

from jaxrlhf.batch import Problem
from jaxrlhf.batching.transfer_protocol import RankCoordinates
from jaxrlhf.config import FunctionReward, Pool, Rewards, Sampling
from jaxrlhf.data.sources import load_problems
from jaxrlhf.data.tokenizer import embedded_tokenizer
from jaxrlhf.engine import Completion
from jaxrlhf.engine.rollout_engine import RolloutEngine
from jaxrlhf.rewards.scorer import Scorer
from jaxrlhf.sharding.mesh import generation_mesh
from jaxrlhf.single_controller.launch import launch
from jaxrlhf.workers import build
from jaxrlhf.workers.build import Phase
from jaxrlhf.workers.reward import Reward
from jaxrlhf.workers.sampler import CompletionFeed, Sampler

WORDS = ("one", "two", "three", "four", "five", "six")
PATIENCE_S = 20.0
FUNCTION = """
from pathlib import Path


def noting(prompt, response, answer, record):
    with open(Path(__file__).with_name("noted"), "a") as file:
        file.write(f"{(prompt, response, answer)}\\n")
    return len(response) / 7 - int(answer)
"""


class Typewriter(RolloutEngine):
    """Answers one request after another, each with the word whose number is its id, and waits before the next."""

    def __init__(self, *args, wait=lambda: None, **kwargs) -> None:
        self.wait = wait

    def update_weights(self, weights):
        pass

    def unload(self):
        pass

    def compile_ahead(self, prompt_lengths):
        pass

    def generate(self, requests, sampling, *, seed, progress=None, on_completion=None):
        completions = []
        for request in requests:
            number = request.request_id % len(WORDS)
            completion = Completion(request.request_id, (1, number), (0.0, 0.0), truncated=False, version=0)
            if on_completion is not None:
                on_completion(completion)
            self.wait()
            completions.append(completion)
        return completions


class Setting:
    """A sampler and a reward worker, the file of what the function was called on, and what was made text."""

    def __init__(self, folder: Path, wait=lambda: None) -> None:
        (folder / "functions.py").write_text(FUNCTION)
        self._note = folder / "noted"
        self.decoded: list[tuple[int, ...]] = []
        self.scorer = Scorer(Rewards(parts=(FunctionReward(f"{folder}/functions.py:noting"),), workers=2))
        self.reward = Reward(self.scorer, RankCoordinates.alone(0, 1), self.decode, lambda *_: None)
        self.feed = CompletionFeed()
        mesh = generation_mesh(get_config().actor.layout, jax.devices()[:1])
        engine = Typewriter(wait=wait)
        self.sampler = Sampler(get_config().model, engine, mesh, mesh, 8, lambda *_: None, self.feed)

    def decode(self, tokens) -> str:
        self.decoded.append(tuple(tokens))
        return WORDS[tokens[-1]]

    def noted(self) -> list[str]:
        return self._note.read_text().splitlines() if self._note.exists() else []

    def generate(self, problems):
        return self.sampler.generate(problems, Sampling(), responses_per_prompt=3, seed=0)


@pytest.fixture
def setting(tmp_path):
    made = Setting(tmp_path)
    with made.scorer:
        yield made


def problems(*, first: int = 0, answer: int = 0) -> list[Problem]:
    return [Problem(n, prompt=f"p{n}", prompt_tokens=(9, n), answer=str(n + answer)) for n in range(first, first + 2)]


def until(reached) -> None:
    end = time.monotonic() + PATIENCE_S
    while not reached():
        assert time.monotonic() < end
        time.sleep(0.005)


def expected(answer: int = 0) -> list[float]:
    return [np.float32(len(word) / 7 - (n // 3 + answer)) for n, word in enumerate(WORDS)]


def test_a_response_is_scored_before_the_next_one_has_ended(tmp_path):
    ended = []

    def wait() -> None:
        ended.append(len(ended) + 1)
        until(lambda: len(setting.noted()) == ended[-1])

    setting = Setting(tmp_path, wait)
    with setting.scorer:
        setting.feed.listen = setting.reward.listen
        rollout = setting.generate(problems())  # comes back only if all are scored on the way
        scores = setting.reward.compute_reward(problems(), rollout)
        assert setting.noted() == [str((f"p{n // 3}", word, str(n // 3))) for n, word in enumerate(WORDS)]
        assert setting.reward.take_metrics() == {"reward/overlapped_fraction": 1.0}
    assert scores.score_B.tolist() == expected() and scores.scorable_B.all()
    assert sorted(setting.decoded) == [(1, n) for n in range(6)]


def test_scores_are_those_of_a_rollout_that_nobody_heard(setting):
    alone = setting.reward.compute_reward(problems(), setting.generate(problems()))
    assert setting.reward.take_metrics() == {"reward/overlapped_fraction": 0.0}
    setting.feed.listen = setting.reward.listen
    heard = setting.reward.compute_reward(problems(), setting.generate(problems()))
    assert alone.score_B.tolist() == heard.score_B.tolist() == expected()
    assert setting.reward._text.cache_info().currsize == 0  # heard or not, texts do not pile up
    assert len(setting.noted()) == 12
    assert setting.reward.take_metrics().keys() == {"reward/overlapped_fraction"}
    assert setting.reward.take_metrics() == {}


def test_rollouts_may_be_scored_in_another_order_and_beside_others_of_the_same_text(setting):
    setting.feed.listen = setting.reward.listen
    rollouts = [setting.generate(problems(answer=answer)) for answer in range(3)]
    for answer in (2, 0):
        scores = setting.reward.compute_reward(problems(answer=answer), rollouts[answer])
        assert scores.score_B.tolist() == expected(answer)
    until(lambda: len(setting.noted()) == 18)  # each once: those of the second rollout were started, and not asked for


def test_a_rollout_that_fails_leaves_nothing_in_the_way(setting):
    setting.feed.listen = setting.reward.listen

    def fail():
        raise FloatingPointError("not finite")

    setting.sampler.engine.wait, wait = fail, setting.sampler.engine.wait
    with pytest.raises(FloatingPointError):
        setting.generate(problems())
    setting.sampler.engine.wait = wait
    scores = setting.reward.compute_reward(problems(), setting.generate(problems()))
    assert scores.score_B.tolist() == expected()


POOLS = {
    "rewards apart": (Pool("policy", 1, ("actor", "reference")), Pool("rest", 1, ("critic", "reward"))),
    "generation apart": (Pool("train", 1, ("actor", "critic", "reference", "reward")), Pool("rest", 1, ("rollout",))),
}


@pytest.mark.parametrize(
    "pools",
    [pytest.param(POOLS["rewards apart"], marks=pytest.mark.slow), POOLS["generation apart"]],
    ids=POOLS,
)
def test_pools_of_one_process_hear_of_each_other(tmp_path, monkeypatch, pools):
    monkeypatch.setattr(build, "Engine", Typewriter)
    (tmp_path / "functions.py").write_text(FUNCTION)
    noted = tmp_path / "noted"
    rewards = Rewards(parts=(FunctionReward(f"{tmp_path}/functions.py:noting"),))
    config = replace(get_config(), pools=pools, devices=None, rewards=rewards, cold_start=None)
    tokenizer = embedded_tokenizer()
    asked = load_problems(config.data, tokenizer, split="train", max_prompt_tokens=64).problems[:4]
    launched = launch(config, tokenizer, progress=lambda *_: None, workdir=None)
    try:
        roles = launched.roles(Phase(config, ("actor", "reward", "rollout"), total_updates=1))
        rollout = roles.actor.generate_sequences(asked, Sampling(), responses_per_prompt=2, seed=0)
        rollout.result()
        until(lambda: noted.exists() and len(noted.read_text().splitlines()) == 8)
        scores = roles.reward.compute_reward(asked, rollout).result()
        assert scores.scorable_B.all() and len(noted.read_text().splitlines()) == 8
        assert roles.take_metrics()[0]["reward/overlapped_fraction"] == 1.0
        roles.close()
    finally:
        launched.close()

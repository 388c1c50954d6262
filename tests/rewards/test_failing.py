"""Reward functions that fail many times in a row stop the run; occasional failures do not."""

import pickle
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import tiny_runs
from made_steps import episodes_of, rollout_of
from reward_calls import run as calls_of
from reward_calls import start

from jaxrlhf import config
from jaxrlhf.batch import Problem
from jaxrlhf.batching.transfer_protocol import RankCoordinates
from jaxrlhf.checkpoint import Checkpoints
from jaxrlhf.config import Checkpointing, Evaluation
from jaxrlhf.episode import EpisodeRecord
from jaxrlhf.rewards import RewardsFailing
from jaxrlhf.rewards.pool import RewardPool
from jaxrlhf.rewards.protocol import Example, Function
from jaxrlhf.rewards.scorer import Scorer
from jaxrlhf.trainer.run import run
from jaxrlhf.trainer.workdir import CHECKPOINTS
from jaxrlhf.workers.reward import Reward

FUNCTIONS = """
import os
import time
from pathlib import Path

from jaxrlhf.rewards import batched


def moody(prompt, response, answer, record):
    if response == "raise":
        raise OSError("the verifier is down")
    if response == "hang":
        time.sleep(1000)
    if response == "crash":
        os._exit(3)
    return {"none": None, "nan": float("nan")}.get(response, 1.0)


def fine(prompt, response, answer, record):
    return 2.0


@batched
def together(prompts, responses, answers, records):
    raise OSError("the service is down")


def breaks(prompt, response, answer, record):
    if Path(__file__).with_name("broken").exists():
        raise OSError("the verifier is down")
    return float(len(response) % 2)
"""


@pytest.fixture(scope="module")
def functions(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("functions") / "functions.py"
    path.write_text(FUNCTIONS)
    return path


def pool_of(functions: Path, *names: str, failures_in_a_row: int, timeout_s: float = 60.0) -> RewardPool:
    wanted = [Function(name, f"{functions}:{name}") for name in names]
    return RewardPool(wanted, workers=1, timeout_s=timeout_s, failures_in_a_row=failures_in_a_row)


def examples(*responses: str) -> list[Example]:
    return [Example("p", response, None, {}) for response in responses]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("response", "says"),
    [
        ("hang", r"timeout: no answer within 0\.5 s"),
        ("crash", "crash: its process exited with status 3"),
        ("raise", "exception: OSError: the verifier is down"),
    ],
)
def test_a_function_that_always_fails_ends_the_pool(functions, response, says):
    with pool_of(functions, "moody", failures_in_a_row=2, timeout_s=0.5 if response == "hang" else 60.0) as pool:
        started = start(pool, examples(*[response] * 20))
        with pytest.raises(RewardsFailing, match=rf"'moody' \(.*functions\.py:moody\) failed on 2 .*{says}") as caught:
            list(pool.outcomes(started))
        assert "rewards.failures_in_a_row" in str(caught.value)
        calls = [call.answer for calls in started for call in calls]
        assert sum(call.exception() is None for call in calls) == 1, "no further call is made"
        with pytest.raises(RewardsFailing):
            start(pool, examples("good"))
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


@pytest.mark.slow
def test_an_answer_resets_the_count_of_failures(functions):
    answers = ["good", "none", "nan"]
    responses = [each for answer in answers for each in ("raise", "crash", answer)] + ["raise", "raise"]
    with pool_of(functions, "moody", failures_in_a_row=3) as pool:
        outcomes = sorted(calls_of(pool, examples(*responses)), key=lambda outcome: outcome.index)
        failed = [
            outcome.failure is not None and outcome.failure.cause in ("exception", "crash") for outcome in outcomes
        ]
        assert failed == [response not in answers for response in responses]
        with pytest.raises(RewardsFailing, match="failed on 3"):
            list(calls_of(pool, examples("raise")))  # in a row with the failures before


def test_failures_are_counted_for_each_function(functions):
    with pool_of(functions, "fine", "moody", failures_in_a_row=4) as pool:
        assert len(list(calls_of(pool, examples("raise", "raise", "raise")))) == 6
        with pytest.raises(RewardsFailing, match="'moody'"):
            list(calls_of(pool, examples("raise")))


def test_a_batch_that_fails_counts_once_for_each_of_its_examples(functions):
    with pool_of(functions, "together", failures_in_a_row=6) as pool:
        assert len(list(calls_of(pool, examples(*"abcde")))) == 5
        with pytest.raises(RewardsFailing, match=r"'together'.* failed on 6"):
            list(calls_of(pool, examples("f", "g")))


def test_zero_failures_in_a_row_never_stops_a_run(functions):
    with pool_of(functions, "moody", failures_in_a_row=0) as pool:
        outcomes = list(calls_of(pool, examples(*["raise"] * 150)))
        assert len(outcomes) == 150 and all(outcome.failure is not None for outcome in outcomes)


def test_scoring_raises_the_error_that_stopped_the_functions(functions):
    rewards = config.Rewards((config.FunctionReward(f"{functions}:moody"),), workers=1, failures_in_a_row=5)
    with Scorer(rewards) as scorer:
        scorer.open_batch()
        for _ in range(10):
            scorer.start("p", lambda: "raise", "7", {})
        with pytest.raises(RewardsFailing, match="failed on 5 responses in a row"):
            scorer.score(["p"] * 10, ["raise"] * 10, ["7"] * 10, [{}] * 10)
    with pytest.raises(ValueError, match="failures_in_a_row"):
        config.Rewards(failures_in_a_row=-1)


def scores(scorer: Scorer, *responses: str):
    rows = len(responses)
    return scorer.score(["p"] * rows, responses, ["7"] * rows, [{}] * rows)


def test_a_function_that_never_gives_a_score_stops_the_run(functions):
    answer, says = "nan", "not-finite: returned nan"
    parts = (
        config.FunctionReward(f"{functions}:moody", weight=0.5),
        config.FunctionReward(f"{functions}:fine", weight=0.0),
    )
    with Scorer(config.Rewards(parts=parts, workers=1, failures_in_a_row=6)) as scorer:
        for _ in range(2):
            assert not scores(scorer, *[answer] * 5).scorable_B.any()
        assert scores(scorer, "good", *[answer] * 4).scorable_B.any()  # resets the count
        for _ in range(2):
            scores(scorer, *[answer] * 5)
        with pytest.raises(
            RewardsFailing, match=rf"the last 15 responses, in 3 batches.* 'moody' \(.*:moody\), {says}"
        ):
            scores(scorer, *[answer] * 5)


def test_environments_that_fail_every_episode_stop_the_run_with_the_error_of_one():
    broken = EpisodeRecord((), (), "environment_error", failure="exception: KeyError: 'prompt' at mine.py:9")
    with Scorer(config.Rewards(parts=(), failures_in_a_row=6)) as scorer:
        reward = Reward(scorer, RankCoordinates(0, {}, ()), str, lambda *done: None)
        problems, nothing_BT = [Problem(0, "p", (1,))] * 3, np.zeros((3, 1))
        turns = episodes_of(nothing_BT, nothing_BT, record_B=np.full(3, broken, object))
        rollout = replace(rollout_of(np.ones((3, 1)), [0, 0, 0]), episodes=turns)
        for _ in range(2):
            assert not reward.compute_reward(problems, rollout).scorable_B.any()
        with pytest.raises(RewardsFailing, match=r"environment, environment_error: .*KeyError: 'prompt' at mine\.py:9"):
            reward.compute_reward(problems, rollout)


@pytest.mark.parametrize(("most", "batches"), [(6, 5), (0, 6)], ids=["few responses", "turned off"])
def test_a_few_responses_without_a_score_do_not_stop_the_run(functions, most, batches):
    rewards = config.Rewards((config.FunctionReward(f"{functions}:moody"),), workers=1, failures_in_a_row=most)
    with Scorer(rewards) as scorer:
        for _ in range(batches):
            assert not scores(scorer, "none").scorable_B.any()


@pytest.mark.slow
@pytest.mark.usefixtures("programs", "undrawn")
def test_a_run_whose_reward_breaks_stops_and_resumes_from_its_checkpoint(functions, tmp_path):
    broken = functions.with_name("broken")
    wanted = replace(
        tiny_runs.get_config(),
        rewards=config.Rewards(parts=(config.FunctionReward(f"{functions}:breaks"),), failures_in_a_row=10),
        cold_start=None,
        steps=2,
        evaluation=Evaluation(every_steps=0, problems=8),
        checkpoint=Checkpointing(every_steps=1),
        workdir=str(tmp_path / "run"),
    )

    def on_step(number, metrics):
        if number == 1:
            broken.touch()

    with pytest.raises(RewardsFailing, match=r"'breaks'.* failed on 10 responses in a row"):
        run(wanted, on_step=on_step)
    assert Checkpoints(tmp_path / "run" / CHECKPOINTS, read_only=True).steps() == [1]
    broken.unlink()
    assert run(wanted).finished
    assert [record["step"] for record in tiny_runs.records(tmp_path / "run" / "metrics.jsonl")] == [1, 2]

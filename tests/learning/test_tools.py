"""Agents learn from scratch: to call a calculator where that is what pays, and to play a game of several turns.

The slow tier has the game of the notebook, in `learning/test_learning.py`. `scripts/learning/agents.py` runs more
seeds.
"""

from dataclasses import replace

import pytest
from tiny_runs import records

import jaxrlhf
from jaxrlhf.config import Checkpointing, Evaluation, Pretrained, Tools, load
from jaxrlhf.trainer.policy import export_policy

pytestmark = [pytest.mark.seeds, pytest.mark.usefixtures("programs", "optimized", "undrawn")]


def run(config, workdir, **changes):
    """Metrics of a run."""
    config = replace(
        config,
        evaluation=Evaluation(every_steps=0, problems=256),
        checkpoint=Checkpointing(every_steps=0, keep_best=0),
        workdir=str(workdir),
        **changes,
    )
    jaxrlhf.run(config)
    return records(workdir / "metrics.jsonl")


@pytest.fixture(scope="module")
def imitates(tmp_path_factory):
    """The policy of the cold start: it guesses seven answers in ten, and calls for the others."""
    folder = tmp_path_factory.mktemp("imitates")
    first = replace(load("tools_arithmetic"), workdir=str(folder / "run")).phases[0]
    jaxrlhf.run(first)
    export_policy(first.folder, folder / "policy")
    return {"model": Pretrained(str(folder / "policy")), "cold_start": None}


def useless(expression: str) -> str:
    """Compute an arithmetic expression.

    Args:
        expression: Such as "47*86".
    """
    return "error"


def assert_guesses_are_wrong(first, workdir):
    """Before, the likeliest answer is a guess and wrong."""
    assert first["eval/accuracy_at_start"] <= 0.1
    sampled = [sample for sample in records(workdir / "samples.jsonl") if sample["step"] == 1]
    guessed = [sample["score"] for sample in sampled if len(sample["episode"]["turns"]) == 1]
    assert len(guessed) > 50 and sum(guessed) <= 0.1 * len(guessed)
    assert first["tool/calls_mean"] < 0.7


def test_products_are_worked_out_by_the_calculator(imitates, tmp_path):
    """After, nearly all call and are right."""
    metrics = run(load("tools_arithmetic"), tmp_path, steps=4, **imitates)
    assert_guesses_are_wrong(metrics[0], tmp_path)
    assert metrics[-1]["tool/calls_mean"] > 0.95
    assert metrics[-1]["eval/accuracy"] >= 0.95


def test_without_an_answer_of_the_tool_products_stay_unknown(imitates, tmp_path):
    tools = Tools(functions=(f"{__file__}:useless",), max_turns=3, observation_tokens=16)
    metrics = run(load("tools_arithmetic"), tmp_path, steps=4, environment=tools, **imitates)
    assert metrics[-1]["eval/accuracy"] < 0.30


def test_the_way_to_the_treasure_is_found_by_playing(tmp_path):
    """Sampled games reach it about as rarely as the demonstrations at first, and nearly always at the end."""
    metrics = run(load("game_treasure"), tmp_path, steps=7)
    assert metrics[0]["score/mean"] <= 0.25
    assert metrics[-1]["score/mean"] >= 0.95 and metrics[-1]["eval/accuracy"] >= 0.95
    assert min(record["episode/turns_mean"] for record in metrics) >= 5


def test_halving_is_learnt_by_guessing(tmp_path):
    """Sampled games find as many numbers as guesses at any that is left, 67.8 % by exact count; then nearly all."""
    metrics = run(load("game_higher_lower"), tmp_path)
    assert abs(metrics[0]["score/mean"] - 0.678) < 0.06
    assert min(record["score/mean"] for record in metrics[-3:]) >= 0.95

"""Agents learn from scratch: to call a calculator where that is what pays, and to play a game of several turns."""

from dataclasses import replace

import pytest
from tiny_runs import records

import jaxrlhf
from jaxrlhf.config import Checkpointing, Evaluation, Tools, load

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("programs", "optimized", "undrawn")]


def run(name, workdir, *, seed, steps, **changes):
    """Metrics of a shipped configuration, a few steps of it."""
    config = replace(
        load(name),
        seed=seed,
        steps=steps,
        evaluation=Evaluation(every_steps=0, problems=256),
        checkpoint=Checkpointing(every_steps=0, keep_best=0),
        workdir=str(workdir),
        **changes,
    )
    jaxrlhf.run(config)
    return records(workdir / "metrics.jsonl")


def useless(expression: str) -> str:
    """Compute an arithmetic expression.

    Args:
        expression: Such as "47*86".
    """
    return "error"


def test_products_are_worked_out_by_the_calculator(tmp_path):
    """Before, answers without a call are wrong; after, nearly all call and are right."""
    metrics = run("tools_arithmetic", tmp_path, seed=0, steps=8)
    first = [sample for sample in records(tmp_path / "samples.jsonl") if sample["step"] == 1]
    guessed = [sample["score"] for sample in first if len(sample["episode"]["turns"]) == 1]
    assert len(guessed) > 50 and sum(guessed) <= 0.1 * len(guessed)
    assert metrics[0]["tool/calls_mean"] < 0.7
    assert metrics[-1]["tool/calls_mean"] > 0.95
    assert metrics[-1]["eval/accuracy"] >= 0.95


def test_without_an_answer_of_the_tool_products_stay_unknown(tmp_path):
    tools = Tools(functions=(f"{__file__}:useless",), max_turns=3, observation_tokens=16)
    metrics = run("tools_arithmetic", tmp_path, seed=0, steps=8, environment=tools)
    assert metrics[-1]["eval/accuracy"] < 0.30


def test_the_way_to_the_treasure_is_found_by_playing(tmp_path):
    """Steps at random reach a treasure that is five to eight steps away in about a tenth of the games."""
    metrics = run("game_treasure", tmp_path, seed=0, steps=24)
    assert metrics[0]["score/mean"] <= 0.2
    assert metrics[0]["episode/turns_mean"] >= 5
    assert metrics[-1]["eval/accuracy"] >= 0.95

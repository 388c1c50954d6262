"""A policy with a vision tower learns from random weights to read pictures; without its own picture it does not.

`scripts/learning/vision.py` draws both from three seeds.
"""

from dataclasses import replace

import pytest
from tiny_runs import records

import jaxrlhf
from jaxrlhf.config import Checkpointing, Evaluation, Shapes, load

pytestmark = [pytest.mark.seeds, pytest.mark.usefixtures("programs", "optimized", "undrawn")]


def run(workdir, *, seed, shuffled=False):
    config = load("grpo_shapes")
    assert isinstance(config.data, Shapes)
    config = replace(
        config,
        data=replace(config.data, shuffled=shuffled),
        seed=seed,
        devices=1,
        evaluation=Evaluation(every_steps=0, problems=256),
        checkpoint=Checkpointing(every_steps=0, keep_best=0),
        workdir=str(workdir),
    )
    jaxrlhf.run(config)
    return records(workdir / "metrics.jsonl")


@pytest.mark.parametrize("seed", range(3))
def test_pictures_are_read_as_they_were_asked_for(seed, tmp_path):
    """Before, most answers are of a hasty look, and wrong."""
    metrics = run(tmp_path, seed=seed)
    assert metrics[0]["eval/accuracy_at_start"] <= 0.5
    assert metrics[-1]["eval/accuracy"] >= 0.9


@pytest.mark.parametrize("seed", range(3))
def test_with_pictures_of_other_questions_there_is_nothing_to_learn(seed, tmp_path):
    """A digit is guessed once in nine times, and half of the questions are for two."""
    metrics = run(tmp_path, seed=seed, shuffled=True)
    assert metrics[-1]["eval/accuracy"] <= 0.2

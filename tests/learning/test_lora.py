"""GRPO learns by adapters alone."""

from dataclasses import replace

import pytest
from tiny_runs import records

import jaxrlhf
from jaxrlhf.config import GRPO, KLInLoss, Lora
from scripts.learning import task

pytestmark = pytest.mark.usefixtures("programs", "undrawn")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The problems."""
    return task.write_records(tmp_path_factory.mktemp("task"))


@pytest.fixture(scope="module")
def guessing(programs, undrawn, folder):
    """The policy that learns."""
    return task.exported(folder, "guess", seed=0)


@pytest.mark.parametrize(
    "quantize", [pytest.param(None, marks=pytest.mark.seeds), pytest.param("nf4", marks=pytest.mark.slow)]
)
def test_it_learns_by_adapters_from_scores(quantize, folder, guessing, tmp_path):
    actor = replace(task.training(2e-2), lora=Lora(rank=4, alpha=8.0, quantize=quantize))
    algorithm = GRPO(kl=KLInLoss(coefficient=1e-3))
    config = task.task(folder, algorithm, guessing, actor=actor, workdir=str(tmp_path / "run"))
    assert jaxrlhf.run(config).finished
    first, *_, last = records(tmp_path / "run" / "metrics.jsonl")
    assert first["eval/accuracy_at_start"] <= 0.5
    assert last["eval/accuracy"] >= 0.9
    assert first["kl/ref"] == pytest.approx(0, abs=1e-9)
    assert last["kl/ref"] > 0.01

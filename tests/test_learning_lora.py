"""GRPO learns by adapters alone."""

from dataclasses import replace

import learning_task as task
import pytest
from tiny_runs import records

import jaxrlhf
from jaxrlhf.config import GRPO, KLInLoss, Lora


@pytest.mark.slow
@pytest.mark.usefixtures("programs")
@pytest.mark.parametrize("quantize", [None, "nf4"])
def test_it_learns_by_adapters_from_scores(quantize, tmp_path):
    folder = task.write_records(tmp_path)
    guessing = task.exported(folder, "guess", seed=0)
    actor = replace(task.training(2e-2), lora=Lora(rank=4, alpha=8.0, quantize=quantize))
    algorithm = GRPO(kl=KLInLoss(coefficient=1e-3))
    config = task.task(folder, algorithm, guessing, actor=actor, workdir=str(tmp_path / "run"))
    assert jaxrlhf.run(config).finished
    first, *_, last = records(tmp_path / "run" / "metrics.jsonl")
    assert first["eval/accuracy_at_start"] <= 0.5
    assert last["eval/accuracy"] >= 0.9
    assert first["kl/ref"] == pytest.approx(0, abs=1e-9)
    assert last["kl/ref"] > 0.01

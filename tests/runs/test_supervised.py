"""A supervised run: the loss of held-out solutions, with and without answers that are scored."""

import json
from dataclasses import replace

import pytest
from tiny_runs import get_config, records

import jaxrlhf
from jaxrlhf.config import SFT, Arithmetic, Evaluation, EvaluationSet, FormatReward, PromptFile, Rewards
from jaxrlhf.trainer.policy import evaluate_policy


@pytest.mark.slow
@pytest.mark.usefixtures("programs", "undrawn")
def test_the_held_out_loss_is_what_the_next_step_finds_of_the_same_solutions(tmp_path, refused):
    file = tmp_path / "all.jsonl"
    file.write_text(
        "".join(json.dumps({"prompt": f"{n} + {n}?", "solution": f"#### {n + n}"}) + "\n" for n in range(8))
    )
    config = replace(
        get_config(),
        data=PromptFile(str(file), evaluation=str(file), answer_key=None, solution_key="solution"),
        rewards=Rewards(parts=()),
        cold_start=None,
        algorithm=SFT(examples_per_update=8),
        steps=3,
        evaluation=Evaluation(every_steps=1),
        workdir=str(tmp_path / "run"),
    )
    jaxrlhf.run(config)
    first, second, third = records(tmp_path / "run" / "metrics.jsonl")
    assert first["eval/loss"] == pytest.approx(second["supervised/loss"], rel=1e-5)
    assert second["eval/loss"] == pytest.approx(third["supervised/loss"], rel=1e-5)
    assert "eval/accuracy" not in third
    with refused():
        evaluate_policy(config, policy=None, samples=1, show=0)
    own = EvaluationSet(name="numbers", data=Arithmetic(difficulty=1, eval_problems=4), rewards=(FormatReward(".*"),))
    config = replace(config, evaluation=replace(config.evaluation, sets=(own,)))
    assert evaluate_policy(config, policy=None, samples=1, show=0)["eval/numbers/accuracy"] == 1.0

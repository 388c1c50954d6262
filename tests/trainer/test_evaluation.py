"""Accuracy on held-out problems is of the first reward; tasks of lm_eval are asked of what can be loaded."""

import sys
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from made_steps import done, problem, rollout_of
from tiny_runs import get_config

from jaxrlhf import evaluate as evaluate_command
from jaxrlhf.batch import Scores
from jaxrlhf.batching.transfer_protocol import join
from jaxrlhf.config import ArithmeticReward, FormatReward, Rewards, run_command
from jaxrlhf.trainer.evaluation import evaluate


def test_accuracy_is_of_the_first_reward_also_where_several_processes_score():
    parts = (FormatReward(weight=1.0), ArithmeticReward())
    config = replace(get_config(), rewards=Rewards(parts=parts))

    def scored(correct: float) -> Scores:
        own = {"format": np.float32([1.0, 0.0]), "arithmetic": np.float32([correct, correct])}
        return Scores(np.zeros(2, np.float32), np.ones(2, bool), own)

    def roles(scores: Scores) -> SimpleNamespace:
        rollout = rollout_of(np.ones((4, 3), bool), range(4))
        actor = SimpleNamespace(generate_sequences=lambda *_, **__: done(rollout))
        return SimpleNamespace(actor=actor, reward=SimpleNamespace(compute_reward=lambda *_: done(scores)))

    together = join([scored(0.0), scored(0.25)])
    metrics, _ = evaluate(roles(together), config, [problem(number) for number in range(4)], str)
    assert metrics["eval/accuracy"] == 0.5


def test_tasks_that_cannot_be_asked_are_refused_before_anything_is_loaded(refused, monkeypatch, tmp_path):
    for words in (
        ["--tasks", ","],
        ["--tasks=a", "--limit", "0"],
        ["--tasks=a", "--num-fewshot", "-1"],
        ["--tasks=a", "--include-path", str(tmp_path / "none")],
        ["--tasks=a", "--output-path", "scores.txt"],
    ):
        monkeypatch.setattr(sys, "argv", ["evaluate", "no_policy", *words])
        with refused():
            evaluate_command.main()


def test_the_extra_of_tasks_is_named_where_it_is_missing(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "lm_eval", None)  # not installed
    monkeypatch.delitem(sys.modules, "jaxrlhf.trainer.served_policy.harness", raising=False)
    monkeypatch.setattr(sys, "argv", ["evaluate", "no_policy", "--tasks=a"])
    with pytest.raises(SystemExit, match="2"):
        run_command(evaluate_command.main)
    assert capsys.readouterr().err == (
        "error: this command needs lm_eval, which is not installed: pip install 'jaxrlhf[evaluate]'\n"
    )

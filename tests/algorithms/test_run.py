"""Whole runs of algorithms in files: two steps of each, of a tiny policy."""

from dataclasses import replace
from math import isfinite

import pytest
import tiny_runs
from tiny_runs import records

import jaxrlhf
from jaxrlhf.config import Arithmetic, Checkpointing, Evaluation, FormatReward, PolicyGradient, Rewards, load_module
from tests.docs.test_metrics import PATTERN

pytestmark = pytest.mark.usefixtures("programs")
TWO = Rewards(parts=(FormatReward(pattern=r"(?s).*[0-9].*"), FormatReward(pattern="(?s).*[a-z].*")))
OWN_METRICS = {
    "luffy": {"luffy/solution_score", "luffy/solution_probability"},
    "clip_cov": {"policy/chosen"},
    "kl_cov": {"policy/chosen"},
    "nash_md": {"nash/preferred", "score/opponents"},
}


def algorithm(name: str) -> PolicyGradient:
    """The algorithm of a file, with two updates a step if it has a ratio to the old policy."""
    settings = {
        "clip_cov": {"share": 0.05, "covariance_low": 0.0},
        "kl_cov": {"share": 0.05, "responses_per_update": 8},
        "luffy": {"responses_per_update": 8},
    }
    kinds = {"maxrl": "MaxRL", "gdpo": "GDPO", "otb": "OptimalTokenBaseline", "luffy": "LUFFY", "nash_md": "NashMD"}
    kinds |= {"clip_cov": "ClipCov", "kl_cov": "KLCov"}
    return getattr(load_module(name), kinds[name])(**{"responses_per_update": 16, **settings.get(name, {})})


@pytest.mark.parametrize(
    "name",
    [
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("nash_md", "otb")),
        *(pytest.param(name, marks=pytest.mark.seeds) for name in ("luffy", "clip_cov", "kl_cov", "maxrl", "gdpo")),
    ],
)
def test_a_run_of_two_steps_trains_the_policy(name, tmp_path):
    base = tiny_runs.get_config()
    config = replace(
        base,
        rewards=TWO if name == "gdpo" else base.rewards,
        algorithm=algorithm(name),
        data=Arithmetic(difficulty=1, train_problems=200, eval_problems=16),
        cold_start=None,
        steps=2,
        evaluation=Evaluation(every_steps=0, problems=16),
        checkpoint=Checkpointing(every_steps=0, keep_best=0),
        workdir=str(tmp_path),
    )
    assert jaxrlhf.run(config).finished
    logged = records(tmp_path / "metrics.jsonl")
    assert len(logged) == 2
    for record in logged:
        assert isfinite(record["actor/loss"]) and record["actor/grad_norm"] > 0
        assert OWN_METRICS.get(name, set()) <= record.keys()
        assert [key for key in record if not PATTERN.fullmatch(key) and not key.startswith("score/")] == []

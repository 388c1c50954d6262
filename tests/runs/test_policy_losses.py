"""Whole runs with each loss of a policy, and each way to correct for the sampler."""

from dataclasses import replace

import pytest
from tiny_runs import get_config, records

import jaxrlhf
from jaxrlhf.config import CISPO, GSPO, SAPO, IcePop, KLInLoss, Rejection, TruncatedImportance

_TWO_UPDATES = {"responses_per_update": 8}
_WEIGHTS = {"correction/weight_mean", "correction/effective_fraction", "correction/rejected_tokens"}


@pytest.mark.usefixtures("programs", "undrawn")
@pytest.mark.parametrize(
    "algorithm, own",
    [
        pytest.param(
            GSPO(correction=IcePop(), rejection=(Rejection("k3", "sequence-mean"),), **_TWO_UPDATES),
            {"policy/clip_fraction", *_WEIGHTS},
            marks=pytest.mark.slow,
            id="gspo",
        ),
        pytest.param(
            CISPO(old_logp="bypass", kl=KLInLoss(coefficient=0.1), **_TWO_UPDATES),
            {"policy/clip_fraction"},
            marks=pytest.mark.seeds,
            id="cispo",
        ),
        pytest.param(
            SAPO(correction=TruncatedImportance(level="sequence"), **_TWO_UPDATES),
            {"policy/gate", *_WEIGHTS},
            marks=pytest.mark.seeds,
            id="sapo",
        ),
    ],
)
def test_two_steps_of_two_updates(algorithm, own, tmp_path):
    config = get_config()
    quiet = replace(config.evaluation, every_steps=0, problems=1)
    changes = {"algorithm": algorithm, "steps": 2, "cold_start": None, "evaluation": quiet}
    changes["model"] = replace(config.model, num_layers=1)
    assert jaxrlhf.run(replace(config, workdir=str(tmp_path), **changes)).finished
    metrics = records(tmp_path / "metrics.jsonl")
    assert len(metrics) == 2
    for record in metrics:
        named = {name for name in record if name in {"policy/gate", "policy/clip_fraction", *_WEIGHTS}}
        assert named == own
        assert record["actor/grad_norm"] > 0
        assert abs(record["policy/kl_old_first"]) < 1e-5
        assert abs(record["policy/kl_old"]) > 1e-5, "the second update saw the policy of the first"
        assert 0 <= record.get("policy/clip_fraction", 0) <= 1
        assert 0.9 < record.get("policy/gate", 1) < 1 or "policy/gate" not in record
        # One model samples and trains, so the correction finds nothing to do.
        assert record.get("correction/rejected_tokens", 0) == 0
        assert record.get("correction/effective_fraction", 1) == pytest.approx(1, abs=1e-6)
    assert "sampler/logp_gap_mean" in metrics[0] or algorithm.old_logp == "bypass"

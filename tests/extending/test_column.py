"""A column that the sampler records for every token, from an engine to a loss, without a change to the package."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import pytest
from tiny_runs import get_config, records

import jaxrlhf
from jaxrlhf import algos
from jaxrlhf.config import GRPO
from jaxrlhf.dataflows import grpo
from jaxrlhf.workers.build import Builder

COLUMN = "place"


class Recording:
    """An engine that also records the place of each token in its response."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def generate(self, requests, sampling, **options):
        completions = self._engine.generate(requests, sampling, **options)
        return [
            replace(completion, recorded={COLUMN: (len(request.prompt_tokens), np.arange(len(completion.tokens)))})
            for request, completion in zip(requests, completions, strict=True)
        ]


def objective(output, mask, weight, fields: Mapping[str, Any], settings):
    """The policy's objective, which also reports the column."""
    terms = algos.policy_objective(output, mask, weight, fields, settings)
    return terms._replace(metrics={**terms.metrics, "policy/place": fields[COLUMN]})


def learn(roles, work, batch):
    def advantage(returns: grpo.Returns):
        return algos.group_relative(*returns.groups, normalize_std=True)

    def loss_fields(returns: grpo.Returns, advantage_BT):
        return {COLUMN: np.where(returns.mask_BT, returns.recorded[COLUMN], 0)}

    return grpo.learn(roles, work, batch, advantage, objective=objective, loss_fields=loss_fields)


@dataclass(frozen=True)
class GRPOWithPlaces(GRPO):
    """GRPO that reads where in its response each token is."""

    learn: ClassVar = learn


@pytest.mark.slow
@pytest.mark.usefixtures("programs", "undrawn")
def test_a_column_goes_from_the_sampler_to_the_loss(tmp_path, monkeypatch):
    make = Builder.rollout_engine
    monkeypatch.setattr(Builder, "rollout_engine", lambda *given: Recording(make(*given)))
    config = get_config()
    config = replace(
        config,
        cold_start=None,
        steps=1,
        algorithm=GRPOWithPlaces(responses_per_update=config.rollout.responses_per_step),
        evaluation=replace(config.evaluation, every_steps=0, problems=2),
        workdir=str(tmp_path),
    )
    jaxrlhf.run(config)
    [step] = [record for record in records(tmp_path / "metrics.jsonl") if "policy/place" in record]
    lengths = np.array([sample["response_length"] for sample in records(tmp_path / "samples.jsonl")])
    expected = (lengths * (lengths - 1) / 2).sum() / lengths.sum()
    assert step["policy/place"] == pytest.approx(expected, rel=1e-5)

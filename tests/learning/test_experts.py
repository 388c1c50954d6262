"""A policy with experts learns: generated with, trained and balanced on the embedded task."""

from dataclasses import replace
from pathlib import Path

import pytest
from tiny_runs import get_config, records

import jaxrlhf
from jaxrlhf.config import GRPO, Checkpointing, Evaluation, FormatReward, FromScratch, Optimizer, Rewards, Training

EXPERTS, EACH = 4, 2


@pytest.mark.slow
@pytest.mark.usefixtures("programs", "undrawn")
def test_grpo_teaches_a_mixture_of_experts(tmp_path: Path) -> None:
    """To begin answers to sums with a digit, as one token in thirty does; routers stay balanced."""
    tiny = get_config()
    config = replace(
        tiny,
        model=FromScratch(
            hidden_size=32,
            intermediate_size=32,
            num_layers=1,
            num_heads=4,
            num_kv_heads=4,
            head_dim=8,
            experts=EXPERTS,
            experts_per_token=EACH,
        ),
        rewards=Rewards(parts=(FormatReward(pattern=r"(?s)[0-9].*", weight=1.0),)),
        cold_start=None,
        algorithm=GRPO(responses_per_update=64),
        rollout=replace(
            tiny.rollout, prompts_per_step=8, responses_per_prompt=8, max_response_tokens=4, replay_routing=True
        ),
        actor=Training(
            Optimizer(learning_rate=1e-2, weight_decay=0.0),
            tokens_per_microbatch=8192,
            remat="none",
            router_loss=0.01,
        ),
        steps=24,
        evaluation=Evaluation(every_steps=0, problems=16),
        checkpoint=Checkpointing(every_steps=0),
        workdir=str(tmp_path),
    )
    assert jaxrlhf.run(config).finished
    first, *_, last = logged = records(tmp_path / "metrics.jsonl")
    assert first["score/mean"] <= 0.2
    assert last["score/mean"] >= 0.9
    assert first["sampler/logp_gap_mean"] < 1e-5, "sampler and trainer choose the same experts"
    assert first["router/actor_disagreement"] == 0 and "router/actor_disagreement" in last
    assert 1 <= last["router/actor_imbalance"] < EXPERTS / EACH
    assert last["router/actor_loss"] < 0.9 * max(record["router/actor_loss"] for record in logged)

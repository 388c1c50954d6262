"""GRPO finishes what a careless teacher left undone, with a mixture of experts and by adapters alone.

As in `configs/grpo_arithmetic.py` with a smaller model: a supervised start imitates solutions, and most of them
stop one step early, and rewards tell that finishing pays. The slow tier shows that experts and adapters learn on
smaller tasks, in `learning/test_experts.py` and `learning/test_lora.py`.
"""

from pathlib import Path
from typing import Any

import pytest
from tiny_runs import records

import jaxrlhf
from jaxrlhf.config import (
    GRPO,
    SFT,
    Arithmetic,
    ArithmeticReward,
    Checkpointing,
    ColdStart,
    Config,
    Evaluation,
    FromScratch,
    KLInLoss,
    Lora,
    Optimizer,
    Rewards,
    Rollout,
    Training,
)

pytestmark = [pytest.mark.seeds, pytest.mark.usefixtures("programs", "optimized")]


def arithmetic(workdir: Path, *, learning_rate: float, cold_steps: int, steps: int, model: Any, **actor: Any) -> Config:
    """A run on the embedded task."""

    def optimizer(rate: float, warmup: int, **decay: Any) -> Optimizer:
        return Optimizer(learning_rate=rate, warmup_updates=warmup, weight_decay=0.0, **decay)

    return Config(
        name="arithmetic",
        model=FromScratch(hidden_size=96, num_layers=2, num_heads=4, num_kv_heads=4, head_dim=24, **model),
        data=Arithmetic(difficulty=2, train_problems=6400, unfinished_share=0.62),
        rewards=Rewards(parts=(ArithmeticReward(),)),
        cold_start=ColdStart(steps=cold_steps, algorithm=SFT(examples_per_update=64), optimizer=optimizer(2e-3, 10)),
        algorithm=GRPO(responses_per_update=64, kl=KLInLoss(coefficient=0.001)),
        rollout=Rollout(prompts_per_step=16, responses_per_prompt=8, max_prompt_tokens=64, max_response_tokens=32),
        actor=Training(optimizer(learning_rate, 4, decay="linear"), tokens_per_microbatch=4096, remat="none", **actor),
        steps=steps,
        evaluation=Evaluation(every_steps=0, problems=128),
        checkpoint=Checkpointing(every_steps=0, keep_best=0),
        compute_dtype="float32",
        devices=1,
        workdir=str(workdir),
    )


def learnt(config: Config, *, most: float, least: float) -> list[dict]:
    """The metrics of a run that raised held-out greedy accuracy from at most the one to at least the other."""
    assert jaxrlhf.run(config).finished
    logged = records(Path(config.workdir) / "metrics.jsonl")
    assert logged[0]["eval/accuracy_at_start"] <= most
    assert logged[-1]["eval/accuracy"] >= least
    return logged


def test_a_mixture_of_experts_learns_arithmetic(tmp_path: Path) -> None:
    experts = {"intermediate_size": 96, "experts": 4, "experts_per_token": 2}
    settings = {"learning_rate": 5e-4, "cold_steps": 150, "steps": 20}
    config = arithmetic(tmp_path, model=experts, router_loss=0.01, **settings)
    logged = learnt(config, most=0.5, least=0.75)
    assert all(1 <= record["router/actor_imbalance"] < 2 for record in logged), "no expert is left out"


def test_adapters_learn_arithmetic(tmp_path: Path) -> None:
    settings = {"learning_rate": 1.5e-3, "cold_steps": 130, "steps": 20}
    dense = {"intermediate_size": 192}
    config = arithmetic(tmp_path, model=dense, lora=Lora(rank=16, alpha=32.0), **settings)
    logged = learnt(config, most=0.25, least=0.5)
    assert logged[0]["kl/ref"] == pytest.approx(0, abs=1e-9)

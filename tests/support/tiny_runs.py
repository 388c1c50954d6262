"""A whole run small enough for tests: seconds, most of them spent on compiling.

Also a configuration file: `python -m jaxrlhf.train --config tests/support/tiny_runs.py`.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from jaxrlhf.config import (
    GRPO,
    PPO,
    SFT,
    AdaptiveKL,
    Arithmetic,
    Checkpointing,
    ColdStart,
    Config,
    Evaluation,
    FormatReward,
    FromScratch,
    KLInReward,
    Layout,
    Optimizer,
    Pretrained,
    Rewards,
    Rollout,
    RolloutServer,
    Training,
)


def get_config() -> Config:
    """PPO on one device after a cold start: 8 problems x 2 responses and two updates a step."""
    return Config(
        name="tiny",
        model=FromScratch(hidden_size=32, intermediate_size=64, num_layers=2, num_heads=4, num_kv_heads=4, head_dim=8),
        data=Arithmetic(difficulty=1, train_problems=200, eval_problems=16),
        # Noise gets about half of this reward, so that there is something to learn from the first step on.
        rewards=Rewards(parts=(FormatReward(pattern=r"(?s).*[0-9].*", weight=1.0),)),
        cold_start=ColdStart(steps=2, algorithm=SFT(examples_per_update=8)),
        algorithm=PPO(
            responses_per_update=8,
            lam=0.95,
            kl=KLInReward(coefficient=0.01, adaptive=AdaptiveKL(target=0.1, horizon=100)),
            critic=training(),
        ),
        rollout=Rollout(prompts_per_step=8, responses_per_prompt=2, max_prompt_tokens=64, max_response_tokens=16),
        actor=training(),
        steps=6,
        evaluation=Evaluation(every_steps=2, problems=16),
        checkpoint=Checkpointing(every_steps=2),
        compute_dtype="float32",
        devices=1,
    )


def training(**layout: int) -> Training:
    """A learning rate so high that every update shows in the numbers of the next step, and another at each."""
    return Training(
        optimizer=Optimizer(learning_rate=3e-3, decay="cosine"),
        layout=Layout(**layout),
        tokens_per_microbatch=1024,
        remat="none",
    )


def served_config(policy: Path, workdir: Path, server: RolloutServer | None, **rollout: Any) -> Config:
    """Two steps of GRPO from a checkpoint, whose responses come from servers."""
    tiny = get_config()
    return replace(
        tiny,
        model=Pretrained(str(policy)),
        tokenizer=str(policy),
        cold_start=None,
        algorithm=GRPO(responses_per_update=16),
        rollout=replace(tiny.rollout, server=server, **rollout),
        steps=2,
        evaluation=Evaluation(every_steps=0, problems=2),
        workdir=str(workdir),
    )


def records(path: Path) -> list[dict]:
    """The objects of a `.jsonl`."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def numbers(path: Path) -> list[dict]:
    """A metrics file without what the clock, the machine and the placement decide."""
    machine = ("time/", "throughput/", "memory/", "compile/", "relayout/", "transfer/", "offload/", "reward/overlapped")
    return [{name: value for name, value in record.items() if not name.startswith(machine)} for record in records(path)]


def write_policy(
    directory: Path, positions: int = 1024, task: str = "ForCausalLM", kind: str = "qwen2", **sizes: int
) -> Path:
    """A random Qwen2, or another kind, with a tokenizer that has a chat template, as transformers saves them."""
    import pytest

    tiny_checkpoints = pytest.importorskip("tiny_checkpoints")  # torch may not be installed

    from jaxrlhf.data.tokenizer import embedded_tokenizer

    tokenizer = embedded_tokenizer()
    tokenizer.save_pretrained(directory)
    ids = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    rounded = -(-len(tokenizer) // 64) * 64  # splits over devices
    model = tiny_checkpoints.build(kind, task, vocab_size=rounded, max_position_embeddings=positions, **ids, **sizes)
    return tiny_checkpoints.write(directory, model)

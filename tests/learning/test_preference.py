"""The classic pipeline learns: demonstrations, then preferences, then PPO on what the reward model says."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from jaxrlhf.config import Config, FromScratch, Pretrained, load, override
from jaxrlhf.trainer.policy import export_policy
from jaxrlhf.trainer.run import run

pytestmark = [pytest.mark.seeds, pytest.mark.usefixtures("programs", "undrawn", "optimized")]


def stage(name: str, workdir: Path, **changes) -> Config:
    """A shipped configuration with fewer problems, one device and files of its own."""
    fewer = {"data.train_problems": 4000, "data.eval_problems": 64}
    settings = {**fewer, "devices": 1, "workdir": str(workdir / name), "evaluation.every_steps": 0}
    return override(load(name), {**settings, "checkpoint.every_steps": 0, **changes})


def last(workdir: Path, name: str) -> dict:
    return json.loads((workdir / name / "metrics.jsonl").read_text().splitlines()[-1])


def test_supervised_training_a_reward_model_and_ppo_run_one_after_another(tmp_path: Path) -> None:
    small = FromScratch(hidden_size=64, intermediate_size=128, num_layers=2, num_heads=4, num_kv_heads=4, head_dim=16)
    policy, judge = Pretrained(str(tmp_path / "policy")), str(tmp_path / "judge")

    plain = {"actor.remat": "none"}
    run(replace(stage("rlhf_sft", tmp_path, steps=130, **plain), model=small))
    export_policy(tmp_path / "rlhf_sft", policy.path)
    run(replace(stage("rlhf_reward_model", tmp_path, steps=70, **{"algorithm.critic.remat": "none"}), model=policy))
    export_policy(tmp_path / "rlhf_reward_model", judge)
    ppo = replace(stage("rlhf_ppo", tmp_path, steps=8, **plain), model=policy)
    right, scored = ppo.rewards.parts
    run(replace(ppo, rewards=replace(ppo.rewards, parts=(right, replace(scored, path=judge)))))

    assert last(tmp_path, "rlhf_reward_model")["eval/accuracy"] >= 0.7
    before, after = last(tmp_path, "rlhf_sft")["eval/accuracy"], last(tmp_path, "rlhf_ppo")["eval/accuracy"]
    assert before <= 0.5
    assert after >= before + 0.1

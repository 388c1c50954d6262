"""DPO, a reward model, and PPO with that reward model, on pairs that prefer lowercase letters."""

from typing import Any

from jaxrlhf.config import (
    DPO,
    PPO,
    Config,
    FunctionReward,
    KLInReward,
    ModelReward,
    PairFile,
    Preference,
    RewardModel,
    Rewards,
    Training,
)
from jaxrlhf.trainer.policy import export_policy
from scripts.real_model import tasks
from scripts.real_model.runs import (
    Figures,
    Given,
    config_of,
    curve,
    records,
    requests,
    rollout,
    train,
    training,
    written,
)

SYSTEM = "Answer briefly."


def _on_pairs(given: Given, name: str, algorithm: Preference, **settings: Any) -> Config:
    """A run on the pairs, with pairs of other nouns held out."""
    data = PairFile(
        train=written(given, "pairs", tasks.pairs(tasks.NOUNS, each=6)),
        evaluation=written(given, "held_out", tasks.pairs(tasks.HELD_OUT_NOUNS, each=6, seed=1)),
    )
    sizes = rollout(16, 1, 24, prompt_tokens=48)
    return config_of(given, name, algorithm, data=data, rollout=sizes, system_prompt=SYSTEM, **settings)


def _figures(config: Config) -> Figures:
    first, *_, last = records(config.folder / "metrics.jsonl")
    return {
        "steps": config.steps,
        "loss_first": first["preference/loss"],
        "loss_last": last["preference/loss"],
        "accuracy_before": first["eval/accuracy_at_start"],
        "accuracy_after": last["eval/accuracy"],
        "held_out_loss_after": last["eval/loss"],
    }


def dpo(given: Given) -> Figures:
    """Train by DPO, and rank held-out pairs before and after."""
    config = _on_pairs(given, "dpo", DPO(pairs_per_update=16), actor=training(1e-5), steps=8)
    train(config)
    return _figures(config)


def reward_model(given: Given) -> Figures:
    """Train a reward model on the pairs, then a policy by PPO on its scores alone."""
    judge = RewardModel(pairs_per_update=16, critic=training(3e-5))
    config = _on_pairs(given, "reward_model", judge, actor=Training(), steps=12)
    train(config)
    exported = given.folder / "judge"
    export_policy(config.folder, exported)
    parts = ModelReward(str(exported)), FunctionReward("scripts.real_model.tasks:lowercase", weight=0.0)
    ppo = config_of(
        given,
        "ppo",
        PPO(responses_per_update=32, lam=0.95, kl=KLInReward(coefficient=0.02), critic=training(3e-5)),
        data=requests(given),
        rewards=Rewards(parts=parts, workers=1),
        rollout=rollout(8, 4, 16, prompt_tokens=48),
        actor=training(1e-5),
        system_prompt=SYSTEM,
        steps=6,
    )
    train(ppo)
    score, share = curve(ppo, "score/mean"), curve(ppo, "score/lowercase")
    return {
        "judge": _figures(config),
        "ppo": {
            "steps": ppo.steps,
            "score": score,
            "score_first": score[0],
            "score_last": score[-1],
            "rise_in_deviations": (score[-1] - score[0]) / curve(ppo, "score/std")[0],
            "lowercase_first": share[0],
            "lowercase_last": share[-1],
        },
    }

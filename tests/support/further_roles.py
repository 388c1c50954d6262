"""Tiny runs of the algorithms that train further roles beside policy and critic."""

from dataclasses import replace

from tiny_runs import get_config, training

from jaxrlhf.config import (
    PRIME,
    AdaptiveKL,
    Algorithm,
    Arithmetic,
    Config,
    Constraint,
    FormatReward,
    KLInLoss,
    KLInReward,
    Ptx,
    Rewards,
    SafeRLHF,
)

_ADAPTIVE = AdaptiveKL(target=0.1, horizon=100)


def algorithm_of(name: str) -> Algorithm:
    """Two updates a step, and every number that an algorithm carries along moves."""
    if name == "PRIME":
        return PRIME(
            responses_per_update=16,
            kl=KLInLoss(coefficient=0.01, adaptive=_ADAPTIVE),
            process_reward=training(),
            beta=0.5,
            least_accuracy=0.1,
            most_accuracy=0.9,
            max_rounds=3,
        )
    return SafeRLHF(
        responses_per_update=16,
        kl=KLInReward(coefficient=0.01, adaptive=_ADAPTIVE),
        constraint=Constraint(limit=0.2, learning_rate=0.2),
        critic=training(),
        cost_critic=training(),
        ptx=Ptx(data=Arithmetic(difficulty=1, train_problems=60), examples_per_update=4),
    )


def config_of(name: str) -> Config:
    """8 x 4 responses a step; about half have a digit and earn something, and some have a letter and cost."""
    tiny = get_config()
    return replace(
        tiny,
        model=replace(tiny.model, num_layers=1),
        rewards=Rewards(parts=(FormatReward(r"(?s).*[0-9].*", weight=1.0), FormatReward(r"(?s).*[a-e].*", weight=0.0))),
        cold_start=None,
        algorithm=algorithm_of(name),
        rollout=replace(tiny.rollout, prompts_per_step=8, responses_per_prompt=4),
        steps=4,
        evaluation=replace(tiny.evaluation, every_steps=0, problems=1),
    )

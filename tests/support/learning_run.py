"""A run that learns from random weights on: 1 for a response that begins with a digit, 0 for any other.

One token in about thirty of the vocabulary is a digit.
"""

from dataclasses import replace

import pytest
from tiny_runs import get_config

from jaxrlhf.config import Checkpointing, Config, Evaluation, FormatReward, Optimizer, PolicyGradient, Rewards, Training

SEEDS = [pytest.param(seed, marks=pytest.mark.seeds if seed else pytest.mark.slow) for seed in range(3)]
"""Seeds that something is learnt from: the slow tier has the first."""


def learning(algorithm: type[PolicyGradient], **settings: object) -> Config:
    """8 x 8 responses a step, of at most 4 tokens, and one update."""
    tiny = get_config()
    return replace(
        tiny,
        name=algorithm.__name__,
        model=replace(tiny.model, num_layers=1),
        rewards=Rewards(parts=(FormatReward(pattern=r"(?s)[0-9].*", weight=1.0),)),
        cold_start=None,
        algorithm=algorithm(responses_per_update=64, **settings),
        rollout=replace(tiny.rollout, prompts_per_step=8, responses_per_prompt=8, max_response_tokens=4),
        actor=Training(Optimizer(learning_rate=1e-2, weight_decay=0.0), tokens_per_microbatch=8192, remat="none"),
        steps=24,
        evaluation=Evaluation(every_steps=0, problems=16),
        checkpoint=Checkpointing(every_steps=2),
    )

"""A program that lets one algorithm learn the smallest task there is: `learning_run.py ALGORITHM WORKDIR [STEP]`.

The algorithm is one of the package or that of a configuration file. With a step the run dies after it.

A transformer of random weights earns 1 for a response that begins with a digit, which one token in
about thirty of its vocabulary is, and 0 for any other.
"""

import os
import sys
from dataclasses import replace

from tiny_runs import get_config

import jaxrlhf
from jaxrlhf import config
from jaxrlhf.config import Checkpointing, Config, Evaluation, FormatReward, Optimizer, PolicyGradient, Rewards, Training


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


if __name__ == "__main__":
    name, workdir, *last = sys.argv[1:]
    algorithm = type(jaxrlhf.load(name).algorithm) if name.endswith(".py") else getattr(config, name)
    jaxrlhf.run(
        replace(learning(algorithm), workdir=workdir),
        on_step=lambda number, metrics: os._exit(9) if [str(number)] == last else None,
    )

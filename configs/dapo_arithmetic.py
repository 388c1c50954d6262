"""DAPO on generated arithmetic word problems, from random weights: minutes on a laptop CPU.

    python -m jaxrlhf.train --config dapo_arithmetic.py

The run of `grpo_arithmetic.py` with dynamic sampling, up to 16 problems a step whose answers score differently, with
overlong punishment, and without a KL to the reference. Nothing is downloaded.

Source: Yu et al. 2025 (DAPO, arXiv:2503.14476).
"""

from dataclasses import replace

from jaxrlhf.config import DAPO, Config, load


def get_config() -> Config:
    """The run."""
    grpo = load("grpo_arithmetic")
    return replace(
        grpo,
        name="dapo_arithmetic",
        algorithm=DAPO(responses_per_update=32, max_rounds=5),
        rollout=replace(grpo.rollout, prompts_per_step=16, max_response_tokens=40),
    )

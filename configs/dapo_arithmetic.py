"""DAPO on generated arithmetic word problems, from random weights: minutes on a laptop CPU.

    python -m jaxrlhf.train --config dapo_arithmetic.py

The run of `grpo_arithmetic.py` with overlong punishment, without a KL to the reference, and with dynamic sampling: a
step trains on up to 16 problems, each with answers that score differently. Nothing is downloaded.

Source: Yu et al. 2025 (DAPO, arXiv:2503.14476).
"""

from dataclasses import replace

from jaxrlhf.config import DAPO, Config, load


def get_config() -> Config:
    """Return the configuration of the run."""
    grpo = load("grpo_arithmetic")
    return replace(
        grpo,
        name="dapo_arithmetic",
        algorithm=DAPO(responses_per_update=32, max_rounds=5),
        rollout=replace(grpo.rollout, prompts_per_step=16, max_response_tokens=40),
    )

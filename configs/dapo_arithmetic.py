"""DAPO on generated arithmetic word problems, from a model that knows nothing: minutes on a laptop CPU.

    python -m jaxrlhf.train --config dapo_arithmetic.py

As `grpo_arithmetic.py`, but a step goes on drawing problems until it has 16 on which the answers
disagree, answers near the length limit are punished, and nothing holds the policy to a reference.
Nothing is downloaded.

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

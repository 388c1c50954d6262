"""RLOO on generated arithmetic word problems, from a model that knows nothing: minutes on a laptop CPU.

    python -m jaxrlhf.train --config rloo_arithmetic.py

As `grpo_arithmetic.py`, but a response is compared with the mean of the others to its problem, and
the divergence from the reference policy is charged in the reward. Nothing is downloaded.

Source: Ahmadian et al. 2024 (arXiv:2402.14740).
"""

from dataclasses import replace

from jaxrlhf.config import RLOO, Config, KLInReward, load


def get_config() -> Config:
    """The run."""
    return replace(
        load("grpo_arithmetic"),
        name="rloo_arithmetic",
        algorithm=RLOO(responses_per_update=64, kl=KLInReward(coefficient=0.001, estimator="k1")),
    )

"""The settings of the algorithms without a critic."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from jaxrlhf.config.algorithm import PolicyGradient
from jaxrlhf.config.check import require

if TYPE_CHECKING:
    from jaxrlhf.config.run import Config


@dataclass(frozen=True)
class GRPO(PolicyGradient):
    """Group-relative policy optimisation (Shao et al. 2024, arXiv:2402.03300).

    Attributes:
      normalize_std: Divide by the group's standard deviation.
    """

    dataflow: ClassVar[str] = "jaxrlhf.controller.grpo:step"
    roles: ClassVar[tuple[str, ...]] = ("actor", "reference", "reward")

    normalize_std: bool = True

    def check(self, config: Config) -> None:
        super().check(config)
        require(
            config.rollout.responses_per_prompt > 1,
            "GRPO compares the responses to one prompt: rollout.responses_per_prompt must be 2 or more, "
            f"got {config.rollout.responses_per_prompt}",
        )

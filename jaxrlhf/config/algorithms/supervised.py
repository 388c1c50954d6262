"""Supervised fine-tuning."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from jaxrlhf.config.algorithms.algorithm import Algorithm
from jaxrlhf.config.roles import RoleSpec, actor
from jaxrlhf.config.settings import Positive

if TYPE_CHECKING:
    from jaxrlhf.config.run import Config


@dataclass(frozen=True)
class SFT(Algorithm):
    """Supervised fine-tuning on worked solutions; token-mean negative log-likelihood.

    Attributes:
      examples_per_update: Solutions in one optimizer update.
    """

    learn: ClassVar[str] = "jaxrlhf.dataflows.sft:learn"
    reads_solutions: ClassVar[bool] = True

    examples_per_update: Positive[int] = 64

    def roles(self, config: Config) -> tuple[RoleSpec, ...]:
        return (actor(config.actor),)

    def problems_per_step(self, config: Config) -> int:
        return self.examples_per_update

    def updates_per_step(self, config: Config) -> int:
        return 1

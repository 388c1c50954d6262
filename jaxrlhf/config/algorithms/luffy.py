"""Settings of LUFFY."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from jaxrlhf.config.algorithms.critic_free import GRPO
from jaxrlhf.config.losses import KLInReward
from jaxrlhf.config.refusal import require
from jaxrlhf.config.settings import Positive

if TYPE_CHECKING:
    from jaxrlhf.config.run import Config


@dataclass(frozen=True)
class LUFFY(GRPO):
    """GRPO with worked solutions of the data in each group, as off-policy guidance (Yan et al. 2025, arXiv:2504.14945).

    The last responses of each group of `rollout.responses_per_prompt` are the record's worked solutions; the others are
    sampled. Rewards score all of them, and advantages are relative to the whole group. Tokens of solutions have a loss
    without a clip that emphasizes tokens which the policy finds unlikely; `policy`, `kl` and the entropy bonus apply to
    sampled tokens only.

    Attributes:
      solutions: Number of worked solutions in a group: the first solutions of the record.
      shaping: Shaping parameter gamma: the loss of a solution token of probability p has the factor p / (p + gamma).
    """

    collect: ClassVar[str] = "jaxrlhf.dataflows.luffy:collect"
    learn: ClassVar[str] = "jaxrlhf.dataflows.luffy:learn"
    takes_several_sequences: ClassVar[bool] = False
    reads_solutions: ClassVar[bool] = True

    solutions: Positive[int] = 1
    shaping: Positive[float] = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            not isinstance(self.kl, KLInReward),
            f"LUFFY rewards solutions that the policy did not draw, and kl={self.kl} would charge each of its tokens; "
            "give KLInLoss",
        )
        require(
            self.policy.selection is None,
            f"LUFFY trains on solutions beside responses, and policy={type(self.policy).__name__} chooses among a "
            "step's responses alone; give another loss",
        )

    def check(self, config: Config) -> None:
        super().check(config)
        require(
            config.rollout.responses_per_prompt > self.solutions,
            f"LUFFY has solutions={self.solutions} of the {config.rollout.responses_per_prompt} responses of a group, "
            "which leaves none to sample; raise rollout.responses_per_prompt",
        )
        require(
            config.environment is None,
            "LUFFY puts a worked solution beside responses to a prompt, and environment has episodes; drop one",
        )
        require(
            config.rollout.over_provision == 1,
            f"LUFFY samples fewer responses than a group has, and over_provision={config.rollout.over_provision} "
            "has groups of all go on from step to step; leave it at 1",
        )

"""Settings of Nash-MD."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, Literal

from jaxrlhf.config.algorithms.algorithm import PolicyGradient, check_whole_responses
from jaxrlhf.config.losses import PolicyLoss
from jaxrlhf.config.refusal import require
from jaxrlhf.config.roles import REWARD, RoleSpec, actor, reference
from jaxrlhf.config.settings import Positive, Share

if TYPE_CHECKING:
    from jaxrlhf.config.run import Config


@dataclass(frozen=True)
class NashMD(PolicyGradient):
    """Nash learning from human feedback by mirror descent (Munos et al. 2023, arXiv:2312.00886).

    Each response of the policy is compared with an opponent, sampled token by token from a geometric mixture of the
    policy and the reference. The policy maximizes the probability of being preferred, minus 1/2. `beta` keeps it near
    the reference, so `kl` must be None. The mixture generates on the actor's devices, which hold a copy of the
    reference's weights in addition to the policy's.

    Attributes:
      beta: Weight of the log-ratio to the reference (tau in the paper).
      mixture: Share of the reference in the mixture (beta in the paper); at 0 the policy plays against itself.
      preference: Probability that a response is preferred, from both scores: `bradley-terry` is a sigmoid of the
        difference; `higher` is 1 for the higher score and 1/2 for equal scores.
      policy: Policy loss; token losses are summed over a response, so `aggregation` must be `seq-mean-token-sum`.
    """

    collect: ClassVar[str] = "jaxrlhf.dataflows.nash_md:collect"
    learn: ClassVar[str] = "jaxrlhf.dataflows.nash_md:learn"
    takes_several_sequences: ClassVar[bool] = False
    draws_beside: ClassVar[str | None] = "the mixture's answers and weights"

    beta: Positive[float] = 0.1
    mixture: Share[float] = 0.125
    preference: Literal["bradley-terry", "higher"] = "bradley-terry"
    policy: PolicyLoss = field(default_factory=lambda: PolicyLoss(aggregation="seq-mean-token-sum"))

    def __post_init__(self) -> None:
        super().__post_init__()
        check_whole_responses(self)

    def roles(self, config: Config) -> tuple[RoleSpec, ...]:
        return (actor(config.actor), reference(), REWARD)

    def reference_share(self) -> float | None:
        return self.mixture

    def check(self, config: Config) -> None:
        super().check(config)
        rollout = config.rollout
        odd = {
            "environment": config.environment is not None,
            "actor.lora": config.actor.lora is not None,
            "actor.layout.generation_stage": config.actor.layout.generation_stage > 1,
            "rollout.quantize": rollout.quantize is not None,
            "rollout.server": rollout.server is not None,
            "rollout.staleness": rollout.staleness > 0,
            "a pool for 'rollout'": config.generates_apart,
        }
        given = [name for name, is_given in odd.items() if is_given]
        require(
            not given,
            "NashMD draws from a mixture of policy and reference, on the actor's devices and with whole weights; leave "
            f"out {', '.join(given)}",
        )

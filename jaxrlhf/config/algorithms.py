"""The settings of each algorithm."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, Literal

from jaxrlhf.config.check import not_negative, positive, require, within
from jaxrlhf.config.sources import Pretrained
from jaxrlhf.config.training import Optimizer, Sampling, Training

if TYPE_CHECKING:
    from jaxrlhf.config.run import Config

Aggregation = Literal[
    "token-mean", "token-sum", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm", "prompt-mean"
]
KLEstimator = Literal["k1", "abs", "k2", "k3", "k1+", "k3+"]

_NARROWING = ("greedy", "top_p", "top_k", "min_tokens")
"""Settings of `Sampling` under which tokens do not come from the policy's own distribution."""


@dataclass(frozen=True)
class AdaptiveKL:
    """Steer the coefficient towards a KL (Ziegler et al. 2019, arXiv:1909.08593, section 2.2)."""

    target: float = 6.0
    horizon: int = 10_000

    def __post_init__(self) -> None:
        positive(self, "target", "horizon")


@dataclass(frozen=True)
class KLInReward:
    """Subtract `coefficient * kl` from each token's reward; the KL is to the reference policy.

    Attributes:
      estimator: With d = logp - ref_logp: `k1` is d, `abs` is |d|, `k2` is d^2 / 2 and
        `k3` is exp(-d) - 1 + d.
    """

    coefficient: float = 0.001
    estimator: Literal["k1", "abs", "k2", "k3"] = "k1"
    adaptive: AdaptiveKL | None = None

    def __post_init__(self) -> None:
        positive(self, "coefficient")


@dataclass(frozen=True)
class KLInLoss:
    """Add `coefficient * kl` to each token's loss; the KL is to the reference policy.

    Attributes:
      estimator: As for `KLInReward`. `k1+` and `k3+` have the value of k1 and k3, and the
        gradient of k2, which is the reverse KL's.
    """

    coefficient: float = 0.001
    estimator: KLEstimator = "k3"
    adaptive: AdaptiveKL | None = None

    def __post_init__(self) -> None:
        positive(self, "coefficient")


@dataclass(frozen=True)
class PolicyLoss:
    """Clipped policy-gradient loss.

    Attributes:
      clip_low: Ratio may fall to 1 - clip_low.
      clip_high: Ratio may rise to 1 + clip_high.
      dual_clip: Bound on the loss of tokens with negative advantage, as a multiple of it; None is off.
      aggregation: How token losses become one number; every count is over the whole update.
        `token-mean`: their sum over the number of trained tokens (DAPO). `token-sum`: their sum.
        `seq-mean-token-mean`: the mean within each response, then over responses (GRPO).
        `seq-mean-token-sum`: the sum within each response, then the mean over responses.
        `seq-mean-token-sum-norm`: that over `max_response_tokens` (Dr. GRPO).
        `prompt-mean`: the token-mean over each prompt's responses, then the mean over prompts.
      entropy_coefficient: Weight of the entropy bonus; 0 computes no entropy.
    """

    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float | None = 3.0
    aggregation: Aggregation = "token-mean"
    entropy_coefficient: float = 0.0

    def __post_init__(self) -> None:
        positive(self, "clip_low", "clip_high")
        within(self, "clip_low", 0.0, 1.0)
        require(
            self.dual_clip is None or self.dual_clip > 1,
            f"PolicyLoss.dual_clip must be above 1 or None, got {self.dual_clip}",
        )


@dataclass(frozen=True)
class ValueLoss:
    """Clipped value regression; the value moves at most `clip` from the old one."""

    clip: float = 0.5

    def __post_init__(self) -> None:
        positive(self, "clip")


@dataclass(frozen=True)
class TruncatedImportance:
    """Weight tokens by min(pi_old / pi_sampler, cap): corrects sampler-trainer mismatch."""

    cap: float = 2.0

    def __post_init__(self) -> None:
        positive(self, "cap")


@dataclass(frozen=True)
class Algorithm(ABC):
    """What every algorithm's settings share. Subclass it for a new one.

    Class attributes:
      dataflow: `module:function` of the step; see `jaxrlhf.controller`.
      roles: The groups that the step calls.
    """

    dataflow: ClassVar[str]
    roles: ClassVar[tuple[str, ...]]

    def initial_state(self) -> dict[str, float]:
        """Numbers the algorithm carries from step to step; they are in every checkpoint."""
        return {}

    def resumed_state(self, saved: Mapping[str, float]) -> dict[str, float]:
        """The numbers to go on with, given those of the checkpoint; settings may have changed since."""
        return dict(saved)

    def problems_per_step(self, config: Config) -> int:
        """Records of the data set that one step takes."""
        return config.rollout.prompts_per_step

    @abstractmethod
    def updates_per_step(self, config: Config) -> int:
        """Optimizer updates that one step makes, of each trained role."""

    def training(self, config: Config) -> dict[str, Training]:
        """How each trained role is trained."""
        return {"actor": config.actor}

    def check(self, config: Config) -> None:  # noqa: B027  most algorithms fit any configuration
        """Raise `ValueError` if the rest of the configuration does not fit this algorithm."""


@dataclass(frozen=True)
class PolicyGradient(Algorithm):
    """What PPO and GRPO share.

    Attributes:
      responses_per_update: Responses in one optimizer update (the minibatch); divides a step's.
      epochs_per_step: Passes over a step's responses.
      old_logp: Log-probabilities of the policy that generated. `trainer` computes them before the update. `sampler`
        takes those that came with the samples, which are the same but for rounding: it saves that pass, and needs a
        step of one update, whose policy is the old one. `auto` does so where nothing but metrics would read them: one
        update a step, no KL in the reward, no correction.
    """

    responses_per_update: int = 64
    epochs_per_step: int = 1
    policy: PolicyLoss = field(default_factory=PolicyLoss)
    kl: KLInReward | KLInLoss | None = None
    correction: TruncatedImportance | None = None
    old_logp: Literal["auto", "trainer", "sampler"] = "auto"

    def __post_init__(self) -> None:
        positive(self, "responses_per_update", "epochs_per_step")

    def initial_state(self) -> dict[str, float]:
        return {"kl_coefficient": self.kl.coefficient if self.kl else 0.0}

    def resumed_state(self, saved: Mapping[str, float]) -> dict[str, float]:
        adapted = self.kl is not None and self.kl.adaptive is not None and saved["kl_coefficient"] > 0
        return dict(saved) if adapted else self.initial_state()

    def updates_per_step(self, config: Config) -> int:
        return self.epochs_per_step * config.rollout.responses_per_step // self.responses_per_update

    def trusts_sampler(self, config: Config) -> bool:
        """Whether the sampler's log-probabilities serve as the old ones."""
        if self.old_logp == "auto":
            unread = self.correction is None and not isinstance(self.kl, KLInReward)
            return unread and self.updates_per_step(config) == 1
        return self.old_logp == "sampler"

    def check(self, config: Config) -> None:
        total = config.rollout.responses_per_step
        divisors = [n for n in range(1, total + 1) if total % n == 0]
        nearest = sorted(divisors, key=lambda n: abs(n - self.responses_per_update))[:3]
        require(
            total % self.responses_per_update == 0,
            f"algorithm.responses_per_update={self.responses_per_update} does not divide the {total} responses of a "
            f"step ({config.rollout.prompts_per_step} prompts x {config.rollout.responses_per_prompt}); "
            f"nearest that do: {sorted(nearest)}",
        )
        updates = self.updates_per_step(config)
        require(
            self.old_logp != "sampler" or (updates == 1 and self.correction is None),
            f"algorithm.old_logp='sampler' needs one update a step and no correction, and there are {updates} "
            f"and correction={self.correction}; choose 'auto', or raise responses_per_update to {total}",
        )
        sampling, whole = config.rollout.sampling, Sampling()
        narrowed = [name for name in _NARROWING if getattr(sampling, name) != getattr(whole, name)]
        require(
            not narrowed,
            f"rollout.sampling sets {', '.join(narrowed)}, and the trainer's log-probabilities are of the unfiltered "
            "policy, so updates would be off-policy and no metric would show it; sample with temperature only",
        )


@dataclass(frozen=True)
class PPO(PolicyGradient):
    """Proximal policy optimisation with a learned critic (Schulman et al. 2017, arXiv:1707.06347).

    Attributes:
      gamma: Discount per chosen token.
      lam: GAE's lambda.
      critic_model: Where the critic's trunk comes from; None copies the actor's.
      critic_warmup_steps: Steps at the start in which only the critic is updated.
    """

    dataflow: ClassVar[str] = "jaxrlhf.controller.ppo:step"
    roles: ClassVar[tuple[str, ...]] = ("actor", "critic", "reference", "reward")

    gamma: float = 1.0
    lam: float = 1.0
    value: ValueLoss = field(default_factory=ValueLoss)
    critic: Training = field(default_factory=lambda: Training(optimizer=Optimizer(learning_rate=1e-5)))
    critic_model: Pretrained | None = None
    critic_warmup_steps: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        within(self, "gamma", 0.0, 1.0)
        within(self, "lam", 0.0, 1.0)
        not_negative(self, "critic_warmup_steps")

    def training(self, config: Config) -> dict[str, Training]:
        return {"actor": config.actor, "critic": self.critic}

    def check(self, config: Config) -> None:
        super().check(config)
        require(
            self.critic_warmup_steps < config.steps,
            f"algorithm.critic_warmup_steps={self.critic_warmup_steps} leaves no step of steps={config.steps} "
            "to train the policy; lower it or raise steps",
        )


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


@dataclass(frozen=True)
class SFT(Algorithm):
    """Supervised fine-tuning on worked solutions; token-mean negative log-likelihood.

    Attributes:
      examples_per_update: Solutions in one optimizer update.
    """

    dataflow: ClassVar[str] = "jaxrlhf.controller.supervised:step"
    roles: ClassVar[tuple[str, ...]] = ("actor",)

    examples_per_update: int = 64

    def __post_init__(self) -> None:
        positive(self, "examples_per_update")

    def problems_per_step(self, config: Config) -> int:
        return self.examples_per_update

    def updates_per_step(self, config: Config) -> int:
        return 1

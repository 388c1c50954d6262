"""Base classes of algorithm settings."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from inspect import signature
from typing import Any, ClassVar, Literal

from jaxrlhf.config.losses import IcePop, KLInLoss, KLInReward, PolicyLoss, RatioLoss, Rejection, TruncatedImportance
from jaxrlhf.config.refusal import require
from jaxrlhf.config.roles import REWARD, RoleSpec, actor, reference
from jaxrlhf.config.settings import Positive, Settings
from jaxrlhf.config.sources import DataSet
from jaxrlhf.config.training import Rollout, Training

_RENAMED = {"places_after": "positions_after", "draws_beside": "also_generates"}
"""Former names of class attributes, which an algorithm of a user's own may still have, and the present names."""

_OF_ROLLOUT = ("problems_per_step", "updates_per_step", "critic_only_updates", "examples", "correction_for")
_ARGUMENTS = {"roles": "training", **dict.fromkeys((*_OF_ROLLOUT, "trusts_sampler"), "rollout")}
"""Argument of methods that formerly got the whole configuration: the actor's settings, or the rollout's."""


@dataclass(frozen=True)
class Algorithm(Settings, ABC):
    """Base class of every algorithm's settings; subclass it for a new algorithm.

    Class attributes:
      collect: Function from the roles and a `StepInput` to the data that a step learns from, or its name as
        `module:function`. The default returns the data records; `PolicyGradient` returns scored responses.
      learn: Function from the roles, the `StepInput` and the collected data that updates models and returns a
        `StepResult`, or its name.
      evaluation: Function from the roles, the configuration and the held-out problems to metrics, or its name; None has
        no evaluation of its own.
      takes_several_sequences: True if an episode may consist of several sequences, whose advantages are computed
        together.
      positions_after: Number of positions after an answer's last token that the loss reads, for algorithms that learn
        from labeled answers (pairs, steps); None for other algorithms.
      together: Number of consecutive sequences that a loss compares, which are packed into one row: 2 for pairs.
      reads_solutions: True if training records need worked solutions, limited to `max_response_tokens`.
      further_passes: Names of roles that make an additional pass over a step's sequences before the update.
      also_generates: Name of what a step generates beside its groups, which plans do not count; None is nothing.
    """

    def __init_subclass__(cls, **named: Any) -> None:
        super().__init_subclass__(**named)
        for old, new in _RENAMED.items():
            require(old not in vars(cls), f"{cls.__name__}.{old} is named {new} now; rename it")
        for name, argument in _ARGUMENTS.items():
            own = vars(cls).get(name)
            require(
                own is None or "config" not in signature(own).parameters,
                f"{cls.__name__}.{name} gets the settings of the {'actor' if name == 'roles' else 'rollout'}, not the "
                f"whole configuration; write {name}(self, {argument})",
            )

    collect: ClassVar[Callable[..., Any] | str] = "jaxrlhf.dataflows.collect:records"
    learn: ClassVar[Callable[..., Any] | str]
    evaluation: ClassVar[Callable[..., Any] | str | None] = None
    takes_several_sequences: ClassVar[bool] = True
    positions_after: ClassVar[int | None] = None
    together: ClassVar[int] = 1
    reads_solutions: ClassVar[bool] = False
    further_passes: ClassVar[tuple[str, ...]] = ()
    also_generates: ClassVar[str | None] = None

    @abstractmethod
    def roles(self, training: Training) -> tuple[RoleSpec, ...]:
        """Return the roles that the step calls with these settings.

        Args:
          training: Training settings of the actor.
        """

    def initial_state(self) -> dict[str, float]:
        """Return the numbers that are carried from step to step and saved in every checkpoint."""
        return {}

    def resumed_state(self, saved: Mapping[str, float]) -> dict[str, float]:
        """Return the carried numbers to resume with; settings may have changed since the checkpoint.

        Args:
          saved: Numbers in the checkpoint.
        """
        return dict(saved)

    def problems_per_step(self, rollout: Rollout) -> int:
        """Return the number of data records of one step."""
        return rollout.prompts_per_step

    @abstractmethod
    def updates_per_step(self, rollout: Rollout) -> int:
        """Return the number of optimizer updates of each trained role in one step."""

    def critic_only_updates(self, rollout: Rollout) -> int:
        """Return the number of initial updates that leave the policy unchanged; its learning rate ignores them."""
        return 0

    def examples(self, rollout: Rollout) -> tuple[DataSet, int] | None:
        """Return additional data with worked solutions and the number of solutions per step; None if there is none."""
        return None

    def check(self, config: Any) -> None:
        """Raise `Refusal` if this algorithm does not fit the rest of a `Config`, for an algorithm of your own.

        The checks of the package's algorithms are in `jaxrlhf.config.checks`, and are made for subclasses too.
        """


@dataclass(frozen=True)
class PolicyGradient(Algorithm):
    """Base class of algorithms that generate responses, score them and optimize a policy loss.

    Attributes:
      responses_per_update: Minibatch size: responses in one optimizer update; divides the number of responses of a
        step.
      epochs_per_step: Number of passes over the responses of a step.
      old_logp: Log-probabilities of the old policy, at the start of the step. `trainer` computes them before the
        update. `sampler` uses the sampler's, which differ only by rounding: it saves a pass, and needs a step of one
        update. `auto` is `sampler` if only metrics would read them (one update per step, no KL in the reward, no
        correction, rejection or staleness), else `trainer`. `bypass` uses the sampler's even if they differ: there are
        then two policies in place of three, and the ratio of the loss is the importance weight.
      correction: Importance weights of the trainer's old policy against the sampler. `auto` is `TruncatedImportance()`
        with a staleness or a rollout server (unless `old_logp` is `bypass`), else none. With a staleness the loss is
        then that of decoupled PPO: the clipped ratio is relative to the policy at the start of the step, and the weight
        is that policy against the sampler.
      rejection: Rules that leave out tokens and responses on which trainer and sampler differ too much.
    """

    collect: ClassVar[Callable[..., Any] | str] = "jaxrlhf.dataflows.collect:responses"

    responses_per_update: Positive[int] = 64
    epochs_per_step: Positive[int] = 1
    policy: RatioLoss = field(default_factory=PolicyLoss)
    kl: KLInReward | KLInLoss | None = None
    correction: TruncatedImportance | IcePop | Literal["auto"] | None = "auto"
    rejection: tuple[Rejection, ...] = ()
    old_logp: Literal["auto", "trainer", "sampler", "bypass"] = "auto"

    def roles(self, training: Training) -> tuple[RoleSpec, ...]:
        """Return the roles; the reference is included only if there is a KL to it."""
        return (actor(training), *([] if self.kl is None else [reference()]), REWARD)

    def initial_state(self) -> dict[str, float]:
        return {"kl_coefficient": self.kl.coefficient if self.kl else 0.0}

    def resumed_state(self, saved: Mapping[str, float]) -> dict[str, float]:
        adapted = self.kl is not None and self.kl.adaptive is not None and saved.get("kl_coefficient", 0.0) > 0
        carried = {**self.initial_state(), **saved}
        return carried if adapted else carried | {"kl_coefficient": self.kl.coefficient if self.kl else 0.0}

    def updates_per_step(self, rollout: Rollout) -> int:
        return self.epochs_per_step * rollout.responses_per_step // self.responses_per_update

    def correction_for(self, rollout: Rollout) -> TruncatedImportance | IcePop | None:
        """Return the importance weights of a run, with `auto` resolved."""
        if not isinstance(self.correction, str):
            return self.correction
        differs = rollout.staleness or rollout.server is not None
        return TruncatedImportance() if differs and self.old_logp != "bypass" else None

    def trusts_sampler(self, rollout: Rollout) -> bool:
        """Return True if the sampler's log-probabilities are used as those of the old policy."""
        if self.old_logp == "auto":
            unread = self.correction_for(rollout) is None and not self.rejection and not isinstance(self.kl, KLInReward)
            return unread and self.updates_per_step(rollout) == 1 and not rollout.staleness
        return self.old_logp == "sampler" or (self.old_logp == "bypass" and not self.rejection)


def check_whole_responses(algorithm: PolicyGradient) -> None:
    """Raise `Refusal` if settings do not fit a loss on whole responses with a KL penalty (`beta`)."""
    name, aggregation = type(algorithm).__name__, algorithm.policy.aggregation
    require(
        aggregation == "seq-mean-token-sum",
        f"{name} uses the log-probability of whole responses in its loss: policy.aggregation must be "
        f"'seq-mean-token-sum', got {aggregation!r}",
    )
    require(algorithm.kl is None, f"{name} already penalizes the KL by beta; set kl=None, got kl={algorithm.kl}")

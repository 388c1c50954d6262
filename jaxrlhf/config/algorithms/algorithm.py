"""Base classes of algorithm settings."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from jaxrlhf.config.environments import choices
from jaxrlhf.config.losses import IcePop, KLInLoss, KLInReward, PolicyLoss, RatioLoss, Rejection, TruncatedImportance
from jaxrlhf.config.refusal import require
from jaxrlhf.config.roles import REWARD, RoleSpec, actor, reference
from jaxrlhf.config.settings import Positive, Settings
from jaxrlhf.config.training import MOST_KEPT, Sampling

if TYPE_CHECKING:
    from jaxrlhf.config.run import Config
    from jaxrlhf.config.sources import DataSet

_NARROWING = ("top_p", "top_k", "min_p", "min_tokens")
"""Settings of `Sampling` that truncate the distribution from which tokens are sampled."""


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
      places_after: Number of positions after an answer's last token that the loss reads, for algorithms that learn from
        labeled answers (pairs, steps); None for other algorithms.
      together: Number of consecutive sequences that a loss compares, which are packed into one row: 2 for pairs.
      reads_solutions: True if training records need worked solutions, limited to `max_response_tokens`.
      further_passes: Names of roles that make an additional pass over a step's sequences before the update.
      draws_beside: Words for what a step generates in addition to the groups, and plans do not count; None is nothing.
    """

    collect: ClassVar[Callable[..., Any] | str] = "jaxrlhf.dataflows.collect:records"
    learn: ClassVar[Callable[..., Any] | str]
    evaluation: ClassVar[Callable[..., Any] | str | None] = None
    takes_several_sequences: ClassVar[bool] = True
    places_after: ClassVar[int | None] = None
    together: ClassVar[int] = 1
    reads_solutions: ClassVar[bool] = False
    further_passes: ClassVar[tuple[str, ...]] = ()
    draws_beside: ClassVar[str | None] = None

    @abstractmethod
    def roles(self, config: Config) -> tuple[RoleSpec, ...]:
        """Return the roles that the step calls with these settings."""

    def initial_state(self) -> dict[str, float]:
        """Return the numbers that are carried from step to step and saved in every checkpoint."""
        return {}

    def resumed_state(self, saved: Mapping[str, float]) -> dict[str, float]:
        """Return the carried numbers to resume with; settings may have changed since the checkpoint.

        Args:
          saved: Numbers in the checkpoint.
        """
        return dict(saved)

    def problems_per_step(self, config: Config) -> int:
        """Return the number of data records of one step."""
        return config.rollout.prompts_per_step

    @abstractmethod
    def updates_per_step(self, config: Config) -> int:
        """Return the number of optimizer updates of each trained role in one step."""

    def resting_updates(self, config: Config) -> int:
        """Return the number of initial updates that leave the policy unchanged; its learning rate ignores them."""
        return 0

    def examples(self, config: Config) -> tuple[DataSet, int] | None:
        """Return additional data with worked solutions and the number of solutions per step; None if there is none."""
        return None

    def answers_held_out(self, config: Config) -> bool:
        """Return True if held-out problems are answered greedily and the answers are scored."""
        return self.evaluation is None

    def takes_several(self) -> bool:
        """Return True if an episode may consist of several sequences, with these settings."""
        return self.takes_several_sequences

    def check(self, config: Config) -> None:
        """Raise `Refusal` if the rest of the configuration does not fit this algorithm."""


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

    def roles(self, config: Config) -> tuple[RoleSpec, ...]:
        """Return the roles; the reference is included only if there is a KL to it."""
        return (actor(config.actor), *([] if self.kl is None else [reference()]), REWARD)

    def initial_state(self) -> dict[str, float]:
        return {"kl_coefficient": self.kl.coefficient if self.kl else 0.0}

    def resumed_state(self, saved: Mapping[str, float]) -> dict[str, float]:
        adapted = self.kl is not None and self.kl.adaptive is not None and saved.get("kl_coefficient", 0.0) > 0
        carried = {**self.initial_state(), **saved}
        return carried if adapted else carried | {"kl_coefficient": self.kl.coefficient if self.kl else 0.0}

    def updates_per_step(self, config: Config) -> int:
        return self.epochs_per_step * config.rollout.responses_per_step // self.responses_per_update

    def takes_several(self) -> bool:
        return self.takes_several_sequences and not self.policy.of_sequences

    def correction_for(self, config: Config) -> TruncatedImportance | IcePop | None:
        """Return the importance weights of a run, with `auto` resolved."""
        if not isinstance(self.correction, str):
            return self.correction
        differs = config.rollout.staleness or config.rollout.server is not None
        return TruncatedImportance() if differs and self.old_logp != "bypass" else None

    def trusts_sampler(self, config: Config) -> bool:
        """Return True if the sampler's log-probabilities are used as those of the old policy."""
        if self.old_logp == "auto":
            unread = self.correction_for(config) is None and not self.rejection and not isinstance(self.kl, KLInReward)
            return unread and self.updates_per_step(config) == 1 and not config.rollout.staleness
        return self.old_logp == "sampler" or (self.old_logp == "bypass" and not self.rejection)

    def check(self, config: Config) -> None:
        total = config.rollout.responses_per_step
        divisors = [n for n in range(1, total + 1) if total % n == 0]
        nearest = sorted(divisors, key=lambda n: abs(n - self.responses_per_update))[:3]
        require(
            total % self.responses_per_update == 0,
            f"algorithm.responses_per_update={self.responses_per_update} does not divide the {total} responses of a "
            f"step ({config.rollout.prompts_per_step} prompts x {config.rollout.responses_per_prompt}); the nearest "
            f"divisors are {sorted(nearest)}",
        )
        updates = self.updates_per_step(config)
        require(
            self.old_logp != "sampler" or (updates == 1 and self.correction in (None, "auto")),
            f"algorithm.old_logp='sampler' requires one update per step and no correction, got {updates} updates and "
            f"correction={self.correction_for(config)}; set old_logp='auto', or responses_per_update={total}",
        )
        require(
            self.old_logp != "sampler" or not config.rollout.staleness,
            "algorithm.old_logp='sampler' requires samples of the current policy version, but "
            f"rollout.staleness={config.rollout.staleness} allows older versions; set old_logp='auto' or 'bypass'",
        )
        require(
            self.old_logp != "sampler" or config.rollout.server is None,
            "algorithm.old_logp='sampler' requires samples of the built-in engine, but rollout.server is another "
            "engine; set algorithm.old_logp='auto' or 'bypass'",
        )
        require(
            self.old_logp != "sampler" or not self.rejection,
            "algorithm.rejection compares the log-probabilities of trainer and sampler, but old_logp='sampler' does "
            "not compute the trainer's; set algorithm.old_logp='auto' or 'bypass'",
        )
        require(
            self.old_logp != "bypass" or self.correction in (None, "auto"),
            "algorithm.old_logp='bypass' already uses the sampler's probabilities in the ratio of the loss, so "
            f"correction={self.correction} would count twice; set correction=None, or old_logp='trainer'",
        )
        _check_sampling(config)


def _check_sampling(config: Config) -> None:
    """Refuse sampling from a distribution other than the one that the trainer's log-probabilities describe."""
    sampling, whole = config.rollout.sampling, Sampling()
    require(
        not sampling.greedy,
        "rollout.sampling.greedy=True always takes the most likely token, but a policy gradient requires samples; set "
        "rollout.sampling.greedy=False",
    )
    narrowed = [name for name in _NARROWING if getattr(sampling, name) != getattr(whole, name)]
    given = ", ".join(f"{name}={getattr(sampling, name)}" for name in narrowed)
    require(
        not narrowed or sampling.most_kept > 0,
        f"rollout.sampling has {given}, which requires recorded candidates of each token; only a top_k from 1 to "
        f"{MOST_KEPT} is recorded; set rollout.sampling.top_k in this range, or sample with temperature only",
    )
    require(
        not narrowed or (config.environment is None and config.rollout.server is None),
        f"rollout.sampling has {given}, but episodes and servers do not record the candidates of each token, so the "
        "trainer's log-probabilities would be of another distribution; sample with temperature only, or remove "
        "environment and rollout.server",
    )


def check_whole_responses(algorithm: PolicyGradient) -> None:
    """Raise `Refusal` if settings do not fit a loss on whole responses with a KL penalty (`beta`)."""
    name, aggregation = type(algorithm).__name__, algorithm.policy.aggregation
    require(
        aggregation == "seq-mean-token-sum",
        f"{name} uses the log-probability of whole responses in its loss: policy.aggregation must be "
        f"'seq-mean-token-sum', got {aggregation!r}",
    )
    require(algorithm.kl is None, f"{name} already penalizes the KL by beta; set kl=None, got kl={algorithm.kl}")


def check_schedule(config: Config) -> None:
    """Raise `Refusal` if staleness, over-provision or order of the rollout do not fit the run."""
    rollout, algorithm = config.rollout, type(config.algorithm).__name__
    staleness, over = rollout.staleness, rollout.over_provision
    require(
        staleness == 0 or isinstance(config.algorithm, PolicyGradient),
        f"rollout.staleness={staleness}, but {algorithm} generates no responses; set rollout.staleness=0",
    )
    require(
        staleness == 0 or not config.selection.online,
        f"selection.online filters problems by scores of earlier steps, but rollout.staleness={staleness} samples "
        "before these scores exist; set selection.online=False, or rollout.staleness=0",
    )
    arrival = rollout.order == "arrival"
    require(
        not arrival or (over > 1 and config.environment is not None),
        f"rollout.order='arrival' uses the episodes that end first, but with over_provision={over} "
        + ("a step uses all episodes" if over == 1 else "and without an environment the order counts tokens")
        + "; set rollout.order='deterministic'",
    )
    if over == 1:
        return
    least = 1 + int(config.generates_apart)
    ahead = "; a separate rollout pool already uses one step of staleness" if least > 1 else ""
    require(
        staleness >= least,
        f"rollout.over_provision={over} postpones unfinished groups, but rollout.staleness={staleness} allows no "
        f"postponed groups{ahead}; set rollout.staleness to {least} or more",
    )
    environments = () if config.environment is None else choices(config.environment)
    require(
        arrival or not environments,
        f"rollout.over_provision={over} uses the groups that are complete first, which for episodes depends on the "
        "run time of their tools, so the run is not reproducible; to accept this, set rollout.order='arrival'; "
        "otherwise set rollout.over_provision=1",
    )
    require(
        rollout.server is None,
        f"rollout.over_provision={over} stops generation when enough groups are complete, but rollout.server "
        "completes every request; set rollout.over_provision=1, or rollout.server=None",
    )
    require(
        not rollout.replay_routing,
        f"rollout.over_provision={over} continues responses with the next weights, but the experts of their earlier "
        "tokens are not recorded for replay_routing; set over_provision=1, or replay_routing=False",
    )


def check_read(config: Config) -> None:
    """Raise `Refusal` if settings are given that the algorithm does not read."""
    name = type(config.algorithm).__name__
    require(
        not config.evaluation.sets or "actor" in config.roles,
        f"evaluation.sets require a policy, but {name} trains no policy; remove evaluation.sets",
    )
    of_responses = {
        "selection.online": config.selection.online,
        "token_records.entropy": config.token_records.entropy,
        "rollout.replay_routing": config.rollout.replay_routing,
    }
    given = [setting for setting, on in of_responses.items() if on]
    require(
        not given or REWARD.name in config.roles,
        f"{' and '.join(given)} cannot be set: {name} samples no responses; remove {' and '.join(given)}",
    )

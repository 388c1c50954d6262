"""Checks of the package's algorithms against the rest of a run."""

from jaxrlhf.config.algorithms.algorithm import Algorithm, PolicyGradient
from jaxrlhf.config.algorithms.critic_free import GroupCompared, OnlineDPO
from jaxrlhf.config.algorithms.ppo import PPO
from jaxrlhf.config.algorithms.preference import CostModel, Preference, RewardModel
from jaxrlhf.config.algorithms.safe_rlhf import SafeRLHF
from jaxrlhf.config.refusal import require
from jaxrlhf.config.rewards import ModelReward, Rewards
from jaxrlhf.config.run import Config
from jaxrlhf.config.sources import ArithmeticPairs, PairFields
from jaxrlhf.config.training import Training


def check_algorithm(config: Config) -> None:
    """Raise `Refusal` if the algorithm does not fit the rest of the configuration.

    An algorithm is checked as each class that it extends, and then by its own `check`.
    """
    algorithm = config.algorithm
    if isinstance(algorithm, PolicyGradient):
        _check_policy_gradient(algorithm, config)
    if isinstance(algorithm, GroupCompared):
        _check_groups(algorithm, config)
    if isinstance(algorithm, PPO):
        _check_ppo(algorithm, config)
    if isinstance(algorithm, SafeRLHF):
        _check_constraint(algorithm, config)
    if isinstance(algorithm, Preference):
        _check_preference(algorithm, config)
    algorithm.check(config)


def _check_policy_gradient(algorithm: PolicyGradient, config: Config) -> None:
    """Refuse updates that do not divide a step, and log-probabilities of the old policy that the run does not have."""
    rollout = config.rollout
    total, size, correction = rollout.responses_per_step, algorithm.responses_per_update, algorithm.correction
    divisors = [n for n in range(1, total + 1) if total % n == 0]
    nearest = sorted(divisors, key=lambda n: abs(n - size))[:3]
    require(
        total % size == 0,
        f"algorithm.responses_per_update={size} does not divide the {total} responses of a step "
        f"({rollout.prompts_per_step} prompts x {rollout.responses_per_prompt}); the nearest divisors are "
        f"{sorted(nearest)}",
    )
    updates, sampler = algorithm.updates_per_step(rollout), algorithm.old_logp == "sampler"
    require(
        not sampler or (updates == 1 and correction in (None, "auto")),
        f"algorithm.old_logp='sampler' requires one update per step and no correction, got {updates} updates and "
        f"correction={algorithm.correction_for(rollout)}; set old_logp='auto', or responses_per_update={total}",
    )
    require(
        not sampler or not rollout.staleness,
        "algorithm.old_logp='sampler' requires samples of the current policy version, but "
        f"rollout.staleness={rollout.staleness} allows older versions; set old_logp='auto' or 'bypass'",
    )
    require(
        not sampler or rollout.server is None,
        "algorithm.old_logp='sampler' requires samples of the built-in engine, but rollout.server is another "
        "engine; set algorithm.old_logp='auto' or 'bypass'",
    )
    require(
        not sampler or not algorithm.rejection,
        "algorithm.rejection compares the log-probabilities of trainer and sampler, but old_logp='sampler' does "
        "not compute the trainer's; set algorithm.old_logp='auto' or 'bypass'",
    )
    require(
        algorithm.old_logp != "bypass" or correction in (None, "auto"),
        "algorithm.old_logp='bypass' already uses the sampler's probabilities in the ratio of the loss, so "
        f"correction={correction} would count twice; set correction=None, or old_logp='trainer'",
    )
    require(
        updates == 1 or not isinstance(algorithm, OnlineDPO),
        f"OnlineDPO requires one update per step, got {updates} updates; set "
        f"algorithm.responses_per_update={total} and algorithm.epochs_per_step=1",
    )


def _check_groups(algorithm: GroupCompared, config: Config) -> None:
    """Refuse groups of one response."""
    require(
        config.rollout.responses_per_prompt > 1,
        f"{type(algorithm).__name__} compares the responses to one prompt: rollout.responses_per_prompt must be 2 or "
        f"more, got {config.rollout.responses_per_prompt}",
    )


def _check_ppo(algorithm: PPO, config: Config) -> None:
    """Refuse a run without a step for the policy, and turns without an environment."""
    require(
        algorithm.critic_warmup_steps < config.steps,
        f"algorithm.critic_warmup_steps={algorithm.critic_warmup_steps} leaves no step of steps={config.steps} to "
        "train the policy; lower algorithm.critic_warmup_steps or raise steps",
    )
    require(
        algorithm.actions == "tokens" or config.environment is not None,
        "algorithm.actions='turns' requires an environment, because a run without an environment has only one "
        "turn; set environment, or algorithm.actions='tokens'",
    )


def _check_constraint(algorithm: SafeRLHF, config: Config) -> None:
    """Refuse a constraint on a reward part that is no cost of every response."""
    parts, index = config.rewards.parts, algorithm.constraint.part
    require(
        index < len(parts),
        f"algorithm.constraint.part={index} is the index of the cost, but rewards.parts has {len(parts)} parts; "
        "add a part with weight 0 that is above 0 for unsafe responses",
    )
    require(
        parts[index].weight == 0,
        f"rewards.parts.{index} is the cost of algorithm.constraint, weighted by its multiplier, so "
        f"weight={parts[index].weight} would count the cost twice; set rewards.parts.{index}.weight=0",
    )
    own = [source.name for source in config.sources if source.rewards is not None]
    require(
        not own or isinstance(parts[index], ModelReward),
        f"rewards.parts.{index} is the cost of algorithm.constraint, but sources {', '.join(own)} have their own "
        "rewards, so their responses would have no cost; use a ModelReward, which scores all responses, or remove "
        "the rewards of these sources",
    )


def _check_preference(algorithm: Preference, config: Config) -> None:
    """Refuse data and settings that do not fit an algorithm for preference pairs."""
    name, kinds = type(algorithm).__name__, (PairFields, ArithmeticPairs)
    check_labelled(algorithm, config, kinds, "preference pairs", give="PairFile, HubPairs or ArithmeticPairs")
    fields = ("margin_key", "safe_keys")
    unread = [key for key in fields if key != algorithm.reads and getattr(config.data, key, None) is not None]
    require(not unread, f"{name} does not read data.{' and data.'.join(unread)}; use None instead")
    if isinstance(algorithm, RewardModel):
        check_critic_alone(algorithm, config)
    labelled = not isinstance(config.data, PairFields) or config.data.safe_keys is not None
    require(
        labelled or not isinstance(algorithm, CostModel),
        "CostModel reads labels of harmless answers, but data.safe_keys is None; set safe_keys to two fields",
    )


def check_labelled(algorithm: Algorithm, config: Config, kinds: tuple[type, ...], what: str, *, give: str) -> None:
    """Refuse data that is not of the kind that an algorithm for labeled answers needs, and refuse rewards."""
    name = type(algorithm).__name__
    require(
        isinstance(config.data, kinds),
        f"{name} learns from {what}, but data is {type(config.data).__name__}; give {give}",
    )
    require(config.rewards == Rewards(), f"{name} does not use rewards, but rewards are set; remove rewards")


def check_critic_alone(algorithm: Algorithm, config: Config) -> None:
    """Refuse policy settings for an algorithm that only trains a critic, read after the last token of an answer."""
    name = type(algorithm).__name__
    require(config.actor == Training(), f"{name} has no actor, but actor is set; set algorithm.critic instead")
    require(
        config.cold_start is None,
        f"cold_start trains a policy, but {name} has no policy; set cold_start=None, and model.path to a policy",
    )
    require(
        config.rollout.max_response_tokens > 1,
        f"rollout.max_response_tokens=1 leaves no token for an answer of {name}; set it to 2 or more",
    )

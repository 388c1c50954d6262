"""Checks of data sets, rewards, environments and evaluations against each other and the algorithm."""

from jaxrlhf.config.algorithms.algorithm import PolicyGradient
from jaxrlhf.config.algorithms.supervised import SFT
from jaxrlhf.config.environments import Agent, EnvironmentByRecord, Tools, choices
from jaxrlhf.config.refusal import require
from jaxrlhf.config.rewards import ArithmeticReward, Gsm8kReward, MathReward
from jaxrlhf.config.roles import REWARD
from jaxrlhf.config.run import Config
from jaxrlhf.config.sources import PromptFields


def check_sources(config: Config) -> None:
    """Raise `Refusal` for a name of two data sets, and for sources with an environment that does not exist."""
    names = [one.name for one in (*config.sources, *config.evaluation.sets)]
    require(
        len({*names}) == len(names) and not any(not name or {*name} & {*"/@ "} for name in names),
        f"Mixture.sources and Evaluation.sets require different names without '/', '@' and spaces, got {names}",
    )
    for parts in config.source_rewards.values():
        config.rewards.check_limits(parts)
    there = [] if config.environment is None else [one.name for one in choices(config.environment)]
    for source in config.sources:
        require(
            source.environment is None
            or (isinstance(config.environment, EnvironmentByRecord) and source.environment in there),
            f"source {source.name!r} has environment={source.environment!r}, which must be one of an "
            f"EnvironmentByRecord (the run has {', '.join(there) or 'none'}); choose one, or None",
        )


def check_records(config: Config) -> None:
    """Raise `Refusal` if records lack a field that the algorithm, the cold start or a reward reads."""
    supervised, cold = isinstance(config.algorithm, SFT), config.cold_start
    require(
        not (supervised and cold),
        "cold_start and algorithm SFT are the same training; remove cold_start and raise steps",
    )
    longest = config.rollout.max_prompt_tokens
    require(
        cold is None or (cold.max_prompt_tokens or 0) <= longest,
        f"cold_start.max_prompt_tokens must be at most rollout.max_prompt_tokens={longest}; lower "
        "cold_start.max_prompt_tokens",
    )
    if not isinstance(config.data, PromptFields):
        return
    reads = config.algorithm.reads_solutions
    require(
        config.data.solution_key is not None or not (reads or (cold and cold.data is None)),
        f"{f'algorithm {type(config.algorithm).__name__}' if reads else 'cold_start'} trains on worked solutions, "
        "but data.solution_key is None; set data.solution_key to the field with the solutions",
    )
    readers = (Gsm8kReward, ArithmeticReward, MathReward)
    graded = [type(p).__name__ for p in config.rewards.parts if isinstance(getattr(p, "correct", p), readers)]
    scored = not supervised or config.data.evaluation is not None
    require(
        config.data.answer_key is not None or not (graded and scored),
        f"{', '.join(graded)} compares with a reference answer, but data.answer_key is None; set data.answer_key, "
        f"or choose other rewards{' or, to evaluate only the loss, rewards=Rewards(parts=())' * supervised}",
    )


def check_environment(config: Config) -> None:
    """Raise `Refusal` for settings that do not fit episodes of several turns, and for a run without any reward."""
    own = config.environment is not None and config.source_rewards
    unscored = isinstance(config.algorithm, SFT) and all(one.rewards for one in config.evaluation.sets)
    require(
        bool(config.rewards.parts or own or unscored) or _environment_rewards(config),
        "Rewards.parts is empty, and no environment gives rewards; give at least one reward",
    )
    if config.environment is None:
        return
    algorithm, name = config.algorithm, type(config.algorithm).__name__
    require(
        REWARD.name in config.roles or isinstance(algorithm, SFT),
        f"environment is set, but {name} samples no responses; set environment=None",
    )
    require(
        not config.rollout.replay_routing,
        "rollout.replay_routing needs the experts that each token was sampled with, but episodes do not record "
        "experts; set rollout.replay_routing=False, or environment=None",
    )
    several = [
        type(one).__name__
        for one in choices(config.environment)
        if isinstance(one, Agent) or one.history == "as_templated"
    ]
    one_ratio = isinstance(algorithm, PolicyGradient) and algorithm.policy.one_ratio
    require(
        not several or (algorithm.takes_several_sequences and not one_ratio),
        f"{', '.join(several)} may turn an episode into several sequences, but {name} treats each sequence "
        "separately; choose another algorithm, or an environment with history='as_sampled'",
    )


def check_weights(config: Config) -> None:
    """Raise `Refusal` for rewards whose weights are all 0."""
    own = {f"data.sources.{number}.rewards": one.rewards or () for number, one in enumerate(config.sources)}
    for name, parts in {"rewards.parts": config.rewards.parts, **own}.items():
        require(
            not parts or any(part.weight for part in parts) or _environment_rewards(config),
            f"every weight of {name} is 0, so every score is 0; set at least one weight other than 0",
        )


def _environment_rewards(config: Config) -> bool:
    """Return True if an environment adds rewards to the scores of episodes; tools alone give none."""
    environment = config.environment
    return environment is not None and not all(isinstance(one, Tools) for one in choices(environment))


def check_saving(config: Config) -> None:
    """Raise `Refusal` if checkpoints are to be ranked but are saved at steps without an evaluation."""
    saved, evaluated = config.checkpoint.every_steps or 0, config.evaluation.every_steps
    ranked = (config.checkpoint.keep_best or 0) > 0 and saved > 0 and evaluated > 0
    require(
        not ranked or saved % evaluated == 0,
        f"checkpoint.every_steps={saved} is not a multiple of evaluation.every_steps={evaluated}, so checkpoints "
        "cannot be ranked; set it to a multiple, or set checkpoint.keep_best=0",
    )

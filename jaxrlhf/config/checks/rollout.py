"""Checks of the sampler and of the schedule of generation against the algorithm and the rest of a run."""

from jaxrlhf.config.algorithms.algorithm import PolicyGradient
from jaxrlhf.config.environments import Agent, choices
from jaxrlhf.config.refusal import require
from jaxrlhf.config.roles import REWARD
from jaxrlhf.config.run import Config
from jaxrlhf.config.training import MOST_KEPT, Sampling

_NARROWING = ("top_p", "top_k", "min_p", "min_tokens")
"""Settings of `Sampling` that truncate the distribution from which tokens are sampled."""


def check_sampler(config: Config) -> None:
    """Raise `Refusal` for a sampler that the run does not support, or that differs from the policy uncorrected."""
    kind, server, algorithm = config.rollout.quantize, config.rollout.server, config.algorithm
    if server is not None:
        agents = config.environment is not None and any(isinstance(one, Agent) for one in choices(config.environment))
        require(
            not agents,
            "rollout.server does not support an Agent: the program calls the policy through the run's own server, "
            "which requires the built-in engine; set rollout.server=None, or use tools or an Environment",
        )
        require(
            config.cluster is None,
            "rollout.server requires a single process, which sends requests and writes weights, but cluster has one "
            "process per host; set rollout.server=None, or cluster=None",
        )
        require(
            config.rollout.speculation is None,
            "rollout.speculation='auto' verifies drafts in the built-in engine, but rollout.server generates with "
            "another engine, which has its own speculation; set rollout.speculation=None, or rollout.server=None",
        )
    if kind is server is None:
        return
    differs = f"quantize={kind!r} samples from rounded weights" if kind else "server samples with another engine"
    corrected = kind is None  # algorithms without a policy gradient do not learn from samples
    if isinstance(algorithm, PolicyGradient):
        corrected = algorithm.correction_for(config.rollout) is not None or algorithm.old_logp == "bypass"
    require(
        corrected,
        f"rollout.{differs}, which costs accuracy without importance weights, but {type(algorithm).__name__} has "
        f"none; set algorithm.correction=TruncatedImportance(), or rollout.{'quantize' if kind else 'server'}=None",
    )
    require(
        kind is None or config.actor.lora is None or config.actor.lora.quantize is None,
        f"rollout.quantize={kind!r}, but actor.lora.quantize already rounds the same matrices; set one to None",
    )


def check_sampling(config: Config) -> None:
    """Raise `Refusal` for sampling from another distribution than the trainer's log-probabilities are of."""
    if not isinstance(config.algorithm, PolicyGradient):
        return
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
    require(
        arrival or config.environment is None,
        f"rollout.over_provision={over} uses the groups that are complete first, which for episodes depends on the "
        "run time of their tools, so the run is not reproducible; to accept this, set rollout.order='arrival'; "
        "otherwise set rollout.over_provision=1",
    )
    require(
        arrival or rollout.speculation is None,
        f"rollout.over_provision={over} uses the groups that are complete after fewest tokens per response, but with "
        "rollout.speculation='auto' the tokens of a call depend on timings, so the run is not reproducible; set "
        "rollout.speculation=None, or rollout.over_provision=1",
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


def check_responses(config: Config) -> None:
    """Raise `Refusal` for settings of a policy or of its responses, if the algorithm has none."""
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

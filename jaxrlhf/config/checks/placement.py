"""Checks of pools, layouts, offload and microbatches against the roles of a run."""

from jaxrlhf.config.placement import ROLLOUT
from jaxrlhf.config.refusal import require
from jaxrlhf.config.rewards import ModelReward
from jaxrlhf.config.run import Config
from jaxrlhf.config.training import Layout


def check_pools(config: Config) -> None:
    """Raise `Refusal` unless every role of the algorithm is placed exactly once, and no other role is placed."""
    pools, roles = config.pools, config.roles
    require(
        config.devices is None or not pools,
        f"devices={config.devices} and pools are both set; each pool has its own devices; set devices=None",
    )
    if not pools:
        return
    names = [pool.name for pool in pools]
    require(len(set(names)) == len(names), f"pools have the names {names}, but names must be different; rename a pool")
    placed = [role for pool in pools for role in pool.roles]
    twice = sorted({role for role in placed if placed.count(role) > 1})
    require(not twice, f"pools place {', '.join(twice)} more than once; place each role on one pool")
    together = [pool.name for pool in pools if {"actor", ROLLOUT} <= set(pool.roles)]
    require(
        not together,
        f"pool {', '.join(together)} places actor and rollout, but on this pool the actor itself generates; remove "
        "rollout, or place rollout on another pool",
    )
    known = {*roles, "reward", *([ROLLOUT] if "actor" in roles else [])}
    unknown = sorted(set(placed) - known)
    hint = "; with a kl it has a reference" if unknown == ["reference"] else ""
    require(not unknown, f"pools place {', '.join(unknown)}, but the algorithm only has {', '.join(roles)}{hint}")
    missing = sorted(set(roles) - set(placed) - {"reward"})
    require(not missing, f"pools do not place {', '.join(missing)}; add them to the roles of a pool")


def check_offload(config: Config) -> None:
    """Raise `Refusal` if an entry of `offload` names no part of a model of the run."""
    models = [role for role in config.roles if role != "reward"] + ["reward"] * config.rewards.by_model
    for entry in config.offload:
        role, _, part = entry.partition(".")
        require(role in models, f"offload: {entry!r}, but the models of this run are {', '.join(models)}")
        named = part in ("", "parameters", "optimizer") and entry.count(".") == (part != "")
        require(named, f"offload: {entry!r}; for {role} write {role}, {role}.parameters or {role}.optimizer")
        trained = part != "optimizer" or role in config.trained
        require(trained, f"offload: {entry!r}, but {role} is not trained; write {role}")


def check_lora(config: Config) -> None:
    """Raise `Refusal` if adapters of the actor do not fit a reference that is the actor without adapters."""
    entries = [entry for entry in config.offload if entry.partition(".")[0] == "reference"]
    require(
        not (entries and config.reference_is_frozen_actor),
        f"offload: {', '.join(entries)}, but with actor.lora the reference shares the actor's frozen weights; use "
        "actor.parameters instead",
    )
    given = config.actor.lora is not None and config.actor.lora.start is not None
    require(
        not (given and config.reference_is_start) or config.reference_is_frozen_actor,
        "actor.lora.start also gives the reference adapters, which requires the actor's pool and layout; place "
        "the reference there, or merge the adapters into the model and set actor.lora.start=None",
    )


def check_search(config: Config) -> None:
    """Raise `Refusal` for settings that the placement search would overrule, and settings that only it reads."""
    if config.placement == "given":
        require(
            config.hardware is None,
            f"hardware={config.hardware!r} is only used by placement='auto'; set placement='auto', or hardware=None",
        )
        return
    chosen = [f"layout of {name}" for name, layout in _layouts(config).items() if layout != Layout()]
    chosen += [name for name in ("pools", "reference_layout", "offload") if getattr(config, name)]
    require(
        not chosen,
        f"placement='auto' chooses pools, layouts and offload, but the configuration sets {', '.join(chosen)}; "
        "remove these settings, or set placement='given'",
    )


def _layouts(config: Config) -> dict[str, Layout]:
    """Return the layout of each role and reward model that has its own layout."""
    layouts = {role: training.layout for role, training in config.trained.items()}
    judges = [part for part in config.rewards.parts if isinstance(part, ModelReward)]
    return layouts | {f"reward {judge.path}": judge.layout for judge in judges}


def check_layouts(config: Config) -> None:
    """Raise `Refusal` for the layout of a missing reference, and for a role other than the actor that generates."""
    name = type(config.algorithm).__name__ + " with kl=None" * hasattr(config.algorithm, "kl")
    require(
        config.reference_layout is None or "reference" in config.roles,
        f"reference_layout is set, but {name} has no reference; set reference_layout=None",
    )
    layouts = _layouts(config) | {"reference_layout": config.reference_layout or Layout()}
    layouts.pop("actor", None)
    for name, layout in layouts.items():
        fields = (f"generation_{axis}" for axis in ("context", "stage", "tensor"))
        given = ", ".join(f"{field}={size}" for field in fields if (size := getattr(layout, field)) > 1)
        require(not given, f"{name} has {given}, but only the actor generates; remove {given}")


def check_microbatches(config: Config) -> None:
    """Raise `Refusal` if the longest sequence does not fit a microbatch."""
    if config.placement == "auto":  # the plan raises a limit that is too small
        return
    together, longest = config.algorithm.together, config.rollout.width
    row = "the longest sequence, " if together == 1 else f"{together} of the longest sequences, each "
    for role, training in config.trained.items():
        name = role if role == "actor" else f"algorithm.{role}"
        require(
            training.tokens_per_microbatch >= together * longest,
            f"{name}.tokens_per_microbatch={training.tokens_per_microbatch} is below {row}"
            f"max_prompt_tokens + max_response_tokens = {longest} tokens; raise it to at least {together * longest}, "
            "or set placement='auto'",
        )

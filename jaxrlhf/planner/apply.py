"""Application of a plan: as settings of a configuration, and as a Python snippet to paste."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from jaxrlhf.batching.microbatch import packed_row_tokens
from jaxrlhf.config import ROLLOUT, Config, Layout, Pool, Refusal, Training, override
from jaxrlhf.config.cli.override import find
from jaxrlhf.planner.plan import PlacementPlan, PlannedPool
from jaxrlhf.planner.problem import configured_pools, generates_here, judges_of, placed_roles


def planned_config(config: Config, plan: PlacementPlan) -> Config:
    """Return the configuration with the placement of the plan.

    Raises:
      Refusal: The plan places other roles than the configuration has.
    """
    return override(config, planned_settings(config, plan))


def planned_settings(config: Config, plan: PlacementPlan, *, written: Config | None = None) -> dict[str, Any]:
    """Return the settings of the plan that differ from the configuration, by dotted name.

    Layouts leave `data` open, to be set by the number of devices. The smallest possible microbatch has one row for each
    data-parallel device, so smaller token budgets are raised to that.

    Args:
      written: Configuration that the settings will change, if `config` is the result of `without_placement`.

    Raises:
      Refusal: The plan places other roles than the configuration has.
    """
    judges = judges_of(config)
    layouts = {role: layout for pool in plan.pools for role, layout in pool.layouts.items()}
    known = set(placed_roles(config))
    if layouts.keys() - {ROLLOUT} != known:
        placed, has = (", ".join(sorted(roles)) for roles in (layouts, known))
        raise Refusal(f"the plan places {placed}, but the configuration has {has}; make a new plan")
    settings: dict[str, Any] = {"placement": "given", "hardware": None, "devices": None}
    settings["pools"] = _pools(config, plan, judges)
    for role, training in config.trained.items():
        name = role if role == "actor" else f"algorithm.{role}"
        layout = _generating(layouts, config) if role == "actor" else layouts[role]
        settings |= {f"{name}.layout": _open(layout)}
        settings |= {f"{name}.tokens_per_microbatch": _budget(training, layouts[role], config)}
    if config.reference_is_frozen_actor:
        settings["reference_layout"] = None
    elif "reference" in known:
        own = _open(layouts["reference"])
        as_actor = own == settings["actor.layout"].of_training
        settings["reference_layout"] = None if as_actor else own
    settings |= {f"rewards.parts.{index}.layout": _open(layouts[name]) for name, index in judges.items()}
    if plan.slots is not None and plan.slots < (config.rollout.slots or config.rollout.responses_per_step):
        settings["rollout.slots"] = plan.slots
    parts = (entry.partition(".") for entry in plan.offload)  # all reward models are offloaded together
    settings["offload"] = tuple(
        dict.fromkeys(("reward" if role in judges else role) + dot + part for role, dot, part in parts)
    )
    return {name: value for name, value in settings.items() if find(written or config, name)[0] != value}


def without_placement(config: Config) -> Config:
    """Return the configuration without its placement, and without settings that need one; keeps the device count."""
    judges = [f"rewards.parts.{index}" for index in judges_of(config).values()]
    trained = [role if role == "actor" else f"algorithm.{role}" for role in config.trained]
    layouts = {f"{name}.layout": Layout() for name in (*trained, *judges)}
    without = {"pools": (), "reference_layout": None, "offload": ()}
    return override(config, {**without, **layouts})


def snippet(config: Config, plan: PlacementPlan, *, written: Config | None = None) -> str:
    """Return Python source that applies `planned_settings`; empty if no setting changes."""
    settings = planned_settings(config, plan, written=written)
    if not settings:
        return ""
    lines = [f"    {name!r}: {_python(value)}," for name, value in settings.items()]
    return "\n".join(["config = override(config, {", *lines, "})"]).replace("'", '"')


def _pools(config: Config, plan: PlacementPlan, judges: Mapping[str, int]) -> tuple[Pool, ...]:
    """Return the plan's pools; if equal to the configuration's pools, keep the configuration's names and order."""
    planned = {(frozenset(pool.roles), pool.devices) for pool in plan.pools}
    if {(frozenset(roles), devices) for roles, devices in configured_pools(config) or ()} == planned:
        return config.pools
    return tuple(_pool(pool, config, judges, alone=len(plan.pools) == 1) for pool in plan.pools)


def _pool(pool: PlannedPool, config: Config, judges: Mapping[str, int], *, alone: bool) -> Pool:
    roles = list(dict.fromkeys("reward" if role in judges else role for role in pool.roles))
    if config.reference_is_frozen_actor and "actor" in roles:
        roles.insert(roles.index("actor") + 1, "reference")
    return Pool("all" if alone else "-".join(roles), pool.devices, tuple(roles))


def _generating(layouts: Mapping[str, Layout], config: Config) -> Layout:
    """Return the actor's layout, with the generation layout of the rollout pool, if there is one."""
    actor = layouts["actor"]
    if not generates_here(config):
        # Steps do not generate here, but evaluations do: the policy fits if it is split as for training.
        return dataclasses.replace(actor.of_training, generation_stage=actor.stage, generation_tensor=actor.tensor)
    apart = layouts.get(ROLLOUT, actor)
    fields = ("generation_context", "generation_stage", "generation_tensor")
    return dataclasses.replace(actor, **{field: getattr(apart, field) for field in fields})


def _open(layout: Layout) -> Layout:
    """Return the layout with `data` open, to be set by the number of devices."""
    return dataclasses.replace(layout, data=None)


def _budget(training: Training, layout: Layout, config: Config) -> int:
    longest = config.algorithm.together * config.rollout.width
    shards = (layout.data or 1) * layout.fsdp * layout.expert
    row_tokens = packed_row_tokens(longest, budget=0, token_shards=layout.context)
    return max(training.tokens_per_microbatch, row_tokens * shards)


def _python(value: Any) -> str:
    """Return the Python source of a value, without layout fields that have their default."""
    if isinstance(value, tuple):
        return f"({', '.join(map(_python, value))}{',' if len(value) == 1 else ''})"
    if isinstance(value, Pool):
        return f"Pool({value.name!r}, {value.devices}, {value.roles!r})"
    if isinstance(value, Layout):
        fields = [(field.name, getattr(value, field.name), field.default) for field in dataclasses.fields(value)]
        return f"Layout({', '.join(f'{name}={given}' for name, given, default in fields if given != default)})"
    return repr(value)

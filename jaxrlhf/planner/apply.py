"""A plan as settings of a configuration, and as Python to paste."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from jaxrlhf.batching.microbatch import packed_row_tokens
from jaxrlhf.config import ROLLOUT, Config, Layout, Pool, Refusal, Training, override
from jaxrlhf.config.cli.override import find
from jaxrlhf.planner.plan import PlacementPlan, PlannedPool
from jaxrlhf.planner.problem import generates_here, judges_of, placed_roles, written_pools


def planned_config(config: Config, plan: PlacementPlan) -> Config:
    """The configuration with the plan's placement in place of its own.

    Raises:
      Refusal: The plan places other roles than the configuration has.
    """
    return override(config, planned_settings(config, plan))


def planned_settings(config: Config, plan: PlacementPlan, *, written: Config | None = None) -> dict[str, Any]:
    """Settings of the plan by dotted name, where they differ from what is written.

    Layouts leave `data` to the devices that are there. A microbatch that gives a row to each data-parallel device is
    the smallest there can be, so a token budget below that is raised.

    Args:
      written: The configuration that the settings are to change, if it was freed to be planned.

    Raises:
      Refusal: The plan places other roles than the configuration has.
    """
    judges = judges_of(config)
    layouts = {role: layout for pool in plan.pools for role, layout in pool.layouts.items()}
    known = set(placed_roles(config))
    if layouts.keys() - {ROLLOUT} != known:
        placed, has = (", ".join(sorted(roles)) for roles in (layouts, known))
        raise Refusal(f"the plan places {placed} and the configuration has {has}; plan anew")
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
    parts = (entry.partition(".") for entry in plan.offload)  # reward models wait together
    settings["offload"] = tuple(
        dict.fromkeys(("reward" if role in judges else role) + dot + part for role, dot, part in parts)
    )
    if ROLLOUT not in layouts:  # parts are learnt from while another pool draws the others
        settings["rollout.stream_parts"] = 1
    return {name: value for name, value in settings.items() if find(written or config, name)[0] != value}


def freed(config: Config) -> Config:
    """The configuration without the placement that it gives, and what takes it, but for its number of devices."""
    judges = [f"rewards.parts.{index}" for index in judges_of(config).values()]
    trained = [role if role == "actor" else f"algorithm.{role}" for role in config.trained]
    layouts = {f"{name}.layout": Layout() for name in (*trained, *judges)}
    without = {"pools": (), "reference_layout": None, "offload": (), "rollout.stream_parts": 1}
    return override(config, {**without, **layouts})


def snippet(config: Config, plan: PlacementPlan, *, written: Config | None = None) -> str:
    """Python with the settings of `planned_settings`; empty if there are none to change."""
    settings = planned_settings(config, plan, written=written)
    if not settings:
        return ""
    lines = [f"    {name!r}: {_python(value)}," for name, value in settings.items()]
    return "\n".join(["config = override(config, {", *lines, "})"]).replace("'", '"')


def _pools(config: Config, plan: PlacementPlan, judges: Mapping[str, int]) -> tuple[Pool, ...]:
    """The plan's pools; those of the configuration, with their names and order, if they are the same."""
    planned = {(frozenset(pool.roles), pool.devices) for pool in plan.pools}
    if {(frozenset(roles), devices) for roles, devices in written_pools(config) or ()} == planned:
        return config.pools
    return tuple(_pool(pool, config, judges, alone=len(plan.pools) == 1) for pool in plan.pools)


def _pool(pool: PlannedPool, config: Config, judges: Mapping[str, int], *, alone: bool) -> Pool:
    roles = list(dict.fromkeys("reward" if role in judges else role for role in pool.roles))
    if config.reference_is_frozen_actor and "actor" in roles:
        roles.insert(roles.index("actor") + 1, "reference")
    return Pool("all" if alone else "-".join(roles), pool.devices, tuple(roles))


def _generating(layouts: Mapping[str, Layout], config: Config) -> Layout:
    """The actor's layout, with that of a pool which generates for it, if there is one."""
    actor = layouts["actor"]
    if not generates_here(config):
        # Steps do not generate but evaluations do; as it is split for training, the policy fits.
        return dataclasses.replace(actor.of_training, generation_stage=actor.stage, generation_tensor=actor.tensor)
    apart = layouts.get(ROLLOUT, actor)
    fields = ("generation_context", "generation_stage", "generation_tensor")
    return dataclasses.replace(actor, **{field: getattr(apart, field) for field in fields})


def _open(layout: Layout) -> Layout:
    """The layout, with `data` left to the devices that are there."""
    return dataclasses.replace(layout, data=None)


def _budget(training: Training, layout: Layout, config: Config) -> int:
    longest = config.rollout.max_prompt_tokens + config.rollout.max_response_tokens
    shards = (layout.data or 1) * layout.fsdp * layout.expert
    row_tokens = packed_row_tokens(longest, budget=0, token_shards=layout.context)
    return max(training.tokens_per_microbatch, row_tokens * shards)


def _python(value: Any) -> str:
    """Python source of a value; settings that have their default are left out."""
    if isinstance(value, tuple):
        return f"({', '.join(map(_python, value))}{',' if len(value) == 1 else ''})"
    if isinstance(value, Pool):
        return f"Pool({value.name!r}, {value.devices}, {value.roles!r})"
    if isinstance(value, Layout):
        fields = [(field.name, getattr(value, field.name), field.default) for field in dataclasses.fields(value)]
        return f"Layout({', '.join(f'{name}={given}' for name, given, default in fields if given != default)})"
    return repr(value)

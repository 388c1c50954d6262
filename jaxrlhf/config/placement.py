"""Placement of roles on devices, and offload to host memory."""

from collections.abc import Sequence
from dataclasses import dataclass

from jaxrlhf.config.refusal import require
from jaxrlhf.config.settings import Positive, Settings

ROLLOUT = "rollout"
"""Role that generates with a copy of the actor's weights; can be placed for every algorithm with an actor."""

PARTS = ("parameters", "optimizer")


@dataclass(frozen=True)
class Pool(Settings):
    """Named set of devices, and the roles placed on it.

    Roles on one pool take turns; roles on different pools run concurrently. If `rollout` is on another pool than
    `actor`, it receives the weights before each rollout. If `reward` is not placed, rewards are computed next to the
    first pool.

    Attributes:
      devices: Number of devices, assigned from the program's devices in order, pool after pool.
      roles: Names of roles, such as `("actor", "reference")`.
    """

    name: str
    devices: Positive[int]
    roles: tuple[str, ...]

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            bool(self.name.strip()) and "/" not in self.name, f"Pool.name must be a name without '/', got {self.name!r}"
        )
        require(bool(self.roles), f"pool {self.name!r} has no roles; remove the pool, or add roles")


def check_pools(pools: Sequence[Pool], roles: Sequence[str]) -> None:
    """Raise `Refusal` unless every role of the algorithm is placed exactly once, and no other role is placed."""
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
    known = {*roles, ROLLOUT, "reward"} if "actor" in roles else {*roles, "reward"}
    unknown = sorted(set(placed) - known)
    hint = "; with a kl it has a reference" if unknown == ["reference"] else ""
    require(not unknown, f"pools place {', '.join(unknown)}, but the algorithm only has {', '.join(roles)}{hint}")
    missing = sorted(set(roles) - set(placed) - {"reward"})
    require(not missing, f"pools do not place {', '.join(missing)}; add them to the roles of a pool")


def check_offload(offload: Sequence[str], models: Sequence[str], trained: Sequence[str]) -> None:
    """Raise `Refusal` if an entry names no part of a model of the run."""
    for entry in offload:
        role, _, part = entry.partition(".")
        require(role in models, f"offload: {entry!r}, but the models of this run are {', '.join(models)}")
        named = part in ("", *PARTS) and entry.count(".") == (part != "")
        require(named, f"offload: {entry!r}; for {role} write {role}, {role}.parameters or {role}.optimizer")
        require(part != "optimizer" or role in trained, f"offload: {entry!r}, but {role} is not trained; write {role}")


def offloaded(offload: Sequence[str], role: str, part: str) -> bool:
    """Return True if `part` of `role` is kept in host memory while it is not in use."""
    return role in offload or f"{role}.{part}" in offload

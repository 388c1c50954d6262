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
        require(bool(self.name.strip()) and "/" not in self.name, f"Pool.name must be a plain name, got {self.name!r}")
        require(bool(self.roles), f"pool {self.name!r} has no roles; drop it, or place some")


def check_pools(pools: Sequence[Pool], roles: Sequence[str]) -> None:
    """Raise `Refusal` unless every role of the algorithm is placed exactly once, and no other role is placed."""
    if not pools:
        return
    names = [pool.name for pool in pools]
    require(len(set(names)) == len(names), f"two of the pools {names} have one name; rename one")
    placed = [role for pool in pools for role in pool.roles]
    twice = sorted({role for role in placed if placed.count(role) > 1})
    require(not twice, f"pools place {', '.join(twice)} more than once; a role lives on one pool")
    together = [pool.name for pool in pools if {"actor", ROLLOUT} <= set(pool.roles)]
    require(
        not together,
        f"pool {', '.join(together)} places actor and rollout, and on its own devices the actor generates itself; "
        f"leave rollout out, or place it on another pool",
    )
    known = {*roles, ROLLOUT, "reward"} if "actor" in roles else {*roles, "reward"}
    strange = sorted(set(placed) - known)
    hint = "; it has a reference where it has a kl" if strange == ["reference"] else ""
    require(not strange, f"pools place {', '.join(strange)}, and the algorithm has {', '.join(roles)}{hint}")
    missing = sorted(set(roles) - set(placed) - {"reward"})
    require(not missing, f"pools do not place {', '.join(missing)}; add them to the roles of a pool")


def check_offload(offload: Sequence[str], models: Sequence[str], trained: Sequence[str]) -> None:
    """Raise `Refusal` if an entry names no part of a model of the run."""
    for entry in offload:
        role, _, part = entry.partition(".")
        require(role in models, f"offload: {entry!r} names no model of this run; it has {', '.join(models)}")
        named = part in ("", *PARTS) and entry.count(".") == (part != "")
        require(
            named, f"offload: {entry!r} names no part of {role}; write {role}, {role}.parameters or {role}.optimizer"
        )
        require(part != "optimizer" or role in trained, f"offload: {entry!r}, and {role} is not trained; write {role}")


def offloaded(offload: Sequence[str], role: str, part: str) -> bool:
    """Return True if `part` of `role` is kept in host memory while it is not in use."""
    return role in offload or f"{role}.{part}" in offload

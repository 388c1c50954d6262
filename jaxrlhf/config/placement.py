"""Placement of roles on devices, and offload to host memory."""

from collections.abc import Sequence
from dataclasses import dataclass

from jaxrlhf.config.refusal import require
from jaxrlhf.config.settings import Positive, Settings

ROLLOUT = "rollout"
"""Role that generates with a copy of the actor's weights; can be placed for every algorithm with an actor."""


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


def offloaded(offload: Sequence[str], role: str, part: str) -> bool:
    """Return True if `part` of `role` is kept in host memory while it is not in use."""
    return role in offload or f"{role}.{part}" in offload

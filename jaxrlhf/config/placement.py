"""Placement of roles on devices, and offload to host memory."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from jaxrlhf.config.settings import Bound, NotEmpty, Positive, Settings

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

    name: Annotated[str, Bound(lambda name: name.strip() and "/" not in name, "a name without '/'", str)]
    devices: Positive[int]
    roles: NotEmpty[tuple[str, ...]]


def offloaded(offload: Sequence[str], role: str, part: str) -> bool:
    """Return True if `part` of `role` is kept in host memory while it is not in use."""
    return role in offload or f"{role}.{part}" in offload

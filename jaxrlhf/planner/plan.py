"""Data of the search: its problem, the cost of a call, and placement plans as its answer."""

import operator
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from jaxrlhf.config import Layout, Refusal
from jaxrlhf.planner.hardware import Hardware
from jaxrlhf.planner.workload import Role, Software, Stage, Workload

Verb = Literal["generate", "switch", "move", "infer", "update", "offload"]


@dataclass(frozen=True)
class Cost:
    """Seconds of one device, by what they are spent on.

    Attributes:
      compute_s: Matrix products.
      memory_s: Reading weights and cache, where that takes longer than the products.
      collective_s: Collectives between devices.
      idle_s: Waiting for another pipeline stage.
      host_s: Between device and host memory.
      overhead_s: Starting programs and kernels.
    """

    compute_s: float = 0.0
    memory_s: float = 0.0
    collective_s: float = 0.0
    idle_s: float = 0.0
    host_s: float = 0.0
    overhead_s: float = 0.0

    def __add__(self, other: "Cost") -> "Cost":
        """Cost of both, one after the other."""
        return Cost(*map(operator.add, self._parts, other._parts))

    def __mul__(self, count: float) -> "Cost":
        """Cost of `count` repetitions."""
        return Cost(*(seconds * count for seconds in self._parts))

    @property
    def _parts(self) -> tuple[float, ...]:  # dataclasses.astuple copies deeply, which a search feels
        return self.compute_s, self.memory_s, self.collective_s, self.idle_s, self.host_s, self.overhead_s

    @property
    def seconds(self) -> float:
        """Sum of all parts."""
        return sum(self._parts)

    @property
    def bottleneck(self) -> str:
        """Part of the cost with the most seconds, in words."""
        parts = {
            "compute": self.compute_s,
            "memory bandwidth": self.memory_s,
            "collectives": self.collective_s,
            "pipeline idle": self.idle_s,
            "host transfers": self.host_s,
            "overhead": self.overhead_s,
        }
        return max(parts, key=lambda name: parts[name])


@dataclass(frozen=True)
class PlannedCall:
    """One verb of one role in a step. Calls of one pool run one after another.

    Attributes:
      pool: Index into the plan's pools.
      note: Such as `2 waves of 40 sequences per replica`; empty if there is nothing to say.
    """

    stage: Stage
    pool: int
    role: str
    verb: Verb
    cost: Cost
    note: str = ""


@dataclass(frozen=True)
class PlannedPool:
    """Roles that share devices.

    Attributes:
      devices: Number of devices.
      layouts: Layout of each role, with `data` given.
      peak_bytes: Most that one device holds.
      peak_during: The call that needs it, such as `actor update`.
    """

    roles: tuple[str, ...]
    devices: int
    layouts: Mapping[str, Layout]
    peak_bytes: float
    peak_during: str


@dataclass(frozen=True)
class PlacementPlan:
    """A placement, with what it is predicted to cost.

    Attributes:
      pools: Largest first.
      offload: Entries of `Config.offload`: role states that wait in host memory.
      calls: In the order in which a pool runs them.
      stage_seconds: Seconds of the slowest pool in each stage.
      slots: Responses that are decoded at once, over all replicas; None if nothing is generated.
    """

    pools: tuple[PlannedPool, ...]
    offload: tuple[str, ...]
    calls: tuple[PlannedCall, ...]
    stage_seconds: Mapping[Stage, float]
    slots: int | None = None

    @property
    def seconds(self) -> float:
        """Seconds of one step: stages run one after another. Source: HybridFlow, section 6 (d_cost)."""
        return sum(self.stage_seconds.values())


@dataclass(frozen=True)
class PlacementProblem:
    """Placement problem: roles, workload and software, and the hardware they are placed on.

    Attributes:
      offloads: Alternatives for `Config.offload`; the cheapest that fits is taken.
      together: Groups of roles that have to share a pool.
      rollout_apart: Also consider generation on a pool of its own, as a role named `rollout`.
      fsdp: Also consider splitting weights over data-parallel devices.
      layouts: Alternatives for roles whose layout is given; those of others are searched. Without
        `data` a layout takes the devices that are left.
      devices_per_host: Devices of one process where there are several. A pool has whole hosts, and each
        generation replica lies within one; None lets pools share a machine.
      pools: The only placement to look at, roles and devices of each pool; None looks at all.
    """

    roles: tuple[Role, ...]
    workload: Workload
    software: Software
    hardware: Hardware
    offloads: tuple[tuple[str, ...], ...] = ((),)
    together: tuple[tuple[str, ...], ...] = ()
    rollout_apart: bool = False
    fsdp: bool = True
    layouts: Mapping[str, tuple[Layout, ...]] | None = None
    devices_per_host: int | None = None
    pools: tuple[tuple[tuple[str, ...], int], ...] | None = None


@dataclass(frozen=True)
class SearchResult:
    """Result of a search.

    Attributes:
      plans: The best of each placement, cheapest first.
      placements: Set partitions looked at.
      allocations: Distributions of devices over pools that were costed or pruned.
      simulated: Layouts of one role on one number of devices that were costed.
      seconds: Duration of the search.
    """

    plans: tuple[PlacementPlan, ...]
    placements: int
    allocations: int
    simulated: int
    seconds: float


class Infeasible(Refusal):
    """No placement fits; the message says which role lacks how many bytes, and what would help."""

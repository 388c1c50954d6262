"""Data of the search: its problem, the cost of a call, placement plans as its answer, and their files."""

import json
import operator
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from jaxrlhf.config import ROLLOUT, Layout, Refusal
from jaxrlhf.planner.hardware import Hardware
from jaxrlhf.planner.workload import Role, Software, Stage, Workload

Verb = Literal["generate", "switch", "move", "infer", "update", "offload"]
GivenPools = tuple[tuple[tuple[str, ...], int], ...]
"""Roles and devices of each pool."""


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
        return PARTS[max(PARTS, key=lambda name: getattr(self, name))]


PARTS: Mapping[str, str] = {
    "compute_s": "compute",
    "memory_s": "memory bandwidth",
    "collective_s": "collectives",
    "idle_s": "pipeline idle",
    "host_s": "host transfers",
    "overhead_s": "overhead",
}
"""Parts of a cost, in words."""


@dataclass(frozen=True)
class PlannedCall:
    """One verb of one role in a step, on the pool of that index. Calls of one pool run one after another."""

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
      fsdp: Also consider splitting weights over data-parallel devices.
      layouts: Alternatives for roles whose layout is given; those of others are searched. Without
        `data` a layout takes the devices that are left.
      devices_per_host: Devices of one process where there are several. A pool has whole hosts, and each generation
        replica lies within one; None lets pools share a machine.
      pools: The only placement to look at, roles and devices of each pool; None looks at all, where the actor's pool
        generates. A role named `rollout` generates on a pool of its own.
    """

    roles: tuple[Role, ...]
    workload: Workload
    software: Software
    hardware: Hardware
    offloads: tuple[tuple[str, ...], ...] = ((),)
    together: tuple[tuple[str, ...], ...] = ()
    fsdp: bool = True
    layouts: Mapping[str, tuple[Layout, ...]] | None = None
    devices_per_host: int | None = None
    pools: GivenPools | None = None

    @property
    def rollout_apart(self) -> bool:
        """True if generation has a pool of its own."""
        return any(ROLLOUT in roles for roles, _ in self.pools or ())


@dataclass(frozen=True)
class SearchResult:
    """Result of a search.

    Attributes:
      plans: The best of each placement, cheapest first.
      placements: Set partitions looked at.
      allocations: Distributions of devices over pools that were costed or pruned.
      simulated: Layouts of one role on one number of devices that were costed.
    """

    plans: tuple[PlacementPlan, ...]
    placements: int
    allocations: int
    simulated: int
    seconds: float


class Infeasible(Refusal):
    """No placement fits; the message says which role lacks how many bytes, and what would help."""


PLAN = "plan.json"
"""File of a run's plan in its workdir."""


@dataclass(frozen=True)
class SavedPlan:
    """A plan, and the fields of the `Hardware` that it was made for."""

    plan: PlacementPlan
    hardware: dict[str, Any]

    @property
    def devices(self) -> int:
        """Number of devices that it was made for."""
        return self.hardware["machines"] * self.hardware["devices_per_machine"]

    def why_not(self, *, devices: int, roles: Iterable[str]) -> str | None:
        """Reason that the plan does not serve a run on so many devices with these roles; None if it does."""
        if self.devices != devices:
            return f"it is for {self.devices} devices and there are {devices}"
        placed = {role for pool in self.plan.pools for role in pool.roles} - {ROLLOUT}
        if placed != set(roles):
            return f"it places {', '.join(sorted(placed))} and the run has {', '.join(sorted(roles))}"
        return None


def save_plan(plan: PlacementPlan, hardware: Hardware, workdir: Path) -> None:
    """Write a run's plan, so that the run goes on with it."""
    fields = {"hardware": asdict(hardware), "plan": plan_to_json(plan)}
    (workdir / PLAN).write_text(json.dumps(fields, indent=2) + "\n")


def read_plan(workdir: Path) -> SavedPlan | None:
    """The plan of a workdir; None if it has none.

    Raises:
      Refusal: The file is no plan.
    """
    file = workdir / PLAN
    if not file.is_file():
        return None
    try:
        fields = json.loads(file.read_text())
        return SavedPlan(plan_from_json(fields["plan"]), dict(fields["hardware"]))
    except (ValueError, KeyError, TypeError) as error:
        raise Refusal(f"{file} cannot be read ({error}); delete it, and the run plans anew") from error


def plan_to_json(plan: PlacementPlan) -> dict[str, Any]:
    """All fields of a plan as JSON data, with its total seconds."""
    return {"seconds": plan.seconds, **asdict(plan)}


def plan_from_json(data: Mapping[str, Any]) -> PlacementPlan:
    """The plan that `plan_to_json` wrote.

    Raises:
      Refusal: A field is missing, or is not a plan's.
    """
    try:
        pools = []
        for pool in data["pools"]:
            pool = {**pool, "roles": tuple(pool["roles"])}
            layouts = {role: Layout(**layout) for role, layout in pool["layouts"].items()}
            pools.append(PlannedPool(**{**pool, "layouts": layouts}))
        calls = tuple(PlannedCall(**{**call, "cost": Cost(**call["cost"])}) for call in data["calls"])
        return PlacementPlan(tuple(pools), tuple(data["offload"]), calls, dict(data["stage_seconds"]), data["slots"])
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        reason = f"has no {error}" if isinstance(error, KeyError) else str(error)
        raise Refusal(f"this is no plan: {reason}; plan anew") from error

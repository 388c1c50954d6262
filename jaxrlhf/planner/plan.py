"""Data types of the search: placement problem, cost of a call, placement plan, and files of plans."""

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
    """Cost of a call: seconds of one device, by cause.

    Attributes:
      compute_s: Seconds of matrix products.
      memory_s: Seconds of reading weights and cache, as far as that takes longer than the products.
      collective_s: Seconds of collectives between devices.
      idle_s: Seconds of waiting for another pipeline stage.
      host_s: Seconds of transfers between device and host memory.
      overhead_s: Seconds of starting programs and kernels.
    """

    compute_s: float = 0.0
    memory_s: float = 0.0
    collective_s: float = 0.0
    idle_s: float = 0.0
    host_s: float = 0.0
    overhead_s: float = 0.0

    def __add__(self, other: "Cost") -> "Cost":
        """Return the cost of both, one after the other."""
        return Cost(*map(operator.add, self._parts, other._parts))

    def __mul__(self, count: float) -> "Cost":
        """Return the cost of `count` repetitions."""
        return Cost(*(seconds * count for seconds in self._parts))

    @property
    def _parts(self) -> tuple[float, ...]:  # dataclasses.astuple makes deep copies, too slow for a search
        return self.compute_s, self.memory_s, self.collective_s, self.idle_s, self.host_s, self.overhead_s

    @property
    def seconds(self) -> float:
        """Sum of all parts."""
        return sum(self._parts)

    @property
    def bottleneck(self) -> str:
        """Name of the part of the cost with the most seconds."""
        return PARTS[max(PARTS, key=lambda name: getattr(self, name))]


PARTS: Mapping[str, str] = {
    "compute_s": "compute",
    "memory_s": "memory bandwidth",
    "collective_s": "collectives",
    "idle_s": "pipeline idle",
    "host_s": "host transfers",
    "overhead_s": "overhead",
}
"""Names of the parts of a cost, for reports."""


@dataclass(frozen=True)
class PlannedCall:
    """Call of a role in a step, on the pool of index `pool`. Calls of one pool run one after another."""

    stage: Stage
    pool: int
    role: str
    verb: Verb
    cost: Cost
    note: str = ""


@dataclass(frozen=True)
class PlannedPool:
    """Pool of a plan: roles that share devices.

    Attributes:
      layouts: Layout of each role, with `data` set.
      peak_bytes: Most bytes that one device holds.
      peak_during: Call that needs the most bytes, such as `actor update`.
    """

    roles: tuple[str, ...]
    devices: int
    layouts: Mapping[str, Layout]
    peak_bytes: float
    peak_during: str


@dataclass(frozen=True)
class PlacementPlan:
    """Placement, with its predicted cost.

    Attributes:
      pools: Pools, largest first.
      offload: Entries of `Config.offload`: role states that are kept in host memory while not in use.
      calls: Calls of a step; calls of one pool are in the order in which the pool runs them.
      stage_seconds: Seconds of each stage: of its slowest pool, or of all pools if they take turns.
      slots: Number of responses decoded at once, over all replicas; None if nothing is generated.
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
    """Placement problem: roles, workload and software, and the hardware for them.

    Attributes:
      offloads: Alternatives for `Config.offload`; the fastest alternative that fits is chosen.
      together: Groups of roles that have to share a pool.
      fsdp: Whether to try splitting weights over data-parallel devices.
      layouts: Alternatives for roles with fixed layouts; layouts of other roles are searched. A layout without `data`
        takes the devices that are left.
      devices_per_host: Number of devices of a process, if there are several processes. A pool then has whole hosts, and
        each generation replica is inside one host. None lets pools share a machine.
      pools: Only placement to try, as roles and devices of each pool; None tries all placements in which the actor's
        pool generates. A role named `rollout` generates on a separate pool.
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
    def has_rollout_pool(self) -> bool:
        """True if generation has a separate pool."""
        return any(ROLLOUT in roles for roles, _ in self.pools or ())


@dataclass(frozen=True)
class SearchResult:
    """Result of a search.

    Attributes:
      plans: Best plan of each placement, fastest first.
      placements: Number of set partitions that were tried.
      allocations: Number of options of pools that were tried in distributions of devices.
      simulated: Number of simulated layouts, each of one role on one number of devices.
      seconds: Seconds of the search.
    """

    plans: tuple[PlacementPlan, ...]
    placements: int
    allocations: int
    simulated: int
    seconds: float


class Infeasible(Refusal):
    """Refusal because no placement fits; the message says which role lacks how many bytes, and what would help."""


PLAN = "plan.json"
"""Name of the file of a run's plan in the workdir."""


@dataclass(frozen=True)
class SavedPlan:
    """Plan, with the fields of the `Hardware` that it was made for."""

    plan: PlacementPlan
    hardware: dict[str, Any]

    @property
    def devices(self) -> int:
        """Number of devices that the plan was made for."""
        return self.hardware["machines"] * self.hardware["devices_per_machine"]

    def why_not(self, *, devices: int, roles: Iterable[str]) -> str | None:
        """Return the reason why the plan cannot serve a run with these devices and roles; None if it can."""
        if self.devices != devices:
            return f"the plan is for {self.devices} devices, but there are {devices}"
        placed = {role for pool in self.plan.pools for role in pool.roles} - {ROLLOUT}
        if placed != set(roles):
            return f"the plan places {', '.join(sorted(placed))}, but the run has {', '.join(sorted(roles))}"
        return None


def save_plan(plan: PlacementPlan, hardware: Hardware, workdir: Path) -> None:
    """Write a run's plan, so that the resumed run uses the same plan."""
    fields = {"hardware": asdict(hardware), "plan": plan_to_json(plan)}
    (workdir / PLAN).write_text(json.dumps(fields, indent=2) + "\n")


def read_plan(workdir: Path) -> SavedPlan | None:
    """Read the plan of a workdir; None if the workdir has no plan.

    Raises:
      Refusal: The file is no plan.
    """
    file = workdir / PLAN
    if not file.is_file():
        return None
    try:
        fields = json.loads(file.read_text())
        return SavedPlan(plan_from_json(fields["plan"]), dict(fields["hardware"]))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise Refusal(f"{file} cannot be read ({error}); delete the file to make a new plan") from error


def plan_to_json(plan: PlacementPlan) -> dict[str, Any]:
    """Return all fields of a plan as JSON data, with its total seconds."""
    return {"seconds": plan.seconds, **asdict(plan)}


def plan_from_json(data: Mapping[str, Any]) -> PlacementPlan:
    """Build a plan from the data of `plan_to_json`.

    Raises:
      Refusal: A field is missing or invalid.
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
        raise Refusal(f"not a valid plan: {reason}; make a new plan") from error

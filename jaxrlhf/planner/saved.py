"""The plan of a run in its workdir: written once, and taken again when the run goes on."""

import dataclasses
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxrlhf.config import ROLLOUT, Refusal
from jaxrlhf.planner.apply import plan_from_json, plan_to_json
from jaxrlhf.planner.hardware import Hardware
from jaxrlhf.planner.plan import PlacementPlan
from jaxrlhf.planner.report.picture import save_timeline

PLAN, PICTURE = "plan.json", "plan.png"


@dataclass(frozen=True)
class SavedPlan:
    """A plan, and the hardware that it was made for.

    Attributes:
      hardware: The fields of `Hardware`.
    """

    plan: PlacementPlan
    hardware: dict[str, Any]

    @property
    def devices(self) -> int:
        """Number of devices that it was made for."""
        return self.hardware["machines"] * self.hardware["devices_per_machine"]

    @property
    def roles(self) -> set[str]:
        """Roles of all pools, each with a model of its own."""
        return {role for pool in self.plan.pools for role in pool.roles} - {ROLLOUT}


def save_plan(plan: PlacementPlan, hardware: Hardware, workdir: Path, *, title: str) -> None:
    """Write the plan and its picture."""
    fields = {"hardware": dataclasses.asdict(hardware), "plan": plan_to_json(plan)}
    (workdir / PLAN).write_text(json.dumps(fields, indent=2) + "\n")
    save_timeline(plan, workdir / PICTURE, title=title)


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


def why_not(saved: SavedPlan, *, devices: int, roles: Iterable[str]) -> str | None:
    """Why a saved plan does not serve a run on so many devices with these roles; None if it does."""
    if saved.devices != devices:
        return f"it is for {saved.devices} devices and there are {devices}"
    if saved.roles != set(roles):
        return f"it places {', '.join(sorted(saved.roles))} and the run has {', '.join(sorted(roles))}"
    return None

"""Automatic placement at start-up, for `placement='auto'`: reuses the run's plan, or searches for a new one."""

from dataclasses import dataclass
from pathlib import Path

from jaxrlhf.config import Config
from jaxrlhf.planner.apply import planned_config
from jaxrlhf.planner.hardware import Hardware, hardware_of
from jaxrlhf.planner.picture import draw_timeline
from jaxrlhf.planner.plan import PLAN, PlacementPlan, read_plan, save_plan
from jaxrlhf.planner.problem import placed_roles, question_of
from jaxrlhf.planner.report import report, timeline_title
from jaxrlhf.planner.search.mapping import binding_slots, search
from jaxrlhf.tracking import default_console, say

_SHOWN, _PICTURE = 3, "plan.png"


@dataclass(frozen=True)
class Placed:
    """Configuration with its placement filled in.

    Attributes:
      config: Configuration to launch.
      title: Title of the plan's picture.
      found: True if the plan is new; False if it was read from the workdir.
    """

    config: Config
    plan: PlacementPlan
    hardware: Hardware
    title: str
    found: bool

    def write(self, workdir: Path) -> None:
        """Write a new plan and its picture to the workdir, so that a resumed run uses the plan again."""
        if self.found:
            save_plan(self.plan, self.hardware, workdir)
            draw_timeline(self.plan, title=self.title).savefig(workdir / _PICTURE, dpi=130)


def place(config: Config, workdir: Path, *, vocabulary: int) -> Placed:
    """Fill in pools, layouts and offload from the workdir's plan if it fits, else from a new plan; print the choice.

    Args:
      vocabulary: Number of tokens of the tokenizer.

    Raises:
      Refusal: The hardware is not known, or no placement fits it.
    """
    hardware = hardware_of(config)
    title = timeline_title(config, hardware)
    saved = saved_plan(config, workdir, hardware) if config.resume else None
    if saved is not None:
        return Placed(planned_config(config, saved), saved, hardware, title, found=False)
    question = question_of(config, hardware, vocabulary=vocabulary)
    searched = search(question.problem, keep=_SHOWN)
    plan = searched.plans[0]
    bound = binding_slots(question.problem, plan)
    notes = (*question.notes, *([bound] if bound else []))
    default_console().print(report(searched, hardware, notes, shown=_SHOWN))
    return Placed(planned_config(config, plan), plan, hardware, title, found=True)


def placed_for_evaluation(config: Config, workdir: Path) -> Config:
    """Fill in the placement of a run's plan if the plan fits the devices here; otherwise use one pool."""
    plan = saved_plan(config, workdir, hardware_of(config))
    if plan is None:
        say(
            f"no plan in {workdir} fits these devices; evaluating on one pool, with a copy of the policy on each device"
        )
        return config
    return planned_config(config, plan)


def saved_plan(config: Config, workdir: Path, hardware: Hardware) -> PlacementPlan | None:
    """Return the plan of a workdir, or None if there is none that fits; print the decision and its reason."""
    saved = read_plan(workdir)
    if saved is None:
        return None
    reason = saved.why_not(devices=hardware.devices, roles=placed_roles(config))
    if reason is not None:
        say(f"placement: the plan {workdir / PLAN} is not reused: {reason}")
        return None
    say(f"placement: reusing the plan {workdir / PLAN}")
    return saved.plan

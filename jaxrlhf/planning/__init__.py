"""From a configuration to a placement: what is planned, on which hardware, and how it is shown."""

from jaxrlhf.planning.apply import freed, plan_from_json, plan_to_json, planned_config, planned_settings, snippet
from jaxrlhf.planning.local import hardware_of
from jaxrlhf.planning.picture import draw_timeline, save_timeline
from jaxrlhf.planning.problem import Lengths, Question, placed_roles, problem_of, question_of
from jaxrlhf.planning.report import report, timeline_title, why_it_lost
from jaxrlhf.planning.saved import PLAN, SavedPlan, read_plan, save_plan, why_not
from jaxrlhf.planning.shapes import SHAPES, shape_of

__all__ = [
    "PLAN",
    "SHAPES",
    "Lengths",
    "Question",
    "SavedPlan",
    "draw_timeline",
    "freed",
    "hardware_of",
    "placed_roles",
    "plan_from_json",
    "plan_to_json",
    "planned_config",
    "planned_settings",
    "problem_of",
    "question_of",
    "read_plan",
    "report",
    "save_plan",
    "save_timeline",
    "shape_of",
    "snippet",
    "timeline_title",
    "why_it_lost",
    "why_not",
]

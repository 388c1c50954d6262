"""Predictions: from a configuration to a placement, on which hardware, and how it is shown."""

from jaxrlhf.planner.apply import freed, plan_from_json, plan_to_json, planned_config, planned_settings, snippet
from jaxrlhf.planner.hardware import hardware_of
from jaxrlhf.planner.problem import Lengths, Question, placed_roles, problem_of, question_of
from jaxrlhf.planner.report.picture import draw_timeline, save_timeline
from jaxrlhf.planner.report.report import report, timeline_title, why_it_lost
from jaxrlhf.planner.saved import PLAN, SavedPlan, read_plan, save_plan, why_not
from jaxrlhf.planner.shapes import SHAPES, shape_of

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

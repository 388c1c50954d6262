"""Predictions: from a configuration to a placement, on which hardware, and how it is shown."""

from jaxrlhf.planner.apply import freed, plan_to_json, snippet
from jaxrlhf.planner.hardware import hardware_of
from jaxrlhf.planner.problem import Lengths, question_of
from jaxrlhf.planner.report.picture import save_timeline
from jaxrlhf.planner.report.report import report, timeline_title

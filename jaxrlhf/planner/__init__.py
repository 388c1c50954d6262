"""Placement planner: finds a placement of a configuration on hardware, predicts its step time, and reports both."""

from jaxrlhf.planner.apply import snippet, without_placement
from jaxrlhf.planner.compiled import check_fits, compiled_to_json
from jaxrlhf.planner.compiled_report import compiled_report
from jaxrlhf.planner.hardware import hardware_of
from jaxrlhf.planner.picture import draw_timeline
from jaxrlhf.planner.plan import plan_to_json
from jaxrlhf.planner.problem import Lengths, question_of
from jaxrlhf.planner.report import timeline_title

"""Experiment trackers of a run: TensorBoard, Weights & Biases, MLflow, SwanLab, Trackio."""

from jaxrlhf.tracking.trackers.tracker import COLUMNS, TrackedRun
from jaxrlhf.tracking.trackers.trackers import Trackers, require_packages

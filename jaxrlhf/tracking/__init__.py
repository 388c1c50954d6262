"""Metrics, samples, progress, timing and pictures of a run."""

from jaxrlhf.tracking.console import BytesBar, RunConsole, SettingsTable, default_console, say
from jaxrlhf.tracking.device_memory import DevicePeak, bytes_in_use
from jaxrlhf.tracking.metrics import JsonLines, Logger, MetricsWriter
from jaxrlhf.tracking.plots import save_learning_curve
from jaxrlhf.tracking.records import read_records
from jaxrlhf.tracking.samples import Sample, SampleFile, read_samples, show_samples, visible
from jaxrlhf.tracking.step_picture import save_step_picture
from jaxrlhf.tracking.time_spent import time_spent, time_table, typical
from jaxrlhf.tracking.timeline import ON_HOST, Call, StepCalls, TimelineFile
from jaxrlhf.tracking.timing import CompileCounter, peak_memory_bytes
from jaxrlhf.tracking.trackers import TrackedRun, Trackers, require_packages

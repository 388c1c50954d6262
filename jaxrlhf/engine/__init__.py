"""Rollout generation: an engine that answers requests with one version of the weights at a time."""

from jaxrlhf.engine.engine import Engine
from jaxrlhf.engine.sequence import Completion, Request
from jaxrlhf.engine.service import EngineService

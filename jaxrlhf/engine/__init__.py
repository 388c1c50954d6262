"""Generation: continuous batching over slots, in the shape of JetStream's engine."""

from jaxrlhf.engine.engine import Engine, Prefilled
from jaxrlhf.engine.scheduler import Completion, Drawn, Placement, Request

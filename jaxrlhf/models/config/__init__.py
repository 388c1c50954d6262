"""Configuration of a decoder's shape, as dataclasses."""

from jaxrlhf.models.config.model import ModelConfig, MtpInput
from jaxrlhf.models.config.param import Head, padded_rows
from jaxrlhf.models.config.parts import (
    ClampedGate,
    Experts,
    FullHeads,
    Indexer,
    LatentAttention,
    LayerInputs,
    LinearAttention,
    Streams,
)
from jaxrlhf.models.config.pattern import (
    BORROWING_LAYERS,
    DENSE_LAYERS,
    LAYERS,
    LENDERS,
    LINEAR_LAYERS,
    SLIDING_BORROWING_LAYERS,
    SLIDING_LAYERS,
    STACKS,
    Pattern,
    Run,
)
from jaxrlhf.models.config.rope import LinearRope, Llama3Rope, LongRope, ProportionalRope, RopeScaling, YarnRope
from jaxrlhf.models.config.vision import Sections, Vision

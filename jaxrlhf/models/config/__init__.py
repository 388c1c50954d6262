"""The shape of a decoder, as dataclasses."""

from jaxrlhf.models.config.model import FamilyName, Head, ModelConfig, padded_rows
from jaxrlhf.models.config.parts import ClampedGate, Experts, LatentAttention
from jaxrlhf.models.config.rope import LinearRope, Llama3Rope, LongRope, RopeScaling, YarnRope

"""The shape of a decoder, as dataclasses."""

from jaxrlhf.models.config.model import FamilyName, Head, ModelConfig, padded_rows
from jaxrlhf.models.config.parts import ClampedGate, Experts, Indexer, LatentAttention, LinearAttention
from jaxrlhf.models.config.pattern import DENSE_LAYERS, LAYERS, LINEAR_LAYERS, STACKS, Pattern, Run
from jaxrlhf.models.config.rope import LinearRope, Llama3Rope, LongRope, RopeScaling, YarnRope
from jaxrlhf.models.config.vision import Sections, SightName, Vision

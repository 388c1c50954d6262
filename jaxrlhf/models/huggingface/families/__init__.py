"""Checkpoint families as tables. A new family of the same decoder needs one more `Family` and its entry here."""

from collections.abc import Mapping

import jax
import numpy as np

from jaxrlhf.models.config import Head, ModelConfig
from jaxrlhf.models.huggingface.families.deepseek import DEEPSEEK_V2, DEEPSEEK_V3, DEEPSEEK_V32
from jaxrlhf.models.huggingface.families.family import LM_HEAD, SCALAR_HEAD, Family, StoredTensor
from jaxrlhf.models.huggingface.families.fields import Fields
from jaxrlhf.models.huggingface.families.gemma import GEMMA, GEMMA2, GEMMA3
from jaxrlhf.models.huggingface.families.gemma3n import GEMMA3N
from jaxrlhf.models.huggingface.families.gemma4 import GEMMA4
from jaxrlhf.models.huggingface.families.gemma_vision import GEMMA3_VISION
from jaxrlhf.models.huggingface.families.glm import GLM4, GLM4_MOE
from jaxrlhf.models.huggingface.families.gpt_oss import GPT_OSS
from jaxrlhf.models.huggingface.families.granite import GRANITE
from jaxrlhf.models.huggingface.families.granite_hybrid import GRANITE_HYBRID
from jaxrlhf.models.huggingface.families.llama import LLAMA, MISTRAL, MIXTRAL, PHI3
from jaxrlhf.models.huggingface.families.minimax import MINIMAX_M2
from jaxrlhf.models.huggingface.families.mistral import MINISTRAL3, MISTRAL4
from jaxrlhf.models.huggingface.families.olmo import OLMO2, OLMO3
from jaxrlhf.models.huggingface.families.qwen import QWEN2, QWEN3, QWEN3_MOE
from jaxrlhf.models.huggingface.families.qwen_next import QWEN3_5, QWEN3_5_MOE, QWEN3_NEXT
from jaxrlhf.models.huggingface.families.qwen_vl import (
    QWEN2_5_VL,
    QWEN3_5_MOE_VISION,
    QWEN3_5_VISION,
    QWEN3_VL,
    QWEN3_VL_MOE,
)
from jaxrlhf.models.huggingface.families.rope_fields import read_rope, write_rope
from jaxrlhf.models.huggingface.families.sight import VisionFormat, with_prefix
from jaxrlhf.models.huggingface.families.smollm import SMOLLM3
from jaxrlhf.models.parameters import declare, path_name

_ALL = (
    *(QWEN2, QWEN3, LLAMA, MISTRAL, PHI3, OLMO2, GEMMA, GEMMA2, GEMMA3, QWEN3_MOE, MIXTRAL, DEEPSEEK_V2, DEEPSEEK_V3),
    *(OLMO3, SMOLLM3, GLM4, GLM4_MOE, MINISTRAL3, MISTRAL4, GRANITE, MINIMAX_M2, GPT_OSS, QWEN3_NEXT, QWEN3_5),
    *(QWEN3_5_MOE, DEEPSEEK_V32, GEMMA4, GEMMA3N, GRANITE_HYBRID),
)
FAMILIES: dict[str, Family] = {family.name: family for family in _ALL}
VISION_FORMATS: dict[str, VisionFormat] = {
    sight.name: sight
    for sight in (QWEN2_5_VL, QWEN3_VL, QWEN3_VL_MOE, QWEN3_5_VISION, QWEN3_5_MOE_VISION, GEMMA3_VISION)
}
"""Formats of vision-language checkpoints, by `model_type` of the whole model."""


def stored_tensors(config: ModelConfig, head: Head) -> dict[str, StoredTensor]:
    """Return the table of all parameters of a model, including its tower, by parameter path."""
    tensors = FAMILIES[config.family].stored(config, head)
    if config.vision is None:
        return tensors
    tower = VISION_FORMATS[config.vision.family].tensors(config.vision)
    return tensors | {f"vision.{path}": each for path, each in tower.items()}


def tensor_shapes(config: ModelConfig, head: Head, stored: Mapping[str, StoredTensor]) -> dict[str, tuple[int, ...]]:
    """Return the shape of every tensor of a table by tensor name, layer after layer.

    Args:
      stored: Table of parameters, which may be incomplete.
    """
    layers: dict[int, dict[str, tuple[int, ...]]] = {}
    for place, param in jax.tree.leaves_with_path(declare(config, head)):
        if location := stored.get(path_name(place)):
            stacked = location.stacked(param.shape)
            shape = location.tensor_shape(param.unpadded[len(stacked) :])
            for at in np.ndindex(stacked):
                layers.setdefault(at[0] if at else -1, {})[location.named(at)] = shape
    return {name: shape for layer in sorted(layers) for name, shape in layers[layer].items()}


def module_name(config: ModelConfig, name: str) -> str:
    """Return the name in transformers' model of a module or tensor of the tables."""
    return name if config.vision is None else with_prefix(name, VISION_FORMATS[config.vision.family].modules)


def published_name(config: ModelConfig, name: str) -> str:
    """Return the name in a file of a tensor of the tables."""
    return name if config.vision is None else with_prefix(name, VISION_FORMATS[config.vision.family].prefixes)

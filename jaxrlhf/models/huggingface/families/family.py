"""What a family of checkpoints is: a table from our parameters to the tensors of its files."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from jaxrlhf.models.config import FamilyName, Head, ModelConfig
from jaxrlhf.models.huggingface.families.fields import Fields


class StoredTensor(NamedTuple):
    """How one parameter lies in a checkpoint.

    Attributes:
      name: Tensor name; `{layer}` where each layer has its own tensor.
      dims: Our dimensions in our order, one letter each, the layers dimension left out.
      stored: The same letters in the file's order, a space between the tensor's dimensions;
        `NH D` is a matrix whose rows are heads times head width. `1` is a dimension of size one.
      start: Row of the tensor at which the parameter begins, where several share the tensor.
      rows: Of that tensor; None where it is the parameter's own.
      layer: First layer that has one.
    """

    name: str
    dims: str
    stored: str
    start: int = 0
    rows: int | None = None
    layer: int = 0

    @property
    def letters(self) -> str:
        """Our dimensions in the file's order."""
        return self.stored.replace(" ", "").replace("1", "")

    def stacked(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Of a parameter's shape the first dimensions, along which each entry has a tensor of its own."""
        return shape[: len(shape) - len(self.dims)]

    def named(self, at: Sequence[int]) -> str:
        """The tensor's name at a place in the stacked dimensions: of a layer, or of an expert of a layer."""
        places = dict(zip(("layer", "expert"), at, strict=False))
        return self.name.format(**{**places, "layer": places.get("layer", 0) + self.layer})

    def shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Shape in the file, from the shape of the parameter (or of one layer of it)."""
        size = dict(zip(self.dims, shape, strict=True)) | {"1": 1}
        return tuple(math.prod(size[letter] for letter in group) for group in self.stored.split())

    def tensor_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Likewise, of the whole tensor."""
        first, *rest = self.shape(shape)
        return (first if self.rows is None else self.rows, *rest)


LAYER = "model.layers.{layer}."

DECODER: dict[str, StoredTensor] = {
    "embed": StoredTensor("model.embed_tokens.weight", "VD", "V D"),
    "layers.attention_norm": StoredTensor(LAYER + "input_layernorm.weight", "D", "D"),
    "layers.attention.query": StoredTensor(LAYER + "self_attn.q_proj.weight", "DNH", "NH D"),
    "layers.attention.key": StoredTensor(LAYER + "self_attn.k_proj.weight", "DKH", "KH D"),
    "layers.attention.value": StoredTensor(LAYER + "self_attn.v_proj.weight", "DKH", "KH D"),
    "layers.attention.output": StoredTensor(LAYER + "self_attn.o_proj.weight", "NHD", "D NH"),
    "layers.mlp_norm": StoredTensor(LAYER + "post_attention_layernorm.weight", "D", "D"),
    "layers.mlp.gate": StoredTensor(LAYER + "mlp.gate_proj.weight", "DF", "F D"),
    "layers.mlp.up": StoredTensor(LAYER + "mlp.up_proj.weight", "DF", "F D"),
    "layers.mlp.down": StoredTensor(LAYER + "mlp.down_proj.weight", "FD", "D F"),
    "final_norm": StoredTensor("model.norm.weight", "D", "D"),
}
"""Tensors of most families, by the path of the parameter."""

QKV_BIAS: dict[str, StoredTensor] = {
    "layers.attention.query_bias": StoredTensor(LAYER + "self_attn.q_proj.bias", "NH", "NH"),
    "layers.attention.key_bias": StoredTensor(LAYER + "self_attn.k_proj.bias", "KH", "KH"),
    "layers.attention.value_bias": StoredTensor(LAYER + "self_attn.v_proj.bias", "KH", "KH"),
}

QK_NORM: dict[str, StoredTensor] = {
    "layers.attention.query_norm": StoredTensor(LAYER + "self_attn.q_norm.weight", "H", "H"),
    "layers.attention.key_norm": StoredTensor(LAYER + "self_attn.k_norm.weight", "H", "H"),
}

SANDWICH: dict[str, StoredTensor] = {
    "layers.attention_output_norm": StoredTensor(LAYER + "post_attention_layernorm.weight", "D", "D"),
    "layers.mlp_norm": StoredTensor(LAYER + "pre_feedforward_layernorm.weight", "D", "D"),
    "layers.mlp_output_norm": StoredTensor(LAYER + "post_feedforward_layernorm.weight", "D", "D"),
}
"""Norms of what attention and MLP give, beside those of what they take."""

LM_HEAD = StoredTensor("lm_head.weight", "VD", "V D")
SCALAR_HEAD = StoredTensor("score.weight", "D", "1 D")


@dataclass(frozen=True)
class Family:
    """One checkpoint format.

    Attributes:
      name: `model_type` of its config.json.
      causal: Architecture with a language-model head.
      classifier: Architecture with a score head.
      tensors: Where each parameter but the head is stored.
      read: What `ModelConfig` is beside the fields that all families share, and defaults of those. It asks
        for every field of config.json that this family has beside them.
      write: Fields of config.json beside those that all families share.
    """

    name: FamilyName
    causal: str
    classifier: str
    tensors: Callable[[ModelConfig], Mapping[str, StoredTensor]]
    read: Callable[[Fields], dict[str, Any]]
    write: Callable[[ModelConfig], dict[str, Any]]

    def stored(self, config: ModelConfig, head: Head) -> dict[str, StoredTensor]:
        """Where each parameter of a model lies, by parameter path."""
        tensors = dict(self.tensors(config))
        if head != "lm":
            tensors["head"] = SCALAR_HEAD
        elif not config.tie_embeddings:
            tensors["head"] = LM_HEAD
        return tensors

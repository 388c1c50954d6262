"""What a family of checkpoints is: a table from our parameters to the tensors of its files."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from jaxrlhf.architecture import Head, ModelConfig


class Stored(NamedTuple):
    """How one parameter lies in a checkpoint.

    Attributes:
      name: Tensor name; `{layer}` where each layer has its own tensor.
      dims: Our dimensions in our order, one letter each, the layers dimension left out.
      stored: The same letters in the file's order, a space between the tensor's dimensions;
        `NH D` is a matrix whose rows are heads times head width. `1` is a dimension of size one.
    """

    name: str
    dims: str
    stored: str

    @property
    def letters(self) -> str:
        """Our dimensions in the file's order."""
        return self.stored.replace(" ", "").replace("1", "")

    def names(self, num_layers: int) -> list[str]:
        """The tensor's name, or its name in each layer."""
        if "{layer}" not in self.name:
            return [self.name]
        return [self.name.format(layer=layer) for layer in range(num_layers)]

    def shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Shape of the tensor in the file, from the shape of the parameter (or of one layer of it)."""
        size = dict(zip(self.dims, shape, strict=True)) | {"1": 1}
        return tuple(math.prod(size[letter] for letter in group) for group in self.stored.split())


_LAYER = "model.layers.{layer}."

DECODER: dict[str, Stored] = {
    "embed": Stored("model.embed_tokens.weight", "VD", "V D"),
    "layers.attention_norm": Stored(_LAYER + "input_layernorm.weight", "D", "D"),
    "layers.attention.query": Stored(_LAYER + "self_attn.q_proj.weight", "DNH", "NH D"),
    "layers.attention.key": Stored(_LAYER + "self_attn.k_proj.weight", "DKH", "KH D"),
    "layers.attention.value": Stored(_LAYER + "self_attn.v_proj.weight", "DKH", "KH D"),
    "layers.attention.output": Stored(_LAYER + "self_attn.o_proj.weight", "NHD", "D NH"),
    "layers.mlp_norm": Stored(_LAYER + "post_attention_layernorm.weight", "D", "D"),
    "layers.mlp.gate": Stored(_LAYER + "mlp.gate_proj.weight", "DF", "F D"),
    "layers.mlp.up": Stored(_LAYER + "mlp.up_proj.weight", "DF", "F D"),
    "layers.mlp.down": Stored(_LAYER + "mlp.down_proj.weight", "FD", "D F"),
    "final_norm": Stored("model.norm.weight", "D", "D"),
}
"""Tensors that every family here has, by the path of the parameter."""

QKV_BIAS: dict[str, Stored] = {
    "layers.attention.query_bias": Stored(_LAYER + "self_attn.q_proj.bias", "NH", "NH"),
    "layers.attention.key_bias": Stored(_LAYER + "self_attn.k_proj.bias", "KH", "KH"),
    "layers.attention.value_bias": Stored(_LAYER + "self_attn.v_proj.bias", "KH", "KH"),
}

QK_NORM: dict[str, Stored] = {
    "layers.attention.query_norm": Stored(_LAYER + "self_attn.q_norm.weight", "H", "H"),
    "layers.attention.key_norm": Stored(_LAYER + "self_attn.k_norm.weight", "H", "H"),
}

LM_HEAD = Stored("lm_head.weight", "VD", "V D")
SCALAR_HEAD = Stored("score.weight", "D", "1 D")


@dataclass(frozen=True)
class Family:
    """One checkpoint format.

    Attributes:
      name: `model_type` of its config.json.
      causal: Architecture with a language-model head.
      classifier: Architecture with a score head.
      tensors: Where each parameter but the head is stored.
      qkv_bias: Whether q, k and v projections have a bias.
      qk_norm: Whether q and k heads are normalised.
      head_dim: Default of the field; None divides the hidden size by the heads.
      fixed: Fields that change numbers and the only value of each that this decoder computes.
    """

    name: Literal["qwen2", "qwen3", "llama"]
    causal: str
    classifier: str
    tensors: Mapping[str, Stored]
    qkv_bias: bool = False
    qk_norm: bool = False
    head_dim: int | None = None
    fixed: Mapping[str, Any] = field(default_factory=dict)

    def stored(self, config: ModelConfig, head: Head) -> dict[str, Stored]:
        """Where each parameter of a model lies, by parameter path."""
        tensors = dict(self.tensors)
        if head != "lm":
            tensors["head"] = SCALAR_HEAD
        elif not config.tie_embeddings:
            tensors["head"] = LM_HEAD
        return tensors

"""Type of a checkpoint family: a table from parameters to the tensors of its files, and fields of config.json."""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from jaxrlhf.models.config import LINEAR_LAYERS, Head, ModelConfig, MtpInput
from jaxrlhf.models.huggingface.families.fields import Fields


class StoredTensor(NamedTuple):
    """Place and layout of one parameter in a checkpoint.

    Attributes:
      name: Tensor name, with `{layer}` if each layer has its own tensor, and `{expert}` if each expert has one.
      dims: Our dimensions in our order, one letter each, without layers and experts that have their own tensors.
      stored: Letters of `dims` in the file's order, with a space between the tensor's dimensions.
        `NH D` is a matrix whose rows are heads times head width. `1` is a dimension of size one.
      layers: Indices of the layers that have the tensor; empty means all layers.
      inside: Dimension that this parameter shares with others: a group of `stored`, or the letters at its end if the
        parameters are interleaved; then the parameter's first index in the file, and the number of indices of all
        sharing parameters. The letter `1` is one index.
    """

    name: str
    dims: str
    stored: str
    layers: tuple[int, ...] = ()
    inside: tuple[str, int, int] | None = None

    @property
    def letters(self) -> str:
        """Our dimensions in the file's order."""
        return self.stored.replace(" ", "").replace("1", "")

    def stacked(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the leading dimensions of a parameter's shape, along which each entry has its own tensor."""
        return shape[: len(shape) - len(self.dims)]

    def named(self, at: Sequence[int]) -> str:
        """Return the name of the tensor at an index of the stacked dimensions: of a layer, or of a layer's expert."""
        places = dict(zip(("layer", "expert"), at, strict=False))
        layer = places.get("layer", 0)
        return self.name.format(**{**places, "layer": self.layers[layer] if self.layers else layer})

    @property
    def first_row(self) -> int | None:
        """First row of the parameter in the tensor; None if the parameter is not whole rows."""
        if self.inside is None:
            return 0
        letters, begin, _ = self.inside
        return begin if letters == self.stored.split()[0] else None

    def shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape in the file, from the shape of the parameter (or of one layer of the parameter)."""
        size = self.sizes(shape)
        return tuple(math.prod(size[letter] for letter in group) for group in self.stored.split())

    def sizes(self, shape: tuple[int, ...]) -> dict[str, int]:
        """Return the size of each letter, from the shape of the parameter (or of one layer of the parameter)."""
        return dict(zip(self.dims, shape, strict=True)) | {"1": 1}

    def shared(self, group: str) -> tuple[str, int, int] | None:
        """Return `inside` if it is about this group; else None."""
        return self.inside if self.inside is not None and group.endswith(self.inside[0]) else None

    def tensor_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of the whole tensor in the file; the parameter may be a part of the tensor."""
        return tuple(math.prod(self._split(group, shape)) for group in self.stored.split())

    def _split(self, group: str, shape: tuple[int, ...]) -> list[int]:
        """Return the sizes in the file of a group's letters; the letters of `inside` count as one."""
        size, inside = self.sizes(shape), self.shared(group)
        if inside is None:
            return [size[letter] for letter in group]
        return [*(size[letter] for letter in group.removesuffix(inside[0])), inside[2]]

    def place(self, tensor: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
        """Return the parameter's part of the whole tensor, as a view with one dimension for each letter.

        Args:
          shape: Shape of the parameter (or of one layer of the parameter).
        """
        size, groups = self.sizes(shape), self.stored.split()
        view = tensor.reshape([count for group in groups for count in self._split(group, shape)])
        at = [slice(None)] * view.ndim
        for place, group in enumerate(groups):
            if inside := self.shared(group):
                letters, begin, _ = inside
                axis = sum(len(self._split(group, shape)) for group in groups[: place + 1]) - 1
                at[axis] = slice(begin, begin + math.prod(size[letter] for letter in letters))
        return view[tuple(at)].reshape([size[letter] for group in groups for letter in group])


LAYER = "model.layers.{layer}."


def in_layers(**tensors: tuple[str, str, str]) -> dict[str, StoredTensor]:
    """Return a table of parameters of layers: `attention__key=("self_attn.k_proj.weight", "DKH", "KH D")`."""
    return {
        f"layers.{path.replace('__', '.')}": StoredTensor(LAYER + name, dims, stored)
        for path, (name, dims, stored) in tensors.items()
    }


def gated_mlp(name: str, ours: str) -> dict[str, StoredTensor]:
    """Return the table of a gated MLP of layers.

    Args:
      name: Prefix of its tensors in a layer.
      ours: Prefix of its parameters' paths, with `__` for a dot.
    """
    parts = {"gate": ("DF", "F D"), "up": ("DF", "F D"), "down": ("FD", "D F")}
    return in_layers(**{f"{ours}__{part}": (f"{name}.{part}_proj.weight", *dims) for part, dims in parts.items()})


DECODER: dict[str, StoredTensor] = {
    "embed": StoredTensor("model.embed_tokens.weight", "VD", "V D"),
    "final_norm": StoredTensor("model.norm.weight", "D", "D"),
    **in_layers(
        attention_norm=("input_layernorm.weight", "D", "D"),
        attention__query=("self_attn.q_proj.weight", "DNH", "NH D"),
        attention__key=("self_attn.k_proj.weight", "DKH", "KH D"),
        attention__value=("self_attn.v_proj.weight", "DKH", "KH D"),
        attention__output=("self_attn.o_proj.weight", "NHD", "D NH"),
        mlp_norm=("post_attention_layernorm.weight", "D", "D"),
    ),
    **gated_mlp("mlp", "mlp"),
}
"""Tensors of most families, by parameter path."""

QKV_BIAS = in_layers(
    attention__query_bias=("self_attn.q_proj.bias", "NH", "NH"),
    attention__key_bias=("self_attn.k_proj.bias", "KH", "KH"),
    attention__value_bias=("self_attn.v_proj.bias", "KH", "KH"),
)

QK_NORM = in_layers(
    attention__query_norm=("self_attn.q_norm.weight", "H", "H"),
    attention__key_norm=("self_attn.k_norm.weight", "H", "H"),
)

NORMS_ACROSS_HEADS = in_layers(
    attention__query_norm=("self_attn.q_norm.weight", "NH", "NH"),
    attention__key_norm=("self_attn.k_norm.weight", "KH", "KH"),
)


WITHOUT_MLP = {path: stored for path, stored in DECODER.items() if not path.startswith("layers.mlp.")}


def mixture(
    mlp: str = "mlp", *, gate: str = "gate_proj", up: str = "up_proj", down: str = "down_proj"
) -> dict[str, StoredTensor]:
    """Return `DECODER` with routed experts in place of the MLP, with separate tensors for each expert.

    Args:
      mlp: Name of the mixture in a layer; the other arguments are names of an expert's matrices.
    """
    expert = mlp + ".experts.{expert}."
    return WITHOUT_MLP | in_layers(
        mlp__router=(f"{mlp}.gate.weight", "DE", "E D"),
        mlp__experts__gate=(f"{expert}{gate}.weight", "DF", "F D"),
        mlp__experts__up=(f"{expert}{up}.weight", "DF", "F D"),
        mlp__experts__down=(f"{expert}{down}.weight", "FD", "D F"),
    )


def fused_experts(
    experts: str, inner: int, *, layers: tuple[int, ...] = (), both: str = "gate_up_proj", down: str = "down_proj"
) -> dict[str, StoredTensor]:
    """Return a table of experts in two tensors per layer; the gate of each expert is above its up projection.

    Args:
      experts: Prefix of the tensors' names, before `both` and `down`.
      inner: Width of an expert.
      layers: Indices of the layers that have experts; empty means all layers.
    """
    both = experts + both
    return {
        "layers.mlp.experts.gate": StoredTensor(both, "EDF", "E F D", layers, inside=("F", 0, 2 * inner)),
        "layers.mlp.experts.up": StoredTensor(both, "EDF", "E F D", layers, inside=("F", inner, 2 * inner)),
        "layers.mlp.experts.down": StoredTensor(experts + down, "EFD", "E D F", layers),
    }


ROUTER_BIAS = in_layers(mlp__router_bias=("mlp.gate.e_score_correction_bias", "E", "E"))

SHARED_EXPERTS = gated_mlp("mlp.shared_experts", "mlp__shared")


def after_dense_layers(
    config: ModelConfig, sparse: Mapping[str, StoredTensor], dense: Mapping[str, StoredTensor]
) -> dict[str, StoredTensor]:
    """Return a table of layers with experts (`sparse`), after the first layers without experts (`dense`)."""
    later = tuple(range(config.dense_layers, config.num_layers))
    moved = {path: stored._replace(layers=later) for path, stored in sparse.items()}
    first = {f"dense_{path}": stored for path, stored in dense.items() if path.startswith("layers.")}
    return moved | (first if config.dense_layers else {})


def gate_and_up(
    inner: int, *, name: str = "mlp.gate_up_proj.weight", mlp: str = "layers.mlp."
) -> dict[str, StoredTensor]:
    """Return the table of an MLP whose gate is above its up projection in one tensor.

    Args:
      inner: Width of the MLP.
      name: Name of the tensor in a layer.
      mlp: Prefix of the parameters' paths.
    """
    return {
        f"{mlp}gate": StoredTensor(LAYER + name, "DF", "F D", inside=("F", 0, 2 * inner)),
        f"{mlp}up": StoredTensor(LAYER + name, "DF", "F D", inside=("F", inner, 2 * inner)),
    }


def of_both_kinds(
    config: ModelConfig, table: Mapping[str, StoredTensor], mixing: Mapping[str, StoredTensor]
) -> dict[str, StoredTensor]:
    """Return a table of layers with softmax attention and layers with linear attention, with the indices of both.

    Args:
      table: Parameters of layers with softmax attention, and parameters outside of layers. Layers with linear
        attention have the same parameters except for attention.
      mixing: Parameters of layers with linear attention in place of softmax attention.
    """
    flags = list(enumerate(config.linear_layers))
    full_layers, linear_layers = (tuple(at for at, flag in flags if flag == wanted) for wanted in (False, True))
    inside = {path: each for path, each in table.items() if path.startswith("layers.")}
    shared = {path: each for path, each in inside.items() if ".attention." not in path}
    found = {path: each for path, each in table.items() if path not in inside}
    found |= {path: each._replace(layers=full_layers) for path, each in inside.items()}
    for path, each in {**shared, **mixing}.items():
        found[path.replace("layers", LINEAR_LAYERS, 1)] = each._replace(layers=linear_layers)
    return found


class MtpFormat(NamedTuple):
    """Checkpoint format of the layer that predicts the second next token.

    Attributes:
      layer: Prefix of the tensors that every layer has.
      join: Product of the normalized embedding of the next token, and of the normalized hidden state.
      config_field: Field of config.json that counts such layers.
      reads: What the layer reads to predict further tokens (`ModelConfig.mtp`), as in vLLM (deepseek_mtp.py,
        glm4_moe_mtp.py, qwen3_next_mtp.py and qwen3_5_mtp.py in vllm/model_executor/models).
      copies: Names of tensors that repeat the embedding and the head, by the path of the parameter. They are written
        for servers that read them, and not read.
    """

    layer: str
    embed_norm: str
    hidden_norm: str
    join: str
    norm: str
    config_field: str
    reads: MtpInput
    copies: Mapping[str, str] = MappingProxyType({})

    def tensors(self, config: ModelConfig, table: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
        """Return the table of the layer's parameters, from the table of the other layers."""
        last = config.num_layers  # the layer's index, if its tensors follow those of the other layers
        own = {
            f"mtp.{name}": StoredTensor(getattr(self, name).format(layer=last), "D", "D")
            for name in ("embed_norm", "hidden_norm", "norm")
        }
        own["mtp.join"] = StoredTensor(self.join.format(layer=last), "ED", "D E")
        prefix = self.layer.format(layer=last)
        return own | {
            f"mtp.layer.{path.removeprefix('layers.')}": each._replace(name=each.name.replace(LAYER, prefix), layers=())
            for path, each in table.items()
            if path.startswith("layers.")
        }


MTP_AFTER_LAYERS = MtpFormat(
    LAYER,
    embed_norm=LAYER + "enorm.weight",
    hidden_norm=LAYER + "hnorm.weight",
    join=LAYER + "eh_proj.weight",
    norm=LAYER + "shared_head.norm.weight",
    config_field="num_nextn_predict_layers",
    reads="output",
    copies=MappingProxyType({"embed": LAYER + "embed_tokens.weight", "head": LAYER + "shared_head.head.weight"}),
)
"""Format of DeepSeek-V3 and GLM-4.5."""

MTP_APART = MtpFormat(
    "mtp.layers.0.",
    embed_norm="mtp.pre_fc_norm_embedding.weight",
    hidden_norm="mtp.pre_fc_norm_hidden.weight",
    join="mtp.fc.weight",
    norm="mtp.norm.weight",
    config_field="mtp_num_hidden_layers",
    reads="normed",
)
"""Format of Qwen3-Next and Qwen3.5."""

LM_HEAD = StoredTensor("lm_head.weight", "VD", "V D")
SCALAR_HEAD = StoredTensor("score.weight", "D", "1 D")


@dataclass(frozen=True)
class Family:
    """Checkpoint format of a model family.

    Attributes:
      name: `model_type` of config.json.
      architecture: First part of the names of its architectures.
      tensors: Function from a model to the table of its parameters without the head.
      read: Function that returns the `ModelConfig` fields specific to this family, and sets defaults of shared
        config.json fields. The function must take every config.json field that is specific to this family.
      write: Function that returns the config.json fields specific to this family; None if config.json is always a
        copy of the source's.
      unread: Function from a model to a pattern of names of tensors that files may have but nothing uses, or None.
      mtp: Format of the layer that predicts the second next token, which files may have; it is read and exported only
        with `ModelConfig.mtp`. None if no file has such a layer.
      score_architecture: First part of the architecture's name with a score head; None is `architecture`.
    """

    name: str
    architecture: str
    tensors: Callable[[ModelConfig], Mapping[str, StoredTensor]]
    read: Callable[[Fields], dict[str, Any]]
    write: Callable[[ModelConfig], dict[str, Any]] | None = None
    score_architecture: str | None = None
    mtp: MtpFormat | None = None
    unread: Callable[[ModelConfig], re.Pattern[str] | None] = lambda config: None

    @property
    def causal(self) -> str:
        """Architecture with a language-model head."""
        return f"{self.architecture}ForCausalLM"

    @property
    def classifier(self) -> str:
        """Architecture with a score head."""
        return f"{self.score_architecture or self.architecture}ForSequenceClassification"

    @property
    def step_classifier(self) -> str:
        """Architecture with labels for tokens; a process reward model has two labels, wrong and right."""
        return self.classifier.replace("Sequence", "Token")

    def leaves_out(self, name: str, config: ModelConfig) -> bool:
        """Return whether a tensor is unused, or belongs to a layer that predicts the second next token."""
        unread = self.unread(config)
        if unread is not None and unread.match(name):
            return True
        layer = re.match(r"model\.layers\.(\d+)\.", name)
        behind = layer is not None and int(layer[1]) >= config.num_layers
        return self.mtp is not None and (behind or name.startswith("mtp."))

    def stored(self, config: ModelConfig, head: Head) -> dict[str, StoredTensor]:
        """Return the table of all parameters of a model, by parameter path."""
        tensors = dict(self.tensors(config))
        if config.mtp and head == "lm" and self.mtp is not None:
            tensors |= self.mtp.tensors(config, tensors)
        if head != "lm":
            tensors["head"] = SCALAR_HEAD
        elif not config.tie_embeddings:
            tensors["head"] = LM_HEAD
        return tensors

    def copies(self, config: ModelConfig, head: Head) -> dict[str, str]:
        """Return the names of tensors that repeat the tensor of another parameter, with the name of this tensor."""
        if not config.mtp or head != "lm" or self.mtp is None:
            return {}
        stored = self.stored(config, head)
        return {
            name.format(layer=config.num_layers): stored.get(path, stored["embed"]).name
            for path, name in self.mtp.copies.items()
        }

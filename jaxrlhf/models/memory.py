"""Estimates of the memory that a model's weights, activations and logits take on a device."""

import math
from dataclasses import replace
from functools import cache

import jax

from jaxrlhf.config import Layout, Lora
from jaxrlhf.models.attention.attention_xla import LONG_ROW, TILE
from jaxrlhf.models.causal_lm import AnyModel
from jaxrlhf.models.config import Head, ModelConfig
from jaxrlhf.models.config.param import Param
from jaxrlhf.models.counts import first_divisor, weight_counts
from jaxrlhf.models.heads import CHUNK_TOKENS
from jaxrlhf.models.lora.lora import declare_adapters
from jaxrlhf.sharding.rules import Dim

FILLED_SHARE = 0.6
"""Share of a device's memory up to which activations are kept instead of recomputed; estimates are rough."""


def keeps_activations(needed_bytes: float, memory_bytes: float) -> bool:
    """Return whether a device has enough memory to keep all layers' activations.

    Args:
      needed_bytes: Bytes held on a device during an update, including all activations.
    """
    return needed_bytes < FILLED_SHARE * memory_bytes


def layer_activation_bytes(model: ModelConfig, *, itemsize: int, tensor: int = 1, expert: int = 1) -> float:
    """Estimate the bytes per token that one layer keeps for its backward pass, without attention scores.

    A layer keeps the residual stream six times and the input of each norm. Attention keeps queries, keys, values and
    mixed heads, and the mixed heads in float32 as well. The MLP keeps six arrays (the gate, up, their product and the
    intermediates of the gate's activation), or eight if the activation contains a tanh. Experts keep their input
    tokens, from all devices that share the experts. If the layer is split, compilers keep the residual stream only
    twice (docs/accelerators.md compares compilers with this estimate).

    Args:
      itemsize: Bytes of one number of an activation.
      tensor: Number of ways that the layer is split. The residual stream is whole on every device.
      expert: Number of ways that the experts are divided.
    """
    inner = mlp_numbers(model)
    normed = (model.num_heads * model.mean_head_dim + model.mean_kv_width) * model.qk_norm
    normed += model.mean_kv_width * model.value_norm
    given = 0 if model.experts is None else expert * model.hidden_size
    given += 0 if model.layer_inputs is None else 2 * model.hidden_size + 4 * model.layer_inputs.width
    given += 2 * (model.stream_width - model.hidden_size) + 2 * (model.laurel_rank or 0)
    norms = 4 if model.norms == "sandwich" else 2
    whole = ((6 if tensor == 1 else 2) + norms) * model.hidden_size + given
    mixed = 4 * model.num_heads * model.mean_head_dim
    return whole * itemsize + ((_heads(model) + normed + inner) * itemsize + mixed) / tensor


def mlp_numbers(model: ModelConfig) -> float:
    """Return how many numbers one token keeps inside a layer's MLP, without routed experts."""
    return (8 if model.activation == "gelu_tanh" else 6) * _inner(model)


def sorted_bytes(model: ModelConfig, *, itemsize: int, expert: int = 1) -> float:
    """Return the bytes per token of the inputs of experts: one copy for each chosen expert, from `expert` devices."""
    return 0.0 if model.experts is None else expert * model.experts.per_token * model.hidden_size * itemsize


def score_bytes(model: ModelConfig, *, row_tokens: int, itemsize: int, tensor: int = 1) -> float:
    """Estimate the bytes of one token's attention scores and weights in one layer.

    A token is compared with half of its row on average. Softmax is float32 in every activation dtype.

    Args:
      row_tokens: Number of tokens of the row that attention runs over; 0 for a kernel without scores in memory. The
        scores of a long row exist one tile at a time, next to float32 sums of the mixed heads.
    """
    if row_tokens < LONG_ROW:
        return model.num_heads * row_tokens / 2 * (4 + itemsize) / tensor
    tile = model.num_heads * TILE**2 / row_tokens * 4
    return (tile + 2 * _heads(model)) / tensor


def _heads(model: ModelConfig) -> float:
    """Return how many numbers a token's queries, keys, values and mixed heads have."""
    return 2 * model.num_heads * model.mean_head_dim + 2 * model.mean_kv_width


def _inner(model: ModelConfig) -> float:
    """Return the width of the MLP of every token. Routed experts do not count: they run in blocks that are not kept."""
    return model.mean_intermediate_size if model.experts is None else model.experts.shared_intermediate_size


def weights_held(model: AnyModel, head: Head, layout: Layout) -> float:
    """Return the number of a model's weights that one device holds in the training layout."""
    weights = weight_counts(model, head)
    return (weights.total + weights.replicated(*_tensor_ways(layout))) / layout.copy_devices


def _tensor_ways(layout: Layout) -> tuple[int, ...]:
    """Return the numbers of ways that training may split heads: `tensor`, or the part of it that generation uses."""
    return (layout.tensor, layout.generation_tensor) if layout.refines else (layout.tensor,)


def adapters_held(model: ModelConfig, lora: Lora, layout: Layout) -> float:
    """Return the number of adapter weights that one device holds in the training layout.

    `tensor` splits an adapter's side towards heads or the MLP, and `fsdp` splits the other side.
    """
    tensor = _tensor_ways(layout)
    ways: dict[str, tuple[int, ...]] = {"layers": (layout.stage,), "embed": (layout.width_shards,)}
    ways |= {"heads": tensor, "kv_heads": tensor, "mlp": tensor}

    def split(dim: Dim) -> int:
        name, count = dim if isinstance(dim, tuple) else (dim, 0)
        return first_divisor(count, *ways.get(name or "", ()))

    return sum(math.prod(param.shape) / math.prod(map(split, param.dims)) for param in _adapters(model, lora))


@cache
def _adapters(model: ModelConfig, lora: Lora) -> tuple[Param, ...]:
    """Return the declared adapters; those of a vision tower only if the model's shape has the tower."""
    part = lora.part if model.vision is not None else "decoder"
    return tuple(jax.tree.leaves(declare_adapters(model, "lm", replace(lora, part=part))))


def training_activation_bytes(
    model: ModelConfig,
    head: Head,
    layout: Layout,
    *,
    tokens: float,
    row_tokens: int,
    itemsize: int,
    remat: bool,
    idle_share: float = 0.0,
    gathered: tuple[float, float] = (0.0, 0.0),
    attended: float = 0.0,
    widened: float = 0.0,
    offloads: bool = False,
) -> float:
    """Estimate the bytes of activations, logits and gathered weights on one device during an update.

    With rematerialization one layer at a time has its activations; the other layers keep only their input.
    The scores of one layer exist together with their gradients, and so do the logits. The head's arrays are freed
    before the backward pass of the layers allocates its arrays.

    Args:
      tokens: Number of tokens whose activations exist at a time on one device.
      row_tokens: Number of tokens of the row that attention runs over.
      idle_share: Pipeline turns in which a stage computes unused results, over its useful turns; both are kept.
      gathered: Bytes of weights that are gathered for layers, and for the head.
      attended: Numbers of a token's mixed heads on a device, if attention is not recomputed: with shared prompts,
        rematerialization keeps them in addition to each layer's input.
      offloads: True if the arrays that rematerialization keeps are in host memory, except those of two layers: the
        current layer and the layer in transfer.
      widened: Bytes by which a recomputed layer is larger than a layer that keeps its activations.
    """
    layers = model.num_layers / layout.stage
    layer = layer_activation_bytes(model, itemsize=itemsize, tensor=layout.tensor, expert=layout.expert)
    scores = score_bytes(model, row_tokens=row_tokens, itemsize=itemsize, tensor=layout.tensor)
    kept = layers * layer + layers * scores
    if remat:
        kept = (min(layers, 2) if offloads else layers) * ((model.stream_width + attended) * itemsize)
    kept = kept * (1 + idle_share) + _between_stages(model, layout, itemsize=itemsize)
    # Arrays sorted by expert: tokens, their gradients, and the experts' outputs.
    # The backward pass of a long row has sums and tiles in addition to those of the forward pass.
    working = layer * remat + scores * (1 + remat + (row_tokens >= LONG_ROW))
    working += 3 * sorted_bytes(model, itemsize=itemsize, expert=layout.expert)
    in_layers = tokens * working + gathered[0] + widened * remat
    in_head = 2 * head_bytes(model, head, layout, tokens=tokens) + gathered[1]
    return tokens * kept + max(in_layers, in_head)


def _between_stages(model: ModelConfig, layout: Layout, *, itemsize: int) -> float:
    """Return the bytes per token of the inputs and outputs of pipeline stages, over all turns."""
    return 5 * model.hidden_size * itemsize * (layout.stage > 1)


def head_bytes(model: ModelConfig, head: Head, layout: Layout, *, tokens: float) -> float:
    """Return the bytes of logits that exist at a time on one device, always float32; 0 for a value or score head."""
    if head != "lm":
        return 0.0
    return min(int(tokens), CHUNK_TOKENS) * model.vocab_size * 4 / (layout.stage * layout.tensor)


def inference_activation_bytes(
    model: ModelConfig, head: Head, layout: Layout, *, tokens: float, row_tokens: int, itemsize: int
) -> float:
    """Estimate the bytes of activations and logits on one device in a forward pass: one layer's attention or MLP."""
    scores = score_bytes(model, row_tokens=row_tokens, itemsize=itemsize, tensor=layout.tensor)
    attention = _heads(model) * itemsize / layout.tensor + scores
    mlp = 3 * _inner(model) * itemsize / layout.tensor
    mlp += 2 * sorted_bytes(model, itemsize=itemsize, expert=layout.expert)  # before and after experts
    # Partial sums of tensor shards exist alongside the sums.
    layer = (2 + 3 * (layout.tensor > 1)) * model.hidden_size * itemsize + max(attention, mlp)
    layer += _between_stages(model, layout, itemsize=itemsize)
    return tokens * layer + head_bytes(model, head, layout, tokens=tokens)

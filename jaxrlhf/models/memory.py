"""Bytes that weights, activations and logits of a model take on a device, estimated."""

from jaxrlhf.config import Layout, Lora
from jaxrlhf.models.attention.attention_xla import LONG_ROW, TILE
from jaxrlhf.models.causal_lm import AnyModel
from jaxrlhf.models.config import Head, ModelConfig
from jaxrlhf.models.heads import CHUNK_TOKENS

FILLED_SHARE = 0.6
"""Share of a device's memory up to which activations are kept rather than computed again; estimates are rough."""


def keeps_activations(needed_bytes: float, memory_bytes: float) -> bool:
    """Return whether a device has room to spare for all layers' activations.

    Args:
      needed_bytes: Bytes held on a device during an update, all activations included.
    """
    return needed_bytes < FILLED_SHARE * memory_bytes


def layer_activation_bytes(model: ModelConfig, *, itemsize: int, tensor: int = 1, expert: int = 1) -> float:
    """Bytes that one layer keeps of one token for its backward pass, about, scores not included.

    The residual stream six times, and what each norm is given; queries, keys, values and mixed heads, and these in
    float32 as well; and of the MLP the gate, up, their product and what the gate's activation keeps, six in all, or
    eight with a tanh in it. Experts keep the tokens that they are given, those of all devices that share them. Where
    the layer is split compilers keep the residual stream twice (docs/accelerators.md has them beside this).

    Args:
      itemsize: Bytes of an activation.
      tensor: Ways the layer is split. The residual stream is whole on every device.
      expert: Ways its experts are divided.
    """
    inner = mlp_numbers(model)
    normed = (model.num_heads * model.mean_head_dim + model.mean_kv_width) * model.qk_norm
    normed += model.mean_kv_width * model.value_norm
    given = 0 if model.experts is None else expert * model.hidden_size
    given += 0 if model.layer_inputs is None else 2 * model.hidden_size + 4 * model.layer_inputs.width
    given += 2 * (model.stream_width - model.hidden_size) + 2 * (model.laurel_rank or 0)
    whole = (6 if tensor == 1 else 2) * model.hidden_size + model.norm_parameters + given
    mixed = 4 * model.num_heads * model.mean_head_dim
    return whole * itemsize + ((_heads(model) + normed + inner) * itemsize + mixed) / tensor


def mlp_numbers(model: ModelConfig) -> float:
    """Numbers that one token has inside of a layer's MLP, those of experts not included."""
    return (8 if model.activation == "gelu_tanh" else 6) * _inner(model)


def sorted_bytes(model: ModelConfig, *, itemsize: int, expert: int = 1) -> float:
    """Bytes of one token, and of those that come to its experts, once for each expert that they go through."""
    return 0.0 if model.experts is None else expert * model.experts.per_token * model.hidden_size * itemsize


def score_bytes(model: ModelConfig, *, row_tokens: int, itemsize: int, tensor: int = 1) -> float:
    """Bytes of one token's attention scores and weights in one layer, about.

    Each token is compared with half of its row. Softmax is float32 whatever the activations are.

    Args:
      row_tokens: Tokens of the row that attention runs over; 0 where a kernel has no scores in memory. Of a long
        row they exist a tile at a time, beside sums in float32 of what is mixed.
    """
    if row_tokens < LONG_ROW:
        return model.num_heads * row_tokens / 2 * (4 + itemsize) / tensor
    tile = model.num_heads * TILE**2 / row_tokens * 4
    return (tile + 2 * _heads(model)) / tensor


def _heads(model: ModelConfig) -> float:
    """Numbers in a token's queries, keys, values and mixed heads."""
    return 2 * model.num_heads * model.mean_head_dim + 2 * model.mean_kv_width


def _inner(model: ModelConfig) -> float:
    """Width of the MLP that a token meets; experts go through their tokens in blocks, of which none is kept."""
    return model.mean_intermediate_size if model.experts is None else model.experts.shared_intermediate_size


def weights_held(model: AnyModel, head: Head, layout: Layout) -> float:
    """Weights of a model that one device holds in the training layout."""
    replicated = replicated_weights(model, *_tensor_ways(layout)) if isinstance(model, ModelConfig) else 0
    return (model.num_parameters(head) + replicated) / layout.copy_devices


def replicated_weights(model: ModelConfig, tensor: int, *fewer: int) -> float:
    """Weights that the devices of one copy hold beyond the model's own: heads of keys and values that do not split.

    Args:
      tensor: Ways that every layer is split.
      fewer: Ways that such heads are split where they cannot be split `tensor` ways; otherwise they are whole.
    """
    if model.latent is not None:
        return 0.0

    def held_again(layer: ModelConfig) -> float:
        width = layer.num_kv_heads * layer.head_dim
        each = 2 * width * (layer.hidden_size + layer.qkv_bias) + width * layer.qk_norm_across_heads
        return each * (tensor / _head_ways(layer, tensor, *fewer) - 1)

    layers = model.attention_layers if model.full_heads is None else model.num_layers
    return layers * model.mean(held_again, borrowing=False)


def _head_ways(model: ModelConfig, *ways: int) -> int:
    """Ways that heads of keys and values are split: the first that divides them, as `sharding.rules` has it."""
    return next((count for count in ways if model.num_kv_heads % count == 0), 1)


def _tensor_ways(layout: Layout) -> tuple[int, ...]:
    """Ways that training may split heads: all of `tensor`, or the mesh axis that generation keeps of it."""
    return (layout.tensor, layout.generation_tensor) if layout.refines else (layout.tensor,)


def adapters_held(model: ModelConfig, lora: Lora, layout: Layout) -> float:
    """Weights of a model's adapters that one device holds in the training layout.

    Of a matrix, `tensor` splits the adapter's side towards heads or MLP, and `fsdp` the other.
    """
    heads, mlp = model.num_heads * model.mean_head_dim / layout.tensor, model.mean_intermediate_size / layout.tensor
    kv_heads = model.mean_kv_width / _head_ways(model, *_tensor_ways(layout))
    inner = {"query": heads, "key": kv_heads, "value": kv_heads, "output": heads}
    each = [model.hidden_size / layout.width_shards + inner.get(name, mlp) for name in lora.targets]
    return lora.rank * model.num_layers / layout.stage * sum(each)


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
    """Activations and logits of one device while it updates, about, and the weights gathered meanwhile.

    With rematerialisation one layer keeps its activations at a time, the others their input only.
    Scores of one layer come with their gradients, and so do the logits. The head's are gone when the layers' come.

    Args:
      tokens: Number of tokens whose activations exist at a time on one device.
      row_tokens: Tokens of the row that attention runs over.
      idle_share: Turns of a pipeline in which a stage computes what nobody reads, over the others; it keeps them, too.
      gathered: Bytes of weights that are gathered for layers, and for the head.
      attended: Numbers of a token's mixed heads on a device where attention is not computed again: with shared prompts
        rematerialisation keeps them beside each layer's input.
      offloads: What rematerialisation keeps waits in host memory, but for the layer at work and the one on its way.
      widened: Bytes by which a layer that is computed again is larger than one that keeps its activations.
    """
    layers = model.num_layers / layout.stage
    layer = layer_activation_bytes(model, itemsize=itemsize, tensor=layout.tensor, expert=layout.expert)
    scores = score_bytes(model, row_tokens=row_tokens, itemsize=itemsize, tensor=layout.tensor)
    kept = layers * layer + layers * scores
    if remat:
        kept = (min(layers, 2) if offloads else layers) * ((model.stream_width + attended) * itemsize)
    kept = kept * (1 + idle_share) + _between_stages(model, layout, itemsize=itemsize)
    # Sorted by expert: tokens, their gradients, and what comes of them.
    # Gradients of a long row take sums and tiles of their own.
    working = layer * remat + scores * (1 + remat + (row_tokens >= LONG_ROW))
    working += 3 * sorted_bytes(model, itemsize=itemsize, expert=layout.expert)
    in_layers = tokens * working + gathered[0] + widened * remat
    in_head = 2 * head_bytes(model, head, layout, tokens=tokens) + gathered[1]
    return tokens * kept + max(in_layers, in_head)


def _between_stages(model: ModelConfig, layout: Layout, *, itemsize: int) -> float:
    """Bytes of a token that enters and leaves a pipeline: what stages are fed and give, one turn after another."""
    return 5 * model.hidden_size * itemsize * (layout.stage > 1)


def head_bytes(model: ModelConfig, head: Head, layout: Layout, *, tokens: float) -> float:
    """Logits of one device that exist at a time, always float32; those of a head of one number are not counted."""
    if head != "lm":
        return 0.0
    return min(int(tokens), CHUNK_TOKENS) * model.vocab_size * 4 / (layout.stage * layout.tensor)


def inference_activation_bytes(
    model: ModelConfig, head: Head, layout: Layout, *, tokens: float, row_tokens: int, itemsize: int
) -> float:
    """Activations and logits of one device in a forward pass: of one layer, its attention or its MLP, about."""
    scores = score_bytes(model, row_tokens=row_tokens, itemsize=itemsize, tensor=layout.tensor)
    attention = _heads(model) * itemsize / layout.tensor + scores
    mlp = 3 * _inner(model) * itemsize / layout.tensor
    mlp += 2 * sorted_bytes(model, itemsize=itemsize, expert=layout.expert)  # before and after experts
    # Parts of sums over tensor shards are there beside the sums.
    layer = (2 + 3 * (layout.tensor > 1)) * model.hidden_size * itemsize + max(attention, mlp)
    layer += _between_stages(model, layout, itemsize=itemsize)
    return tokens * layer + head_bytes(model, head, layout, tokens=tokens)

"""What a device holds, in bytes."""

from jaxrlhf.architecture import Head, ModelConfig
from jaxrlhf.config import Layout

LOGIT_CHUNK_TOKENS = 1024
"""Tokens whose logits exist at a time."""


def activation_bytes(model: ModelConfig, *, tokens: int, row_tokens: int, itemsize: int, remat: bool) -> int:
    """Bytes that a forward pass keeps for its backward pass, about.

    A layer keeps the residual stream and its norms, queries, keys, values and mixed heads, the
    gate before and after its activation, up and their product, and the attention scores and
    weights; with rematerialisation one layer keeps them at a time, the others their input only.

    Args:
      tokens: On one device in one microbatch.
      row_tokens: S, positions that a token may attend to.
      itemsize: Bytes of an activation.
    """
    layer = layer_activation_bytes(model, row_tokens=row_tokens, itemsize=itemsize)
    whole = model.num_layers * model.hidden_size * itemsize + layer
    return tokens * (whole if remat else model.num_layers * layer)


def layer_activation_bytes(
    model: ModelConfig, *, row_tokens: int, itemsize: int, tensor: int = 1, trains: bool = True
) -> int:
    """Bytes that one layer keeps of one token for its backward pass, about, or has at most in a forward pass.

    Args:
      row_tokens: S, positions that a token may attend to; 0 where attention keeps no scores.
      tensor: Ways the layer is split. The residual stream is whole on every device.
    """
    heads = (2 * model.num_heads + 2 * model.num_kv_heads) * model.head_dim
    inner = model.intermediate_size
    if model.experts is not None:
        inner = model.experts.per_token * model.experts.intermediate_size + model.experts.shared_intermediate_size
    # Softmax is float32 whatever the activations are; backward, scores and weights come with their gradients.
    scores = model.num_heads * row_tokens * (itemsize + 4) * (1 + trains)
    return 4 * model.hidden_size * itemsize + ((heads + 4 * inner) * itemsize + scores) // tensor


def logit_bytes(model: ModelConfig, *, tokens: int) -> int:
    """Bytes of the logits that exist at a time, their gradient included; always float32."""
    return 2 * min(tokens, LOGIT_CHUNK_TOKENS) * model.vocab_size * 4


def weights_held(model: ModelConfig, head: Head, layout: Layout) -> float:
    """Weights of a model that one device holds in the training layout."""
    return model.num_parameters(head) / (layout.stage * layout.tensor * layout.fsdp)


def weights_generating(model: ModelConfig, layout: Layout) -> float:
    """Weights of a policy that one device holds while it generates."""
    return model.num_parameters("lm") / (layout.generation_stage * layout.generation_tensor)


def cache_bytes_per_token(model: ModelConfig, layout: Layout, *, itemsize: int) -> float:
    """Keys and values of one token that one device holds."""
    kept = 2 * model.num_layers * model.num_kv_heads * model.head_dim * itemsize
    return kept / (layout.generation_stage * min(layout.generation_tensor, model.num_kv_heads))


def training_activation_bytes(
    model: ModelConfig, head: Head, layout: Layout, *, tokens: float, row_tokens: int, itemsize: int, remat: bool
) -> float:
    """Activations and logits of one device while it updates.

    Args:
      tokens: Whose activations exist at a time on one device.
      row_tokens: S, positions that a token may attend to; 0 where attention keeps no scores.
    """
    layers = model.num_layers / layout.stage
    layer = layer_activation_bytes(model, row_tokens=row_tokens, itemsize=itemsize, tensor=layout.tensor)
    kept = layers * model.hidden_size * itemsize + layer if remat else layers * layer
    return tokens * kept + _logits(model, head, layout, tokens=tokens)


def inference_activation_bytes(
    model: ModelConfig, head: Head, layout: Layout, *, tokens: float, row_tokens: int, itemsize: int
) -> float:
    """Activations and logits of one device in a forward pass: one layer's at a time."""
    layer = layer_activation_bytes(model, row_tokens=row_tokens, itemsize=itemsize, tensor=layout.tensor, trains=False)
    return tokens * layer + _logits(model, head, layout, tokens=tokens)


def _logits(model: ModelConfig, head: Head, layout: Layout, *, tokens: float) -> float:
    return logit_bytes(model, tokens=int(tokens)) / (layout.stage * layout.tensor) if head == "lm" else 0.0

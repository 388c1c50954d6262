"""Estimates of what training holds on a device beside the weights."""

from jaxrlhf.architecture import ModelConfig

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
    heads = (2 * model.num_heads + 2 * model.num_kv_heads) * model.head_dim
    layer = 4 * model.hidden_size + heads + 4 * model.intermediate_size + 2 * model.num_heads * row_tokens
    kept = model.num_layers * model.hidden_size + layer if remat else model.num_layers * layer
    return tokens * kept * itemsize


def logit_bytes(model: ModelConfig, *, tokens: int) -> int:
    """Bytes of the logits that exist at a time, their gradient included; always float32."""
    return 2 * min(tokens, LOGIT_CHUNK_TOKENS) * model.vocab_size * 4

"""Layer that predicts the second next token, from the hidden state of a token and the embedding of the next token.

    x_i = W [norm(embed(t_{i+1})), norm(h_i)]      g_i = norm(layer(x_1, ..., x_i))      t_{i+2} ~ softmax(head g_i)

with the decoder's hidden states h after its final norm, and its embedding and head. To predict more tokens, the layer
reads in place of h its own output, before the norm or after, as `ModelConfig.mtp` says. The token after a prompt is not
known when the prompt is run, and differs between the responses of a group: zeros take the place of its embedding.

Source: DeepSeek-AI 2024 (DeepSeek-V3, arXiv:2412.19437), section 2.2. That the embedding comes before h, and that h has
passed the final norm, is as in vLLM, which drafts with published checkpoints (deepseek_mtp.py and deepseek_v2.py in
vllm/model_executor/models).
"""

import jax
import jax.numpy as jnp
from jaxtyping import Float, Int

from jaxrlhf.batch import Array, Params
from jaxrlhf.models import linear
from jaxrlhf.models.attention.kv_cache import LayerCache, Prefix
from jaxrlhf.models.attention.mask import AttentionMask
from jaxrlhf.models.config import ModelConfig
from jaxrlhf.models.execution import Execution
from jaxrlhf.models.layer import layer_rows, layer_slots
from jaxrlhf.models.norm import norm
from jaxrlhf.models.residual.embedding import embedded
from jaxrlhf.models.rope import Rotations, rotations

UNKNOWN = -1
"""Id in place of a next token that is not known."""


def next_tokens(token_RW: Int[Array, "R W"], follows_RW: Array) -> Int[Array, "R W"]:
    """Return the token after each token; `UNKNOWN` where the next token of the row does not follow it.

    Args:
      follows_RW: bool, true if the next token of the row follows the token in its sequence.
    """
    return jnp.where(follows_RW, jnp.roll(token_RW, -1, axis=1), UNKNOWN)


def next_of_prompts(token_PS: Int[Array, "P S"], length_P: Int[Array, "P"]) -> Int[Array, "P S"]:
    """Return the token after each token of left-aligned prompts."""
    return next_tokens(token_PS, jnp.arange(1, token_PS.shape[1] + 1)[None] < length_P[:, None])


def mtp_rows(
    params: Params,
    config: ModelConfig,
    hidden_RWD: Float[Array, "R W D"],
    next_RW: Int[Array, "R W"],
    turn: Rotations,
    mask: AttentionMask,
    execution: Execution,
) -> tuple[Array, Prefix]:
    """Run the layer over packed rows, or over a chunk of prompts; return `g_RWD`, and the layer's keys and values."""
    input_RWD = _input(params, config, hidden_RWD, next_RW, execution)
    output_RWD, kept, _ = layer_rows(_layer(params), config, input_RWD, turn, mask, execution)
    return mtp_normed(params, config, output_RWD), kept


def with_mtp(
    kept: Prefix,
    params: Params,
    config: ModelConfig,
    hidden_PSD: Array,
    next_PS: Array,
    turn: Rotations,
    mask: AttentionMask,
    execution: Execution,
) -> Prefix:
    """Append the layer's keys and values to those of the decoder's layers, if the layer drafts.

    Args:
      hidden_PSD: Hidden states before the final norm.
    """
    if not execution.mtp_slots:
        return kept
    normed_PSD = norm(config, hidden_PSD, params["final_norm"])
    _, last = mtp_rows(params, config, normed_PSD, next_PS, turn, mask, execution)
    return jax.tree.map(lambda leaf_LP, leaf_P: jnp.concatenate([leaf_LP, leaf_P[None]]), kept, last)


def mtp_slots(
    params: Params,
    config: ModelConfig,
    hidden_BTD: Float[Array, "B T D"],
    next_BT: Int[Array, "B T"],
    position_B: Int[Array, "B"],
    stored: LayerCache,
    execution: Execution,
) -> tuple[Array, LayerCache]:
    """Run the layer over T consecutive tokens of every slot; return its output, and the layer's cache with them.

    Args:
      position_B: Position of the first of the tokens that `hidden_BTD` belongs to.
    """
    turn = rotations(config, position_B[:, None] + jnp.arange(next_BT.shape[1])[None])
    input_BTD = _input(params, config, hidden_BTD, next_BT, execution)
    places = position_B, position_B, stored, execution
    output_BTD, written, _ = layer_slots(_layer(params), config, input_BTD, turn, *places)
    return output_BTD, written


def mtp_normed(params: Params, config: ModelConfig, output_BD: Array) -> Array:
    """Return the states that the head reads, from the layer's output."""
    return norm(config, output_BD, params["mtp"]["norm"])


def mtp_input(params: Params, config: ModelConfig, output_BD: Array) -> Array:
    """Return what the layer reads to predict one more token, from its output."""
    return mtp_normed(params, config, output_BD) if config.mtp == "normed" else output_BD


def _layer(params: Params) -> Params:
    return jax.tree.map(lambda leaf: leaf[0], params["mtp"]["layer"])


def _input(params: Params, config: ModelConfig, hidden_RWD: Array, next_RW: Array, execution: Execution) -> Array:
    own = params["mtp"]
    embed_RWD = norm(config, embedded(params, config, jnp.maximum(next_RW, 0), execution), own["embed_norm"])
    embed_RWD = jnp.where((next_RW != UNKNOWN)[..., None], embed_RWD, 0)
    both_RWD = jnp.concatenate([embed_RWD, norm(config, hidden_RWD, own["hidden_norm"])], axis=-1)
    return linear.project(both_RWD, own["join"])

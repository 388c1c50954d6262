"""What is read off the residual stream: logits, token log-probabilities, values, scores."""

import jax
import jax.numpy as jnp
from jaxtyping import Float, Float32, Int

from jaxrlhf.algos.objectives import TokenOutput
from jaxrlhf.architecture import ModelConfig
from jaxrlhf.batch import Array, Params


def logits(params: Params, config: ModelConfig, hidden_D: Float[Array, "*batch D"]) -> Float32[Array, "*batch V"]:
    """Unnormalised log-probabilities of the next token, accumulated in float32."""
    table_VD = params["embed" if config.tie_embeddings else "head"].astype(hidden_D.dtype)
    return jnp.einsum("...D,VD->...V", hidden_D, table_VD, preferred_element_type=jnp.float32)


def token_logp(
    params: Params,
    config: ModelConfig,
    hidden_RWD: Float[Array, "R W D"],
    token_RW: Int[Array, "R W"],
    *,
    temperature: float | Float[Array, ""] = 1.0,
    chunk_tokens: int = 1024,
) -> TokenOutput:
    """log softmax(logits / temperature) of each token, and the entropy of that distribution.

        logp[r, t] = log_softmax(logits(hidden[r, t-1]) / temperature)[token[r, t]]

    Column 0 is 0. The first token of a later segment in a row is read off the segment before
    it and means nothing; it is no more trained than column 0 is.

    Logits exist for about `chunk_tokens` tokens at a time, forward and backward. Rows are
    never split between chunks of the loop, so rows sharded over devices stay where they are.
    """
    rows, width = token_RW.shape
    chunk = min(width, max(1, chunk_tokens // rows))
    chunks = -(-width // chunk)
    fill = chunks * chunk - width
    target_RW = jnp.pad(token_RW[:, 1:], ((0, 0), (0, 1 + fill)))
    hidden_RWD = jnp.pad(hidden_RWD, ((0, 0), (0, fill), (0, 0)))
    by_chunk = (
        jnp.moveaxis(hidden_RWD.reshape(rows, chunks, chunk, -1), 1, 0),
        jnp.moveaxis(target_RW.reshape(rows, chunks, chunk), 1, 0),
    )

    @jax.checkpoint
    def read(part):
        return _logp_and_entropy(logits(params, config, part[0]) / temperature, part[1])

    outputs = jax.lax.map(read, by_chunk)
    return TokenOutput(*(_shift(jnp.moveaxis(each, 0, 1).reshape(rows, -1)[:, :width]) for each in outputs))


def _logp_and_entropy(logit_RWV: Array, target_RW: Array) -> tuple[Array, Array]:
    normalizer_RW = jax.nn.logsumexp(logit_RWV, axis=-1)
    # A masked sum, not a gather: it stays local where the vocabulary is sharded.
    chosen_RWV = jnp.arange(logit_RWV.shape[-1])[None, None, :] == target_RW[:, :, None]
    target_logit_RW = jnp.sum(jnp.where(chosen_RWV, logit_RWV, 0.0), axis=-1)
    probability_RWV = jnp.exp(logit_RWV - normalizer_RW[:, :, None])
    return target_logit_RW - normalizer_RW, normalizer_RW - jnp.sum(probability_RWV * logit_RWV, axis=-1)


def values(params: Params, hidden_RWD: Float[Array, "R W D"]) -> Float32[Array, "R W"]:
    """The value head: `value[r, t]` is the value of the prefix before token t; column 0 is 0."""
    return _shift(_scalar(params, hidden_RWD))


def score(
    params: Params,
    hidden_RWD: Float[Array, "R W D"],
    row_B: Int[Array, "B"],
    last_B: Int[Array, "B"],
) -> Float32[Array, "B"]:
    """The score head at the last token of each sequence.

    Args:
      row_B: Row that holds the sequence.
      last_B: Index in that row of the sequence's last token.
    """
    return _scalar(params, hidden_RWD[row_B, last_B])


def _scalar(params: Params, hidden_D: Array) -> Array:
    return jnp.einsum("...D,D->...", hidden_D.astype(jnp.float32), params["head"].astype(jnp.float32))


def _shift(predicted_RW: Array) -> Array:
    """From the index that predicts a token to the index of the token."""
    return jnp.pad(predicted_RW[:, :-1], ((0, 0), (1, 0)))

"""Log-probabilities of the layer that predicts the second next token, for its own loss."""

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float, Int

from jaxrlhf.batch import Array, Params
from jaxrlhf.models.attention.mask import AttentionMask
from jaxrlhf.models.config import ModelConfig
from jaxrlhf.models.execution import Execution
from jaxrlhf.models.heads import token_logp
from jaxrlhf.models.mtp.layer import UNKNOWN, mtp_rows, next_tokens
from jaxrlhf.models.rope import rotations


def mtp_logp(
    params: Params,
    config: ModelConfig,
    hidden_RWD: Float[Array, "R W D"],
    token_RW: Int[Array, "R W"],
    position_RW: Int[Array, "R W"],
    chosen_RW: Bool[Array, "R W"],
    mask: AttentionMask,
    *,
    temperature: float | Float[Array, ""],
    chunk_tokens: int,
    execution: Execution,
) -> tuple[Float[Array, "R W"], Bool[Array, "R W"]]:
    """Compute the log-probability of each token that the policy chose, as the layer predicts it two tokens before.

    The decoder gets no gradient: not its hidden states, nor its embedding and its head.

    Args:
      position_RW: Index of each token in its own sequence. Responses that share a prompt in a row begin with its last
        token.
      mask: Mask of the decoder's layers.

    Returns:
      Log-probabilities, and where there are any: all chosen tokens but the first two of each reply, because the layer
      runs over a prompt before the first is sampled.
    """
    params = {name: tree if name == "mtp" else jax.lax.stop_gradient(tree) for name, tree in params.items()}
    hidden_RWD = jax.lax.stop_gradient(hidden_RWD)

    def after(array_RW: Array) -> Array:
        return jnp.pad(array_RW[:, 1:], ((0, 0), (0, 1)))

    def before(array_RW: Array) -> Array:
        return jnp.pad(array_RW[:, :-1], ((0, 0), (1, 0)))

    # A sequence never begins at the position after the end of the one before it, so positions tell what follows.
    begins_RW = ~chosen_RW & after(chosen_RW)
    next_RW = next_tokens(token_RW, (after(position_RW) == position_RW + 1) & ~begins_RW)
    turn = rotations(config, execution.slices(position_RW))
    given = execution.slices(hidden_RWD), execution.slices(next_RW), turn, mask, execution
    further_RWD = execution.joined(mtp_rows(params, config, *given)[0])
    wanted_RW = chosen_RW & before(chosen_RW) & before(before(next_RW != UNKNOWN))
    output = token_logp(
        *(params, config, jnp.roll(further_RWD, 1, axis=1), token_RW, wanted_RW),
        temperature=temperature,
        chunk_tokens=chunk_tokens,
        execution=execution,
    )
    return output.logp, wanted_RW

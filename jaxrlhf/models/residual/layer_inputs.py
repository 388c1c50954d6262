"""Token embeddings for each layer, which the layer adds to the residual stream after its MLP.

Tokens beyond the table use its first row.

    input_l = (table_l[token] sqrt(P) + norm(project_l(embedding) / sqrt(D))) / sqrt(2)
    h += norm(widen(activation(narrow(h)) * input_l))

Source: Gemma 3n and 4, as `hidden_size_per_layer_input` in transformers.
"""

import jax.numpy as jnp
from jaxtyping import Float, Int

from jaxrlhf.batch import Array, Params
from jaxrlhf.models import linear
from jaxrlhf.models.config import ModelConfig
from jaxrlhf.models.norm import norm


def layer_inputs(
    params: Params, config: ModelConfig, token_RW: Int[Array, "R W"], embed_RWD: Float[Array, "R W D"]
) -> Float[Array, "L R W P"] | None:
    """Compute the inputs of all layers; None if layers have none.

    Args:
      embed_RWD: Input of the first layer.
    """
    if config.layer_inputs is None:
        return None
    own, dtype = params["layer_inputs"], embed_RWD.dtype
    token_RW = jnp.where(token_RW < config.layer_inputs.vocab_size, token_RW, 0)
    table_RWLP = own["embed"][token_RW].astype(dtype) * jnp.asarray(config.layer_inputs.width**0.5, dtype)
    made_RWLP = linear.project(embed_RWD, own["projection"]) * jnp.asarray(config.hidden_size**-0.5, dtype)
    both_RWLP = (norm(config, made_RWLP, own["norm"]) + table_RWLP) * jnp.asarray(0.5**0.5, dtype)
    return jnp.moveaxis(both_RWLP, 2, 0)


def of_input(
    layer: Params, config: ModelConfig, hidden_RWD: Float[Array, "R W D"], input_RWP: Float[Array, "R W P"]
) -> Float[Array, "R W D"]:
    """Compute the product of hidden states and a layer's own input, to be added to the residual stream."""
    own = layer["layer_input"]
    gate_RWP = linear.ACTIVATIONS[config.activation](linear.project(hidden_RWD, own["narrow"]))
    return norm(config, linear.project(gate_RWP * input_RWP, own["widen"]), own["norm"])

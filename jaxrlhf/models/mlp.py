"""What a layer does to each token by itself."""

from functools import partial

import jax

from jaxrlhf.architecture import ModelConfig
from jaxrlhf.batch import Array, Params
from jaxrlhf.models import linear
from jaxrlhf.models.attention import XLA, Attention
from jaxrlhf.models.experts import mix, route

_ACTIVATIONS = {"silu": jax.nn.silu, "gelu_tanh": partial(jax.nn.gelu, approximate=True)}


def feed_forward(mlp: Params, config: ModelConfig, normed_RWD: Array, *, attention: Attention = XLA) -> Array:
    """The gated MLP, or the mixture of experts that stands in its place.

    Args:
      attention: Says what splits a layer over devices.
    """
    if config.experts is None:
        return gated(mlp, config, normed_RWD)
    routing, _ = route(mlp, config.experts, normed_RWD)
    mixed_RWD = mix(mlp, normed_RWD, routing, attention=attention)
    return mixed_RWD + gated(mlp["shared"], config, normed_RWD) if "shared" in mlp else mixed_RWD


def gated(mlp: Params, config: ModelConfig, normed_RWD: Array) -> Array:
    """down(activation(gate(x)) * up(x))."""
    gate_RWF = _ACTIVATIONS[config.activation](linear.project(normed_RWD, mlp["gate"]))
    up_RWF = linear.project(normed_RWD, mlp["up"])
    return linear.project(gate_RWF * up_RWF, mlp["down"])

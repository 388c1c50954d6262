"""What a layer does to each token by itself."""

import jax

from jaxrlhf.architecture import ModelConfig
from jaxrlhf.batch import Array, Params
from jaxrlhf.models import linear
from jaxrlhf.models.attention import XLA, Attention
from jaxrlhf.models.experts import mix, route


def feed_forward(mlp: Params, config: ModelConfig, normed_RWD: Array, *, attention: Attention = XLA) -> Array:
    """The gated MLP, or the mixture of experts that stands in its place.

    Args:
      attention: Says what splits a layer over devices.
    """
    if config.experts is None:
        return gated(mlp, normed_RWD)
    routing, _ = route(mlp, config.experts, normed_RWD)
    mixed_RWD = mix(mlp, normed_RWD, routing, attention=attention)
    return mixed_RWD + gated(mlp["shared"], normed_RWD) if "shared" in mlp else mixed_RWD


def gated(mlp: Params, normed_RWD: Array) -> Array:
    """down(silu(gate(x)) * up(x))."""
    gate_RWF = jax.nn.silu(linear.project(normed_RWD, mlp["gate"]))
    up_RWF = linear.project(normed_RWD, mlp["up"])
    return linear.project(gate_RWF * up_RWF, mlp["down"])

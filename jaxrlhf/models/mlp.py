"""What a layer does to each token by itself."""

import jax

from jaxrlhf.architecture import ModelConfig
from jaxrlhf.batch import Array, Params
from jaxrlhf.models import linear


def feed_forward(mlp: Params, config: ModelConfig, normed_RWD: Array) -> Array:
    """The gated MLP: down(silu(gate(x)) * up(x))."""
    gate_RWF = jax.nn.silu(linear.project(normed_RWD, mlp["gate"]))
    up_RWF = linear.project(normed_RWD, mlp["up"])
    return linear.project(gate_RWF * up_RWF, mlp["down"])

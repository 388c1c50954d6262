"""The feed-forward half of a layer: a gated MLP, or a mixture of experts."""

from collections.abc import Callable
from functools import partial

import jax

from jaxrlhf.batch import Array, Params
from jaxrlhf.models import linear
from jaxrlhf.models.config import ModelConfig
from jaxrlhf.models.execution import ONE_DEVICE, Execution
from jaxrlhf.models.moe.experts import NO_ROUTER_INPUTS, RouterInputs, RouterOutputs, mix, report, route

ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "silu": jax.nn.silu,
    "gelu_tanh": partial(jax.nn.gelu, approximate=True),
}
"""Functions of gates by name."""


def feed_forward(
    mlp: Params,
    config: ModelConfig,
    normed_RWD: Array,
    *,
    execution: Execution = ONE_DEVICE,
    router: RouterInputs = NO_ROUTER_INPUTS,
) -> tuple[Array, RouterOutputs | None]:
    """The gated MLP, or the mixture of experts in its place, and its router's outputs."""
    if config.experts is None or "router" not in mlp:
        return gated(mlp, config, normed_RWD), None
    routing = route(mlp, config.experts, normed_RWD, replayed_RWk=router.replayed, execution=execution)
    mixed_RWD = mix(mlp, normed_RWD, routing, gate=config.experts.activation, execution=execution)
    if "shared" in mlp:
        shared_RWD = gated(mlp["shared"], config, normed_RWD)
        if "shared_gate" in mlp:
            shared_RWD *= jax.nn.sigmoid(linear.project(normed_RWD, mlp["shared_gate"]))
        mixed_RWD += shared_RWD
    return mixed_RWD, report(jax.tree.map(execution.joined, routing), router)


def gated(mlp: Params, config: ModelConfig, normed_RWD: Array) -> Array:
    """down(activation(gate(x)) * up(x))."""
    gate_RWF = ACTIVATIONS[config.activation](linear.project(normed_RWD, mlp["gate"]))
    up_RWF = linear.project(normed_RWD, mlp["up"])
    return linear.project(gate_RWF * up_RWF, mlp["down"])

"""Feed-forward part of a layer: a gated MLP, or a mixture of experts."""

import jax
import jax.numpy as jnp

from jaxrlhf.batch import Array, Params
from jaxrlhf.models import linear
from jaxrlhf.models.config import ModelConfig
from jaxrlhf.models.execution import ONE_DEVICE, Execution
from jaxrlhf.models.linear import ACTIVATIONS
from jaxrlhf.models.moe.experts import NO_ROUTER_INPUTS, RouterInputs, RouterOutputs, mix, report, route
from jaxrlhf.models.norm import norm, rms_norm


def feed_forward(
    mlp: Params,
    config: ModelConfig,
    normed_RWD: Array,
    plain_RWD: Array,
    cut: Array | None,
    *,
    execution: Execution = ONE_DEVICE,
    router: RouterInputs = NO_ROUTER_INPUTS,
) -> tuple[Array, RouterOutputs | None]:
    """Run the gated MLP, or a mixture of experts instead of it or next to it. Return the output and router outputs.

    Args:
      plain_RWD: Input before its norm; experts next to the MLP (`Experts.apart`) apply their own norm to it.
      cut: See `gated`.
    """
    if config.experts is None or "router" not in mlp:
        return gated(mlp, config, normed_RWD, cut=cut), None
    experts, routed_RWD, taken_RWD = config.experts, normed_RWD, normed_RWD
    if experts.apart:
        scale_D = mlp["router_scale"].astype(jnp.float32) * config.hidden_size**-0.5
        routed_RWD = rms_norm(plain_RWD, scale_D, config.rms_norm_eps)
        taken_RWD = norm(config, plain_RWD, mlp["experts_norm"])
    routing = route(mlp, experts, routed_RWD, replayed_RWk=router.replayed, execution=execution)
    mixed_RWD = mix(mlp, taken_RWD, routing, gate=experts.activation, execution=execution)
    if "shared" in mlp:
        shared_RWD = gated(mlp["shared"], config, normed_RWD)
        if "shared_gate" in mlp:
            shared_RWD *= jax.nn.sigmoid(linear.project(normed_RWD, mlp["shared_gate"]))
        if experts.apart:
            mixed_RWD = norm(config, mixed_RWD, mlp["experts_output_norm"])
            shared_RWD = norm(config, shared_RWD, mlp["shared_output_norm"])
        mixed_RWD += shared_RWD
    return mixed_RWD, report(jax.tree.map(execution.joined, routing), router)


def gated(mlp: Params, config: ModelConfig, normed_RWD: Array, *, cut: Array | None = None) -> Array:
    """Compute down(activation(gate(x)) * up(x)).

    Args:
      cut: Threshold of gates, in standard deviations above their token's mean (see `_largest`). Minus infinity or
        None keeps all gates as they are.
    """
    gate_RWF = linear.project(normed_RWD, mlp["gate"])
    if cut is not None:
        gate_RWF = jnp.where(jnp.isneginf(cut), gate_RWF, _largest(gate_RWF, jnp.where(jnp.isneginf(cut), 0.0, cut)))
    up_RWF = linear.project(normed_RWD, mlp["up"])
    return linear.project(ACTIVATIONS[config.activation](gate_RWF) * up_RWF, mlp["down"])


def _largest(gate_RWF: Array, cut: Array) -> Array:
    """Subtract mean + cut * deviation of each token from its gates, and replace negative results by 0.

    Source: Gemma 3n, as `activation_sparsity_pattern` in transformers; the share of gates above the cut is that of a
    normal distribution.
    """
    wide_RWF = gate_RWF.astype(jnp.float32)
    mean_RW1 = wide_RWF.mean(axis=-1, keepdims=True)
    # If all gates are equal (of a zero input, for example), the root alone would have no finite gradient.
    deviation_RW1 = jnp.sqrt(jnp.maximum(jnp.square(wide_RWF - mean_RW1).mean(axis=-1, keepdims=True), 1e-30))
    return jax.nn.relu(wide_RWF - mean_RW1 - cut * deviation_RW1).astype(gate_RWF.dtype)

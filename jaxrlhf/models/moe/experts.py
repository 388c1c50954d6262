"""Mixture of experts in place of a layer's MLP: routing, and the weighted sum of the chosen experts' outputs.

No token is dropped and no expert has a capacity: assignments are sorted by expert, and every expert multiplies as
many rows as chose it.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Float, Float32, Int

from jaxrlhf.batch import Array, Params
from jaxrlhf.models.config import Experts
from jaxrlhf.models.execution import ONE_DEVICE, Execution
from jaxrlhf.models.moe.grouped import SILU, Gate, grouped_mlp

_MATRICES = ("gate", "up", "down", "gate_bias", "up_bias", "down_bias")
"""Parameters of experts, in the argument order of `grouped_mlp`."""


class Routing(NamedTuple):
    """Routing of every token to `k` of `E` experts.

    Attributes:
      choice_RWk: int32, experts that process the token.
      weight_RWk: float32, weights of the experts' outputs.
      probability_RWE: float32, probabilities of the router; they sum to 1.
      own_RWk: int32, experts that the router itself chose; they differ from `choice_RWk` if choices are replayed.
    """

    choice_RWk: Array
    weight_RWk: Array
    probability_RWE: Array
    own_RWk: Array


class RouterInputs(NamedTuple):
    """Inputs of routers: tokens to count for the balance loss, and choices to replay.

    Attributes:
      counted_RW: int32, number of the sequence that a token counts for in the balance loss, from 1; 0 is not counted.
        None computes no loss.
      replayed: int32, choices to take instead of the router's (router replay), `[R, W, L, k]`, or `[R, W, k]` for one
        layer; negative if the router chooses.
    """

    counted_RW: Array | None = None
    replayed: Array | None = None


NO_ROUTER_INPUTS = RouterInputs()


class RouterOutputs(NamedTuple):
    """Outputs of a router for every token; `[L, ...]` for all layers.

    Attributes:
      choice_RWk: int32, experts that the router itself chose.
      entropy_RW: float32, entropy of the router's probabilities, in nats.
      loss_RW: float32, `balance_loss`; None if no tokens are counted.
    """

    choice_RWk: Array
    entropy_RW: Array
    loss_RW: Array | None


def route(
    mlp: Params,
    experts: Experts,
    normed_RWD: Float[Array, "R W D"],
    *,
    replayed_RWk: Int[Array, "R W k"] | None = None,
    execution: Execution = ONE_DEVICE,
) -> Routing:
    """Choose the experts of each token, and their weights.

        s = softmax(x W) or sigmoid(x W)
        choice = top-k of s + bias, within the best groups of experts
        weight = scaling * s[choice] / (sum s[choice] if normalized) * (scale[choice] if experts have scales)

    The router's weights are cast to the dtype of the activations, and its logits are float32. So a trainer with
    float32 master weights and a sampler with a bfloat16 copy choose the same experts.

    Args:
      replayed_RWk: Choices to take instead of the router's; negative if the router chooses.
      execution: Execution, whose mesh axes split rows over devices.

    Source: Shazeer et al. 2017 (arXiv:1701.06538), section 2.1; groups and bias: DeepSeek-AI 2024
    (DeepSeek-V3, arXiv:2412.19437), eq. 12 to 16.
    """
    router_DE = mlp["router"].astype(normed_RWD.dtype)
    logit_RWE = jnp.einsum("RWD,DE->RWE", normed_RWD, router_DE, preferred_element_type=jnp.float32)
    if experts.biases:
        logit_RWE += mlp["router_logit_bias"].astype(jnp.float32)[None, None]
    score_RWE = jax.nn.softmax(logit_RWE) if experts.scores == "softmax" else jax.nn.sigmoid(logit_RWE)
    ranked_RWE = lax.stop_gradient(score_RWE)
    if experts.bias:
        ranked_RWE = ranked_RWE + mlp["router_bias"].astype(jnp.float32)[None, None]
    # Left to itself, the compiler would gather the scores of all rows for the top-k.
    row = PartitionSpec(execution.slice_axes)
    own_RWk = execution.on_devices(partial(_best, experts=experts), row, row)(ranked_RWE)
    choice_RWk = own_RWk if replayed_RWk is None else jnp.where(replayed_RWk < 0, own_RWk, replayed_RWk)
    weight_RWk = jnp.take_along_axis(score_RWE, choice_RWk, axis=-1)
    if experts.normalised:
        weight_RWk = weight_RWk / (weight_RWk.sum(axis=-1, keepdims=True) + 1e-20)
    probability_RWE = score_RWE
    if experts.scores == "sigmoid":
        probability_RWE = score_RWE / (score_RWE.sum(axis=-1, keepdims=True) + 1e-20)
    if "expert_scale" in mlp:
        weight_RWk *= mlp["expert_scale"].astype(jnp.float32)[choice_RWk]
    return Routing(choice_RWk, experts.scaling * weight_RWk, probability_RWE, own_RWk)


def _best(ranked_RWE: Array, experts: Experts) -> Array:
    """Return the experts that process each token, best first."""
    return lax.top_k(_in_best_groups(ranked_RWE, experts), experts.per_token)[1]


def _in_best_groups(ranked_RWE: Array, experts: Experts) -> Array:
    """Set scores to minus infinity outside of the groups whose best experts have the largest sums."""
    if experts.groups == experts.groups_per_token:
        return ranked_RWE
    grouped_RWGM = ranked_RWE.reshape(*ranked_RWE.shape[:2], experts.groups, -1)
    group_RWG = lax.top_k(grouped_RWGM, experts.group_best)[0].sum(axis=-1)
    _, best_RWg = lax.top_k(group_RWG, experts.groups_per_token)
    kept_RWG = jax.nn.one_hot(best_RWg, experts.groups, dtype=bool).any(axis=-2)
    return jnp.where(kept_RWG[..., None], grouped_RWGM, -jnp.inf).reshape(ranked_RWE.shape)


def mix(
    mlp: Params,
    normed_RWD: Float[Array, "R W D"],
    routing: Routing,
    *,
    gate: Gate = SILU,
    execution: Execution = ONE_DEVICE,
) -> Array:
    """Compute the weighted sum of the outputs of each token's experts.

        out = sum_k weight_k down_k(gate(gate_k(x), up_k(x)))    with gate(g, u) = silu(g) u or another

    On a mesh every device runs the tokens of its rows through the experts, and the part of their width, that the
    device holds; the parts are summed. Along the axis that splits experts, tokens are therefore gathered and results
    scattered. Weights and tokens enter as one copy per mesh coordinate, so that the compiler sums their gradients.
    """
    dtype, mesh = normed_RWD.dtype, execution.mesh
    weight_RWk, names = routing.weight_RWk.astype(dtype), [name for name in _MATRICES if name in mlp["experts"]]
    mix_own = partial(_mix_own, gate=gate)
    if mesh is None or mesh.size == 1:
        return _mix_all(mix_own, lambda array: array, mlp["experts"], normed_RWD, weight_RWk, routing.choice_RWk)
    inner, outer = execution.head_axes, execution.expert_axes
    rows = tuple(axis for axis in execution.slice_axes if axis not in outer)
    # Sums over the width then take the rows of one device, and not of all devices that share experts.
    by_row = NamedSharding(mesh, PartitionSpec(inner, execution.slice_axes))
    by_token, of_experts = PartitionSpec(outer, inner, rows), PartitionSpec(rows, outer)
    wide, tall = PartitionSpec(*of_experts, None, inner), PartitionSpec(*of_experts, inner)
    specs = {"gate": wide, "up": wide, "gate_bias": tall, "up_bias": tall, "down": tall, "down_bias": tall}
    experts = dict(mlp["experts"])
    if "down_bias" in experts:  # each part of the sum over the width has a share of the bias
        count, ways = len(experts["down_bias"]), math.prod(mesh.shape[axis] for axis in inner)
        share_E1D = experts["down_bias"][:, None] / ways
        experts["down_bias"] = jnp.broadcast_to(share_E1D, (count, ways, share_E1D.shape[-1]))

    @partial(
        jax.shard_map,
        mesh=mesh,
        in_specs=((by_token, by_token, [specs[name] for name in names]), (by_token, of_experts)),
        out_specs=by_token,
    )
    def run(given: Any, fixed: Any) -> Array:
        *tokens, choice_RWk = (leaf[0, 0] for leaf in (*given[:2], fixed[0]))
        *matrices, index_E = (leaf[0] for leaf in (*given[2], fixed[1]))
        matrices = [each[:, 0] if name == "down_bias" else each for name, each in zip(names, matrices, strict=True)]
        return mix_own((*tokens, matrices), (choice_RWk, index_E))[None, None]

    def copies(array: Array, axes: tuple[str, ...]) -> Array:
        return jnp.broadcast_to(array, (math.prod(mesh.shape[axis] for axis in axes), *array.shape))

    def gathered(array: Array) -> Array:
        return copies(lax.with_sharding_constraint(copies(array, inner), by_row), outer)

    tokens = map(gathered, (normed_RWD, weight_RWk, routing.choice_RWk))
    mixed = _mix_all(run, lambda array: copies(array, rows), experts, *tokens)
    # The activations' dtype is exact enough for this sum, as for the sum over the parts of a dense MLP's width.
    mixed = lax.reduce_sum(mixed, axes=(0,))
    return lax.reduce_sum(lax.with_sharding_constraint(mixed, by_row), axes=(0,))


# Otherwise the backward pass would keep all experts as they are multiplied: gathered, cast and dequantized.
@partial(jax.checkpoint, static_argnums=(0, 1))
def _mix_all(
    run: Callable[..., Array],
    place: Callable[[Array], Array],
    experts: Params,
    tokens: Array,
    weights: Array,
    choices: Array,
) -> Array:
    """Apply `_mix_own` to all experts through `run`; `place` lays out the experts' arrays for `run`."""
    matrices = [experts[name].astype(tokens.dtype) for name in _MATRICES if name in experts]
    index_E = jnp.arange(len(matrices[0]), dtype=jnp.int32)
    return run((tokens, weights, list(map(place, matrices))), (choices, place(index_E)))


def _mix_own(given: tuple[Array, Array, list[Array]], fixed: tuple[Array, Array], *, gate: Gate) -> Array:
    """Compute `mix` for the consecutive experts `index_E` alone; other experts contribute zero."""
    normed_RWD, weight_RWk, matrices = given
    choice_RWk, index_E = fixed
    chosen, experts, width = choice_RWk.shape[-1], len(index_E), normed_RWD.shape[-1]
    # Assignments to experts of other devices come last, where no expert multiplies them.
    own_A = choice_RWk.reshape(-1) - index_E[0]
    own_A = jnp.where((own_A >= 0) & (own_A < experts), own_A, experts)
    order_A = jnp.argsort(own_A, stable=True)
    place_A = jnp.argsort(order_A)
    size_E = (own_A[:, None] == jnp.arange(experts)[None]).sum(axis=0, dtype=jnp.int32)
    input_AD = jnp.repeat(normed_RWD.reshape(-1, width), chosen, axis=0)
    weight_A1 = _permuted(weight_RWk.reshape(-1, 1), order_A, place_A)
    sorted_AD = _permuted(input_AD, order_A, place_A)
    gate_EDF, up_EDF, down_EFD, *biases = matrices
    output_AD = grouped_mlp(
        sorted_AD, gate_EDF, up_EDF, down_EFD, weight_A1[:, 0], size_E, biases=tuple(biases), gate=gate
    )
    return _permuted(output_AD, place_A, order_A).reshape(*choice_RWk.shape, width).sum(axis=2)


@jax.custom_vjp
def _permuted(rows_AD: Array, order_A: Array, place_A: Array) -> Array:
    """Permute rows. The gradient is a permutation as well; JAX by itself would compute it as a scatter-add."""
    return rows_AD[order_A]


def _permuted_forward(rows_AD: Array, order_A: Array, place_A: Array) -> tuple[Array, Array]:
    return rows_AD[order_A], place_A


def _permuted_backward(place_A: Array, change_AD: Array) -> tuple[Array, None, None]:
    return change_AD[place_A], None, None


_permuted.defvjp(_permuted_forward, _permuted_backward)


def report(routing: Routing, router: RouterInputs) -> RouterOutputs:
    """Return the outputs of a router, with the balance loss if tokens are counted."""
    probability_RWE = routing.probability_RWE
    entropy_RW = -(probability_RWE * jnp.log(jnp.maximum(probability_RWE, 1e-30))).sum(axis=-1)
    loss_RW = None if router.counted_RW is None else balance_loss(routing, router.counted_RW)
    return RouterOutputs(routing.own_RWk, lax.stop_gradient(entropy_RW), loss_RW)


def balance_loss(routing: Routing, counted_RW: Int[Array, "R W"]) -> Float32[Array, "R W"]:
    """Compute the load-balancing loss of each sequence, as a number for each of its counted tokens.

        loss_t = E sum_e f_e p_te        f_e = share of the sequence's tokens that chose e

    The mean over a sequence is E sum_e f_e P_e with P_e the mean probability. It is k if all experts have equal load.
    Shares are computed within one sequence, so neither packing nor the microbatch size changes a gradient. The
    gradient flows through the probabilities alone.

    Args:
      counted_RW: int32, number of the sequence that a token counts for, from 1; 0 is not counted.

    Source: Fedus et al. 2022 (Switch, arXiv:2101.03961), eq. 4 to 6; by sequence: DeepSeek-AI
    2024 (DeepSeek-V3, arXiv:2412.19437), eq. 17 to 20.
    """
    experts = routing.probability_RWE.shape[-1]

    def shares(choice_Wk: Array, counted_W: Array) -> Array:
        sequences = len(counted_W) + 1
        chosen_WE = jax.nn.one_hot(choice_Wk, experts, dtype=jnp.float32).sum(axis=1)
        sums_SE = jax.ops.segment_sum(chosen_WE, counted_W, sequences)
        tokens_S = jax.ops.segment_sum(jnp.ones(counted_W.shape, jnp.float32), counted_W, sequences)
        return (sums_SE / jnp.maximum(tokens_S, 1.0)[:, None])[counted_W]

    share_RWE = jax.vmap(shares)(routing.own_RWk, counted_RW)
    loss_RW = experts * (share_RWE * routing.probability_RWE).sum(axis=-1)
    return jnp.where(counted_RW > 0, loss_RW, 0.0)

"""Gated MLPs of several experts, each over its own rows: grouped matrix multiplication.

TPUs have an instruction for this, `jax.lax.ragged_dot`. On other platforms `ragged_dot` multiplies all rows by every
expert, with zeros in the rows of other experts. There rows are multiplied in blocks instead, and no block belongs to
two experts.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Float, Int

from jaxrlhf.batch import Array
from jaxrlhf.models.config import ClampedGate
from jaxrlhf.models.linear import ACTIVATIONS, transposed_product
from jaxrlhf.sharding.described import platform

_SMALLEST_BLOCK, _LARGEST_BLOCK = 8, 256


Gate = Literal["silu", "gelu_tanh"] | ClampedGate
"""Function of an expert's gate and up projections, by name or by the numbers of a clamped gate."""

SILU: Gate = "silu"


def gated(gate: Gate, gate_F: Array, up_F: Array) -> Array:
    """Compute silu(gate) * up, or another function of both."""
    if isinstance(gate, ClampedGate):
        gate_F, up_F = jnp.minimum(gate_F, gate.limit), jnp.clip(up_F, -gate.limit, gate.limit)
        return (up_F + 1) * gate_F * jax.nn.sigmoid(gate.alpha * gate_F)
    return ACTIVATIONS[gate](gate_F) * up_F


def grouped_mlp(
    input_AD: Float[Array, "A D"],
    gate_EDF: Float[Array, "E D F"],
    up_EDF: Float[Array, "E D F"],
    down_EFD: Float[Array, "E F D"],
    weight_A: Float[Array, "A"],
    size_E: Int[Array, "E"],
    *,
    biases: tuple[Array, ...] = (),
    gate: Gate = SILU,
) -> Float[Array, "A D"]:
    """Compute weight * down(silu(gate(x)) * up(x)) with the matrices of the expert that each row belongs to.

    Args:
      input_AD: Rows, sorted by expert.
      size_E: Number of rows of each expert, in order; rows past their sum belong to no expert and give 0.
      biases: Biases of gate and up `[E, F]` and of down `[E, D]`; empty if there are none.
      gate: Function to use instead of silu(gate) * up.
    """
    matrices = gate_EDF, up_EDF, down_EFD
    if platform() == "tpu":
        return _ragged(gate, input_AD, matrices, biases, weight_A, size_E)
    block = _block_rows(len(input_AD), len(gate_EDF))
    return _in_blocks(block, gate, input_AD, matrices, biases, weight_A, size_E)


def _block_rows(rows: int, experts: int) -> int:
    """Return the number of rows of a block: a power of two, about half of the average number of rows of an expert."""
    return min(_LARGEST_BLOCK, max(_SMALLEST_BLOCK, 1 << (max(1, rows // (2 * experts)).bit_length() - 1)))


def _ragged(
    gate: Gate,
    input_AD: Array,
    matrices: tuple[Array, ...],
    biases: tuple[Array, ...],
    weight_A: Array,
    size_E: Array,
) -> Array:
    last_E = jnp.cumsum(size_E)
    expert_A = jnp.minimum(jnp.searchsorted(last_E, jnp.arange(len(input_AD)), side="right"), len(size_E) - 1)

    def product(rows_A: Array, place: int) -> jax.Array:
        found = lax.ragged_dot(jnp.asarray(rows_A), jnp.asarray(matrices[place]), jnp.asarray(size_E))
        return found + biases[place][expert_A] if biases else found

    output_AD = product(gated(gate, product(input_AD, 0), product(input_AD, 1)), 2)
    return jnp.where((jnp.arange(len(input_AD)) < last_E[-1])[:, None], weight_A[:, None] * output_AD, 0.0)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _in_blocks(
    block: int,
    gate: Gate,
    input_AD: Array,
    matrices: tuple[Array, ...],
    biases: tuple[Array, ...],
    weight_A: Array,
    size_E: Array,
) -> Array:
    """Compute one block after another; the backward pass recomputes gate and up, so that only the inputs are kept."""
    plan_3M, count = _plan(size_E, rows=len(input_AD), block=block)
    padded_AD = _padded(input_AD, block)

    def body(index: Array, output_AD: Array) -> Array:
        expert, start, own_C = _block(plan_3M, index, block)
        input_CD = lax.dynamic_slice_in_dim(padded_AD, start, block)
        product = _products(expert, matrices, biases)
        output_CD = product(gated(gate, product(input_CD, 0), product(input_CD, 1)), 2)
        # Rows that a block writes past its expert's last row are overwritten by the next block.
        return lax.dynamic_update_slice_in_dim(output_AD, jnp.where(own_C[:, None], output_CD, 0), start, 0)

    return weight_A[:, None] * lax.fori_loop(0, count, body, jnp.zeros_like(padded_AD))[: len(input_AD)]


def _products(expert: Array, matrices: tuple[Array, ...], biases: tuple[Array, ...]) -> Callable[[Array, int], Array]:
    """Return a function that multiplies rows with one matrix of an expert, and adds its bias."""

    def product(rows_C: Array, place: int) -> Array:
        found = rows_C @ _of(expert, matrices[place])
        return found + _of(expert, biases[place])[None] if biases else found

    return product


def _in_blocks_forward(block: int, gate: Gate, *arrays: Any) -> tuple[Array, tuple[Any, ...]]:
    return _in_blocks(block, gate, *arrays), arrays


def _in_blocks_backward(block: int, gate: Gate, saved: tuple[Any, ...], change_AD: Array) -> tuple[Any, ...]:
    input_AD, matrices, biases, weight_A, size_E = saved
    plan_3M, count = _plan(size_E, rows=len(input_AD), block=block)
    padded_AD, padded_change_AD, padded_A1 = (_padded(rows, block) for rows in (input_AD, change_AD, weight_A[:, None]))

    def body(index: Array, sums: tuple[Any, ...]) -> tuple[Any, ...]:
        expert, start, own_C = _block(plan_3M, index, block)
        input_CD = lax.dynamic_slice_in_dim(padded_AD, start, block)
        change_CD = lax.dynamic_slice_in_dim(padded_change_AD, start, block)
        change_CD = jnp.where(own_C[:, None], change_CD, 0)
        weight_C1 = lax.dynamic_slice_in_dim(padded_A1, start, block)
        gate_DF, up_DF, down_FD = (_of(expert, weight) for weight in matrices)
        product = _products(expert, matrices, biases)
        gated_CF, pull = jax.vjp(partial(gated, gate), product(input_CD, 0), product(input_CD, 1))
        toward_CF = change_CD @ down_FD.T
        change_gate_CF, change_up_CF = pull(weight_C1 * toward_CF)
        slope_CD = change_gate_CF @ gate_DF.T + change_up_CF @ up_DF.T
        slope_C1 = (gated_CF * toward_CF).sum(axis=-1, keepdims=True)
        if biases:
            slope_C1 += (change_CD * _of(expert, biases[2])[None]).sum(axis=-1, keepdims=True)
        products = (input_CD, change_gate_CF), (input_CD, change_up_CF), (weight_C1 * gated_CF, change_CD)
        of_biases = change_gate_CF, change_up_CF, weight_C1 * change_CD
        slope_AD, slope_A1, slopes, bias_slopes = sums
        return (
            lax.dynamic_update_slice_in_dim(slope_AD, slope_CD, start, 0),
            lax.dynamic_update_slice_in_dim(slope_A1, slope_C1, start, 0),
            [
                slope.at[expert].add(transposed_product(*product, jnp.float32))
                for slope, product in zip(slopes, products, strict=True)
            ],
            [
                slope.at[expert].add(change.sum(axis=0, dtype=jnp.float32))
                for slope, change in zip(bias_slopes, of_biases, strict=False)
            ],
        )

    def zeros(arrays: tuple[Array, ...]) -> list[Array]:
        return [jnp.zeros_like(each, jnp.float32) for each in arrays]

    start_state = jnp.zeros_like(padded_AD), jnp.zeros_like(padded_A1), zeros(matrices), zeros(biases)
    slope_AD, slope_A1, *slopes = lax.fori_loop(0, count, body, start_state)
    rows, dtype = len(input_AD), matrices[0].dtype
    return slope_AD[:rows], *(tuple(each.astype(dtype) for each in one) for one in slopes), slope_A1[:rows, 0], None


_in_blocks.defvjp(_in_blocks_forward, _in_blocks_backward)


def _plan(size_E: Array, *, rows: int, block: int) -> tuple[Array, Array]:
    """Return expert, first row and remaining rows of the expert for each block, and the number of blocks."""
    blocks_E = -(-size_E // block)
    end_E, last_E = jnp.cumsum(blocks_E), jnp.cumsum(size_E)
    index_M = jnp.arange(rows // block + len(size_E), dtype=jnp.int32)
    expert_M = jnp.minimum((end_E[None] <= index_M[:, None]).sum(axis=1), len(size_E) - 1)
    start_M = (last_E - size_E)[expert_M] + block * (index_M - (end_E - blocks_E)[expert_M])
    return jnp.stack([expert_M, start_M, last_E[expert_M] - start_M]).astype(jnp.int32), end_E[-1]


def _block(plan_3M: Array, index: Array, block: int) -> tuple[Array, Array, Array]:
    """Return the expert and first row of a block, and the mask of the rows that belong to the expert."""
    expert, start, rows = plan_3M[:, index]
    return expert, start, jnp.arange(block) < rows


def _padded(rows_AD: Array, block: int) -> Array:
    return jnp.pad(rows_AD, ((0, block), (0, 0)))


def _of(expert: Array, weight_E: Array) -> Array:
    return lax.dynamic_index_in_dim(weight_E, expert, keepdims=False)

"""Exchange of tokens for heads: attention of rows whose tokens are split over devices (Ulysses context parallelism).

Outside attention a device has some tokens of a row, in all heads. Before attention, one all-to-all each for queries,
keys and values gives the device all tokens, in some heads. One all-to-all after attention reverses the exchange.
Kernels, masks, windows and shared prompts therefore see whole rows, and devices have equal work under every mask.
Latents are gathered instead: they are smaller than a device's part of the keys and values made from them.

Source: Jacobs et al. 2023 (DeepSpeed Ulysses, arXiv:2309.14509), section 3.
"""

from dataclasses import dataclass, replace
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Float

from jaxrlhf.batch import Array
from jaxrlhf.models.attention.score_mod import ScoreMod
from jaxrlhf.models.execution import Execution


class ExchangedHeads(NamedTuple):
    """Number of heads of one tensor shard, padded so that they split evenly.

    Attributes:
      copies: Number of copies of every key-value head; its query heads are divided among the copies.
      kv_heads: Number of key-value heads, including copies and heads of zeros.
      group: Number of query heads of each key-value head, including heads of zeros.
    """

    copies: int
    kv_heads: int
    group: int

    @property
    def heads(self) -> int:
        """Number of query heads."""
        return self.kv_heads * self.group


def exchanged_heads(kv_heads: int, group: int, ways: int) -> ExchangedHeads:
    """Return the fewest query heads, and then the fewest key-value heads, that split `ways` ways.

    Args:
      kv_heads: Number of key-value heads of a tensor shard.
      group: Number of query heads of each key-value head.
    """
    choices = (
        ExchangedHeads(copies, -(-kv_heads * copies // ways) * ways, -(-group // copies))
        for copies in range(1, group + 1)
    )
    return min(choices, key=lambda choice: (choice.heads, choice.kv_heads, choice.copies))


@dataclass(frozen=True)
class HeadExchange:
    """Exchange of tokens for one layer's heads; arrays stay unchanged if devices do not split tokens.

    Slices `[S, Y]` are as in `Execution.slices`, and rows `[R, W]` are whole.

    Attributes:
      execution: Execution of the slices.
      kv_heads: Number of key-value heads of all tensor shards.
      group: Number of query heads of each key-value head.
    """

    execution: Execution
    kv_heads: int
    group: int = 1

    @property
    def inside(self) -> Execution:
        """Execution of attention between the two exchanges."""
        return replace(self.execution, head_axes=self._head_axes, token_axes=())

    def queries(self, array_SYNX: Float[Array, "S Y N *X"]) -> Float[Array, "R W M *X"]:
        """Exchange queries: each device gets all tokens in its own heads."""
        return array_SYNX if self._stays else self._whole(self._filled_queries(array_SYNX))

    def keys(self, array_SYKX: Float[Array, "S Y K *X"]) -> Float[Array, "R W J *X"]:
        """Exchange keys or values: each device gets all tokens in its own heads."""
        return array_SYKX if self._stays else self._whole(self._filled_keys(array_SYKX))

    def gathered(self, array_SYX: Float[Array, "S Y *X"]) -> Float[Array, "R W *X"]:
        """Gather all tokens of an array that all heads share, on every device."""
        return self.execution.split(self.execution.joined(array_SYX), self.execution.row_axes)

    def made(self, array_RWKX: Float[Array, "R W K *X"]) -> Float[Array, "R W J *X"]:
        """Split keys or values that were made from gathered arrays into each device's own heads."""
        if self._stays:
            return array_RWKX
        return self.execution.split(self._filled_keys(array_RWKX), self.execution.row_axes, None, self._head_axes)

    def score_mod(self, score_mod: ScoreMod) -> ScoreMod:
        """Return the scores for the heads between the exchanges, with their sinks."""
        if self._stays or score_mod.sink_N is None:
            return score_mod
        return replace(score_mod, sink_N=self._filled_queries(score_mod.sink_N[None, None])[0, 0])

    def weights(self, weight_KX: Float[Array, "K *X"]) -> Float[Array, "J *X"]:
        """Convert weights of key-value heads to the heads between the exchanges."""
        return weight_KX if self._stays else self._filled_keys(weight_KX[None, None])[0, 0]

    def back(self, mixed_RWMU: Float[Array, "R W M *U"]) -> Float[Array, "S Y N *U"]:
        """Reverse the exchange: each device gets its own tokens, in all heads of the exchanged array."""
        if self._stays:
            return mixed_RWMU
        mixed, inside = self._slices(mixed_RWMU), self._inside
        (slices, width), more = mixed.shape[:2], mixed.shape[3:]
        mixed = mixed.reshape(slices, width, -1, inside.kv_heads, inside.group, *more)
        mixed = mixed[:, :, :, : self._shard_heads * inside.copies]
        mixed = mixed.reshape(slices, width, self.kv_heads, -1, *more)[:, :, :, : self.group]
        return mixed.reshape(slices, width, -1, *more)

    @property
    def _ways(self) -> int:
        return self.execution.size(self.execution.token_axes)

    @property
    def _stays(self) -> bool:
        return self._ways == 1

    @property
    def _head_axes(self) -> tuple[str, ...]:
        return (*self.execution.head_axes, *self.execution.token_axes)

    @property
    def _shard_heads(self) -> int:
        return self.kv_heads // self.execution.size(self.execution.head_axes)

    @property
    def _inside(self) -> ExchangedHeads:
        return exchanged_heads(self._shard_heads, self.group, self._ways)

    def _whole(self, array_SYNX: Array) -> Array:
        """Exchange slices in all heads of a tensor shard for rows in some of the heads."""
        execution, (slices, width, *rest) = self.execution, array_SYNX.shape
        array_CRYNX = array_SYNX.reshape(self._ways, -1, width, *rest)
        by_token = execution.split(array_CRYNX, execution.token_axes, execution.row_axes, None, execution.head_axes)
        by_head = execution.split(by_token, None, execution.row_axes, None, self._head_axes)
        return jnp.moveaxis(by_head, 0, 1).reshape(slices // self._ways, -1, *rest)

    def _slices(self, array_RWNX: Array) -> Array:
        """Exchange rows in some heads for slices in all heads of a tensor shard."""
        execution, (rows, width, *rest) = self.execution, array_RWNX.shape
        array_RCYNX = array_RWNX.reshape(rows, self._ways, width // self._ways, *rest)
        by_head = execution.split(jnp.moveaxis(array_RCYNX, 1, 0), None, execution.row_axes, None, self._head_axes)
        by_token = execution.split(by_head, execution.token_axes, execution.row_axes, None, execution.head_axes)
        return by_token.reshape(self._ways * rows, -1, *rest)

    def _filled_queries(self, array_RWNX: Array) -> Array:
        """Divide query heads among the copies of their key-value head, and add heads of zeros."""
        inside, heads = self._inside, self._shard_heads
        (rows, width), more = array_RWNX.shape[:2], array_RWNX.shape[3:]
        array = array_RWNX.reshape(rows, width, self.kv_heads, self.group, *more)
        array = _padded(array, inside.copies * inside.group)
        array = array.reshape(rows, width, -1, heads * inside.copies, inside.group, *more)
        return _padded(array, inside.kv_heads).reshape(rows, width, -1, *more)

    def _filled_keys(self, array_RWKX: Array) -> Array:
        """Repeat key-value heads, and add heads of zeros."""
        inside, heads = self._inside, self._shard_heads
        (rows, width), more = array_RWKX.shape[:2], array_RWKX.shape[3:]
        array = array_RWKX if inside.copies == 1 else jnp.repeat(array_RWKX, inside.copies, axis=2)
        array = array.reshape(rows, width, -1, heads * inside.copies, *more)
        return _padded(array, inside.kv_heads).reshape(rows, width, -1, *more)


def _padded(array: Array, size: int) -> Array:
    """Pad the fourth dimension with zeros to `size`."""
    return jnp.pad(array, [(0, size - array.shape[3] if dim == 3 else 0) for dim in range(array.ndim)])

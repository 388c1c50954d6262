"""Interface of attention masks: each mask is a pytree of arrays that computes attention by its own algorithm."""

from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

from jaxtyping import Float

from jaxrlhf.batch import Array
from jaxrlhf.models.attention.linear_attention import LayerState, MixerWeights, Projected
from jaxrlhf.models.attention.score_mod import ScoreMod
from jaxrlhf.models.config import LinearAttention
from jaxrlhf.models.execution import ONE_DEVICE, Execution

Expansion = tuple[Any, Callable[[Any, Array, Array], tuple[Array, Array]]]
"""Matrix that makes keys and values of all heads from latents (or None), and a function `(matrix, kept keys, kept
values) -> (keys, values)`."""

ALL_KEPT: Expansion = (None, lambda matrix, keys, values: (keys, values))
"""Expansion of a cache that has keys and values of all heads."""


@runtime_checkable
class AttentionMask(Protocol):
    """Mask of the tokens that each token of a layer's rows sees."""

    def attend(
        self,
        query_RWNH: Float[Array, "R W N H"],
        key_RWKH: Float[Array, "R W K H"],
        value_RWKU: Float[Array, "R W K U"],
        score_mod: ScoreMod,
        /,
        *,
        expansion: Expansion = ALL_KEPT,
        execution: Execution = ONE_DEVICE,
    ) -> Float[Array, "R W N U"]:
        """Compute attention of the rows to the tokens that they see; softmax in float32.

        Args:
          key_RWKH, value_RWKU: Keys and values of the rows, in all heads.
          expansion: Function from the keys and values of a cache to those of all heads, with its matrix.
        """

    def mix_states(
        self, linear: LinearAttention, projected: Projected, weights: MixerWeights
    ) -> tuple[Array, LayerState | None]:
        """Compute linear attention over the same tokens.

        Returns:
          Mixed values, `[R, W, K, G, U]`, and the states after each row; None if sequences are not whole rows.
        """

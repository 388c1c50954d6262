"""Interface of attention masks: each mask is a pytree of arrays that computes attention by its own algorithm."""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, runtime_checkable

from jaxrlhf.batch import Array
from jaxrlhf.models.attention.linear_attention import LayerState, MixerWeights, Projected
from jaxrlhf.models.attention.score_mod import PLAIN, ScoreMod
from jaxrlhf.models.config import LinearAttention
from jaxrlhf.models.execution import ONE_DEVICE, Execution

Expansion = tuple[Any, Callable[[Any, Array, Array], tuple[Array, Array]]]
"""Matrix that makes keys and values of all heads from latents (or None), and a function `(matrix, kept keys, kept
values) -> (keys, values)`."""


class Heads(NamedTuple):
    """Queries, keys and values of rows; the values may have a different width.

    Attributes:
      expansion: Function from the keys and values of a cache to those of all heads.
    """

    query_RWNH: Array
    key_RWKH: Array
    value_RWKU: Array
    expansion: Expansion = (None, lambda matrix, keys, values: (keys, values))


Mixed = tuple[Array, LayerState | None]
"""Mixed values of linear attention, `[R, W, K, G, U]`, and the states after each row; None if there are no states."""


@runtime_checkable
class AttentionMask(Protocol):
    """Mask of the tokens that each token of a layer's rows sees."""

    def attend(self, heads: Heads, score_mod: ScoreMod = PLAIN, execution: Execution = ONE_DEVICE) -> Array:
        """Compute attention of the rows to the tokens that they see, `[R, W, N, U]`; softmax in float32."""

    def mix_states(self, linear: LinearAttention, projected: Projected, weights: MixerWeights) -> Mixed:
        """Compute linear attention over the same tokens."""

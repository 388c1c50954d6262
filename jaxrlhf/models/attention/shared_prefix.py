"""Shared-prefix attention: packed rows hold a prompt once for all its responses.

Layers other than attention compute each token by itself, so a shared prompt is computed once. Attention gets every
sequence whole, prompt and response contiguous, as its kernels require. A loop runs a few sequences at a time, so that
one program serves batches of all lengths, at a cost that follows their lengths.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from jaxrlhf.batch import Array
from jaxrlhf.models.attention.attention import attend
from jaxrlhf.models.attention.attention_xla import ATTENDED
from jaxrlhf.models.attention.linear_attention import MixerWeights, Projected, StateMixer
from jaxrlhf.models.attention.mask import Heads, Mixed
from jaxrlhf.models.attention.score_mod import PLAIN, ScoreMod
from jaxrlhf.models.config import LinearAttention
from jaxrlhf.models.execution import ONE_DEVICE, Execution

_CHUNK_TOKENS = {"xla": 768}
"""Number of tokens of a row in one round of the loop, by kernel: on CPU as many as its caches hold."""
_MOST_CHUNK_TOKENS = 16_384


class AttentionRows(NamedTuple):
    """Layout of whole sequences in `A` attention rows of `S` tokens, for each packed row.

    Attributes:
      source_RAS: int32, index of the token in the packed row.
      segment_RAS: int32, number of the sequence, from 1; 0 is padding.
      is_primary_RAS: bool, true for the one copy of a token whose result is used; all copies are alike.
      used_R: int32, number of attention rows in use; they come first.
    """

    source_RAS: Array
    segment_RAS: Array
    is_primary_RAS: Array
    used_R: Array


class SharedPrefix(NamedTuple):
    """Layout of the whole sequences of packed rows in which sequences share tokens, grouped by similar lengths."""

    parts: tuple[AttentionRows, ...]

    def attend(self, heads: Heads, score_mod: ScoreMod = PLAIN, execution: Execution = ONE_DEVICE) -> Array:
        """Compute attention of each sequence; padding gets 0."""
        mixer = _Attention(replace(score_mod, slides=None, sink_N=None), execution)
        return self.mix(mixer, heads[:3], score_mod.sink_N, score_mod.slides)

    def mix_states(self, linear: LinearAttention, projected: Projected, weights: MixerWeights) -> Mixed:
        """Compute linear attention of each sequence; there are no states, because rows are no sequences."""
        return self.mix(StateMixer(linear), tuple(projected), weights, None), None

    def mix(self, mixer: "Mixer", tokens: tuple[Array, ...], weights: Any, flags: Any) -> Array:
        """Apply `mixer` to each whole sequence; padding gets 0.

        Args:
          tokens: Arrays `[R, W, ...]`.
          weights: Parameters, or None.
          flags: Arrays without a gradient, or None.
        """
        return checkpoint_name(_mix(tokens, weights, self, flags, mixer), ATTENDED)


@dataclass(frozen=True)
class _Attention:
    """Attention as a `Mixer`: its weights are the sinks, and its flag is the window's."""

    score_mod: ScoreMod
    execution: Execution

    @property
    def round_tokens(self) -> int:
        """Number of tokens of a row in one round of the loop."""
        return _CHUNK_TOKENS.get(self.execution.rows_kernel, _MOST_CHUNK_TOKENS)

    def __call__(self, tokens: tuple[Array, ...], sink_N: Any, slides: Any, segment_XS: Array) -> Array:
        score_mod = replace(self.score_mod, slides=slides, sink_N=sink_N)
        query_XSNH, key_XSKH, value_XSKU = tokens
        return attend(query_XSNH, key_XSKH, value_XSKU, segment_XS, score_mod, execution=self.execution)


@runtime_checkable
class Mixer(Protocol):
    """Function that mixes the tokens of each sequence: `(tokens, weights, flags, segment_XS) -> [X, S, ...]`.

    A mixer is hashable and contains no arrays. `tokens` are `[X, S, ...]` arrays, and `weights` are its parameters.
    """

    @property
    def round_tokens(self) -> int:
        """Number of tokens of a row that the mixer gets at a time."""

    def __call__(self, tokens: tuple[Array, ...], weights: Any, flags: Any, segment_XS: Array, /) -> Array:
        """Mix each token with the tokens before it in its segment."""


@partial(jax.custom_vjp, nondiff_argnums=(4,))
def _mix(tokens: tuple[Array, ...], weights: Any, shared_prefix: SharedPrefix, flags: Any, mixer: Mixer) -> Array:
    return _forward(tokens, weights, shared_prefix, flags, mixer)[0]


def _forward(
    tokens: tuple[Array, ...], weights: Any, shared_prefix: SharedPrefix, flags: Any, mixer: Mixer
) -> tuple[Array, Any]:
    rows, width = tokens[0].shape[:2]
    whole = jax.eval_shape(mixer, tokens, weights, flags, jax.ShapeDtypeStruct((rows, width), jnp.int32))
    mixed_RWNU = _zeros(tokens[0], whole.shape[2:], whole.dtype)
    for part in shared_prefix.parts:
        chunks = _Chunks(part, mixer.round_tokens)

        def put(index: Array, mixed_RWNU: Array, chunks: _Chunks = chunks) -> Array:
            source_RE, segment_XS, is_primary_RE = chunks.at(index)
            laid_out = tuple(chunks.lay_out(array, source_RE) for array in tokens)
            part_RENU = chunks.back(mixer(laid_out, weights, flags, segment_XS))
            target_RE = jnp.where(is_primary_RE, source_RE, mixed_RWNU.shape[1])
            return jax.vmap(lambda mixed, at, new: mixed.at[at].set(new, mode="drop"))(mixed_RWNU, target_RE, part_RENU)

        mixed_RWNU = chunks.over(put, mixed_RWNU)
    return mixed_RWNU, (tokens, weights, shared_prefix, flags)


def _backward(mixer: Mixer, saved: Any, change_RWNU: Array) -> tuple[Any, ...]:
    """Compute gradients: mix each chunk again, and sum gradients of a token's copies and of parameters in float32."""
    tokens, weights, shared_prefix, flags = saved
    sums = [_zeros(array, array.shape[2:], jnp.float32) for array in tokens]
    of_weights = jax.tree.map(lambda leaf: jnp.where(False, leaf, 0).astype(jnp.float32), weights)
    for part in shared_prefix.parts:
        chunks = _Chunks(part, mixer.round_tokens)

        def add(index: Array, so_far: Any, chunks: _Chunks = chunks) -> Any:
            sums, of_weights = so_far
            source_RE, segment_XS, is_primary_RE = chunks.at(index)
            whole = tuple(chunks.lay_out(array, source_RE) for array in tokens)
            _, pull = jax.vjp(lambda tokens, weights: mixer(tokens, weights, flags, segment_XS), whole, weights)
            change_XSNU = chunks.lay_out(change_RWNU, source_RE)
            is_primary_XS = is_primary_RE.reshape(segment_XS.shape)
            change_XSNU = change_XSNU * jnp.expand_dims(is_primary_XS, tuple(range(2, change_XSNU.ndim)))
            plus = jax.vmap(lambda total, at, more: total.at[at].add(more))
            changes, more = pull(change_XSNU)
            sums = [plus(total, source_RE, chunks.back(change)) for total, change in zip(sums, changes, strict=True)]
            return sums, jax.tree.map(jnp.add, of_weights, more)

        sums, of_weights = chunks.over(add, (sums, of_weights))
    given = tuple(total.astype(array.dtype) for total, array in zip(sums, tokens, strict=True))
    return given, jax.tree.map(lambda total, leaf: total.astype(leaf.dtype), of_weights, weights), None, None


_mix.defvjp(_forward, _backward)


class _Chunks:
    """Loop over attention rows in chunks: some attention rows of each packed row at a time.

    E is the number of tokens of a chunk for one packed row, and X is the number of its attention rows for all of them.
    """

    def __init__(self, part: AttentionRows, tokens: int) -> None:
        rows, count, width = part.source_RAS.shape
        self._rows, self._width = rows, width
        self._size = min(count, max(1, tokens // self._width))
        self._chunks = -(-part.used_R.max() // self._size)
        padding = ((0, 0), (0, -count % self._size), (0, 0))
        self._tables = [jnp.pad(table, padding) for table in (part.source_RAS, part.segment_RAS, part.is_primary_RAS)]

    def over(self, body: Callable[[Any, Any], Any], carry: Any) -> Any:
        """Run the body on every chunk in use."""
        return lax.fori_loop(0, self._chunks, body, carry)

    def at(self, index: Array) -> tuple[Array, Array, Array]:
        """Return sources `[R, E]`, segments `[X, S]`, and flags `[R, E]` of the copies whose results are used."""
        source_RCS, segment_RCS, is_primary_RCS = (
            lax.dynamic_slice_in_dim(table, index * self._size, self._size, axis=1) for table in self._tables
        )
        return (
            source_RCS.reshape(self._rows, -1),
            segment_RCS.reshape(-1, self._width),
            is_primary_RCS.reshape(self._rows, -1),
        )

    def lay_out(self, array_RWNH: Array, source_RE: Array) -> Array:
        """Copy tokens of packed rows into attention rows, `[X, S, N, H]`."""
        index = jnp.expand_dims(source_RE, tuple(range(2, array_RWNH.ndim)))
        array_RENH = jnp.take_along_axis(array_RWNH, index, axis=1)
        return array_RENH.reshape(-1, self._width, *array_RWNH.shape[2:])

    def back(self, array_XSNH: Array) -> Array:
        """Reshape attention rows `[X, S, N, H]` to `[R, E, N, H]`."""
        return array_XSNH.reshape(self._rows, -1, *array_XSNH.shape[2:])


def _zeros(array_RWX: Array, shape: tuple[int, ...], dtype: Any) -> Array:
    """Return zeros `[R, W, *shape]` that vary over manual mesh axes like the array, so that a loop can carry them."""
    rows, width = array_RWX.shape[:2]
    zero_RW = jnp.where(False, array_RWX.reshape(rows, width, -1)[:, :, 0], 0).astype(dtype)
    return jnp.broadcast_to(jnp.expand_dims(zero_RW, tuple(range(2, 2 + len(shape)))), (rows, width, *shape))

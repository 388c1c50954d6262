"""Vision tower (vision transformer): patches of images to features, each as wide as a token of the decoder.

Letters in addition to the letters of `jaxrlhf.batch`: `Q` patches of a strip, `C` numbers of a patch, `M` features of
a row.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxrlhf.batch import Array, Params
from jaxrlhf.config import Refusal
from jaxrlhf.models import linear
from jaxrlhf.models.attention.score_mod import mask_bias
from jaxrlhf.models.config import Vision
from jaxrlhf.models.execution import Execution
from jaxrlhf.models.norm import rms_norm
from jaxrlhf.models.rope import Rotation, frequencies, rotate
from jaxrlhf.models.vision.rows import ImageRows

_THETA = 10_000.0
"""Base of the rotary frequencies of rows and columns."""

_QUERIES = 512
"""Query patches whose attention is computed at once, so that no array has two dimensions of a row's length."""


class ImageFeatures(NamedTuple):
    """Image features of rows, and the tokens that they replace.

    Attributes:
      feature_RMD: Features that replace the embeddings of tokens.
      deep_RKMD: Features to add after each of the decoder's first K layers (DeepStack); None adds nothing.
      feature_RW: int32, index of the row's feature that replaces the token; -1 is text.
      mrope_position_RW3: int32, time, row and column of each token.
      block_RW: int32, number of the token's image in its sequence, from 1; 0 is text. None if images are causal too.
    """

    feature_RMD: Array
    deep_RKMD: Array | None
    feature_RW: Array
    mrope_position_RW3: Array
    block_RW: Array | None = None

    def merged(self, embed_RWD: Array) -> Array:
        """Return the embeddings, with features in place of the placeholder tokens."""
        return jnp.where((self.feature_RW >= 0)[:, :, None], self._at_tokens(self.feature_RMD), embed_RWD)

    def deeper(self, hidden_RWD: Array, layer: Array) -> Array:
        """Return the hidden states after a layer of the decoder, with that layer's DeepStack features added."""
        if self.deep_RKMD is None:
            return hidden_RWD
        layers = self.deep_RKMD.shape[1]
        own_RMD = lax.dynamic_index_in_dim(self.deep_RKMD, jnp.minimum(layer, layers - 1), axis=1, keepdims=False)
        there_RW1 = ((self.feature_RW >= 0) & (layer < layers))[:, :, None]
        return hidden_RWD + jnp.where(there_RW1, self._at_tokens(own_RMD), 0).astype(hidden_RWD.dtype)

    def part(self, start: Array, tokens: int) -> "ImageFeatures":
        """Return the part for a range of tokens of the rows."""
        feature_RC, mrope_position_RC3 = (
            lax.dynamic_slice_in_dim(array, start, tokens, axis=1)
            for array in (self.feature_RW, self.mrope_position_RW3)
        )
        return self._replace(feature_RW=feature_RC, mrope_position_RW3=mrope_position_RC3)

    def padded(self, tokens: int) -> "ImageFeatures":
        """Pad the rows with text on the right, to `tokens` tokens."""
        more = ((0, 0), (0, tokens - self.feature_RW.shape[1]))
        feature_RW = jnp.pad(self.feature_RW, more, constant_values=-1)
        return self._replace(
            feature_RW=feature_RW, mrope_position_RW3=jnp.pad(self.mrope_position_RW3, (*more, (0, 0)))
        )

    def _at_tokens(self, feature_RMD: Array) -> Array:
        return jnp.take_along_axis(feature_RMD, jnp.maximum(self.feature_RW, 0)[:, :, None], axis=1)


def run_tower(
    params: Params, vision: Vision | None, images: ImageRows | None, execution: Execution
) -> ImageFeatures | None:
    """Run the tower in a decoder's parameters over images; return None without images.

    Raises:
      Refusal: The model has no tower.
    """
    if images is None:
        return None
    if vision is None:
        raise Refusal(
            "images require a model with a vision tower; set Pretrained(..., vision=True), or remove the images"
        )
    features = image_features(params["vision"], vision, images, execution)
    return ImageFeatures(
        *features, images.feature_RW, images.mrope_position_RW3, block_RW=images.block_RW if vision.both_ways else None
    )


def image_features(
    tower: Params, vision: Vision, images: ImageRows, execution: Execution
) -> tuple[Array, Array | None]:
    """Compute `feature_RMD` and `deep_RKMD` of the images of rows.

    Attention is bidirectional, within a frame of an image or within its windows. Here `R` counts strips, not rows.
    """
    rows, strips = images.pixel_RJQC.shape[:2]
    pixel_RQC, place_RQ2, inside_RQ, window_RQ, corner_RQ4, share_RQ4 = (
        array.reshape(rows * strips, *array.shape[2:]) for array in images[:6]
    )
    pixel_RQC = execution.split_rows(pixel_RQC.astype(execution.dtype))
    hidden_RQD = linear.project(pixel_RQC, tower["patch"].reshape(pixel_RQC.shape[-1], -1))
    if "patch_bias" in tower:
        hidden_RQD += tower["patch_bias"].astype(execution.dtype)[None, None]
    if "positions" in tower:
        corner_RQ4D = tower["positions"].astype(jnp.float32)[corner_RQ4]
        hidden_RQD += (corner_RQ4D * share_RQ4[..., None]).sum(axis=2).astype(execution.dtype)
    turn = _rotation(vision, place_RQ2) if vision.rotates else None
    whole = [vision.window is None or layer in vision.full_layers for layer in range(vision.num_layers)]

    def step(hidden_RQD: Array, each: tuple[Params, Array]) -> tuple[Array, Array | None]:
        layer, sees_all = each
        segment_RQ = inside_RQ if all(whole) else jnp.where(sees_all, inside_RQ, window_RQ)
        hidden_RQD = _layer(layer, vision, hidden_RQD, segment_RQ, turn)
        return hidden_RQD, hidden_RQD if vision.deepstack else None

    body = jax.checkpoint(step, prevent_cse=False) if execution.remat else step
    hidden_RQD, after_LRQD = lax.scan(body, hidden_RQD, (tower["layers"], jnp.array(whole)))
    merged = (
        _mean(tower, vision, hidden_RQD) if vision.merger == "mean" else _merged(tower["merger"], vision, hidden_RQD)
    )
    feature_RMD = merged.reshape(rows, -1, merged.shape[-1])
    if not vision.deepstack:
        return feature_RMD, None
    deep_KRQD = after_LRQD[jnp.array(vision.deepstack)]
    deep_KRMD = lax.map(lambda each: _merged(each[0], vision, each[1]), (tower["deepstack"], deep_KRQD))
    return feature_RMD, jnp.moveaxis(deep_KRMD.reshape(len(vision.deepstack), *feature_RMD.shape), 0, 1)


def _rotation(vision: Vision, place_RQ2: Array) -> Rotation:
    """Return the rotation of patches: by row for the first half of a head's pairs, by column for the second half."""
    frequency_X, _ = frequencies(vision.head_dim // 2, _THETA, None)
    angle_RQ2X = place_RQ2[..., None].astype(jnp.float32) * jnp.asarray(frequency_X)[None, None, None]
    angle_RQX = angle_RQ2X.reshape(*place_RQ2.shape[:2], -1)
    return Rotation(jnp.cos(angle_RQX), jnp.sin(angle_RQX))


def _layer(layer: Params, vision: Vision, hidden_RQD: Array, segment_RQ: Array, turn: Rotation | None) -> Array:
    """Apply attention and the MLP, each added to the residual stream."""
    attention, mlp = layer["attention"], layer["mlp"]

    def with_bias(input_RQD: Array, room: Params, name: str, dims: int = 1) -> Array:
        output = linear.project(input_RQD, room[name], dims=dims)
        return output + room[f"{name}_bias"].astype(output.dtype)[None, None]

    input_RQD = _norm(layer, "attention_norm", vision, hidden_RQD)
    query_RQNH, key_RQNH, value_RQNH = (with_bias(input_RQD, attention, name) for name in ("query", "key", "value"))
    if turn is not None:
        query_RQNH, key_RQNH = rotate(query_RQNH, turn), rotate(key_RQNH, turn)
    mixed_RQNH = attend_both_ways(query_RQNH, key_RQNH, value_RQNH, segment_RQ)
    hidden_RQD += with_bias(mixed_RQNH, attention, "output", dims=2)
    input_RQD = _norm(layer, "mlp_norm", vision, hidden_RQD)
    inner_RQF = linear.ACTIVATIONS[vision.activation](with_bias(input_RQD, mlp, "gate" if vision.gated else "up"))
    if vision.gated:
        inner_RQF *= with_bias(input_RQD, mlp, "up")
    return hidden_RQD + with_bias(inner_RQF, mlp, "down")


def attend_both_ways(query_RQNH: Array, key_RQNH: Array, value_RQNH: Array, segment_RQ: Array) -> Array:
    """Compute the attention of patches to their whole segment, some queries at a time; softmax in float32."""
    rows, count, heads, head_dim = query_RQNH.shape
    size = min(_QUERIES, count)
    padding = -count % size

    def blocks(array_RQX: Array) -> Array:
        padded = jnp.pad(array_RQX, [(0, 0), (0, padding), *[(0, 0)] * (array_RQX.ndim - 2)])
        return jnp.moveaxis(padded.reshape(rows, -1, size, *array_RQX.shape[2:]), 1, 0)

    @jax.checkpoint
    def block(each: tuple[Array, Array]) -> Array:
        query_RBNH, own_RB = each
        score_RNBQ = jnp.einsum("RBNH,RQNH->RNBQ", query_RBNH, key_RQNH, preferred_element_type=jnp.float32)
        seen_RBQ = own_RB[:, :, None] == segment_RQ[:, None, :]
        # Padding of the last block is in segment 0, the padding of the row. Without padding in the row all scores of
        # these queries are equally low, which gives finite numbers that are dropped.
        lowest = float(jnp.finfo(jnp.float32).min)
        weight_RNBQ = jax.nn.softmax(score_RNBQ * head_dim**-0.5 + mask_bias(seen_RBQ, lowest=lowest)[:, None], axis=-1)
        return jnp.einsum("RNBQ,RQNH->RBNH", weight_RNBQ.astype(value_RQNH.dtype), value_RQNH)

    mixed = lax.map(block, (blocks(query_RQNH), blocks(segment_RQ)))
    return jnp.moveaxis(mixed, 0, 1).reshape(rows, -1, heads, head_dim)[:, :count]


def _merged(merger: Params, vision: Vision, hidden_RQD: Array) -> Array:
    """Merge each square of patches into a feature by an MLP; its norm applies before or after patches are joined."""
    joined = (hidden_RQD.shape[0], -1, vision.merged_size)
    behind = merger["norm"].shape[-1] == vision.merged_size != vision.hidden_size
    normed = _norm(merger, "norm", vision, hidden_RQD.reshape(joined) if behind else hidden_RQD)
    input_RME = normed.reshape(joined)
    inner_RME = linear.project(input_RME, merger["inner"]) + merger["inner_bias"].astype(input_RME.dtype)[None, None]
    inner_RME = jax.nn.gelu(inner_RME, approximate=False)
    return linear.project(inner_RME, merger["outer"]) + merger["outer_bias"].astype(input_RME.dtype)[None, None]


def _mean(tower: Params, vision: Vision, hidden_RQD: Array) -> Array:
    """Merge each square of patches into a feature by their mean, a norm and a projection."""
    rows, _, width = hidden_RQD.shape
    normed_RQD = _norm(tower, "final_norm", vision, hidden_RQD)
    mean_RMD = normed_RQD.reshape(rows, -1, vision.merge**2, width).mean(axis=2)
    merger = tower["merger"]
    normed_RMD = rms_norm(mean_RMD, merger["norm"].astype(jnp.float32) + 1.0, vision.eps)
    return linear.project(normed_RMD, merger["projection"])


def _norm(params: Params, name: str, vision: Vision, input_D: Array) -> Array:
    """Normalize the last dimension, in float32."""
    scale_D = params[name].astype(jnp.float32)
    if vision.norm == "rms":
        return rms_norm(input_D, scale_D, vision.eps)
    wide_D, shape = input_D.astype(jnp.float32), (1,) * (input_D.ndim - 1) + (-1,)
    mean_1 = wide_D.mean(axis=-1, keepdims=True)
    variance_1 = jnp.square(wide_D - mean_1).mean(axis=-1, keepdims=True)
    normed_D = (wide_D - mean_1) * lax.rsqrt(variance_1 + vision.eps)
    bias_D = params[f"{name}_bias"].astype(jnp.float32)
    return (normed_D * scale_D.reshape(shape) + bias_D.reshape(shape)).astype(input_D.dtype)

"""Quantized tensors of safetensors files, dequantized to bfloat16 tensors when they are read.

MXFP4 (Open Compute Project, Microscaling Formats 1.0): `NAME_blocks` holds two 4-bit floats in a byte; 32 floats share
the exponent in `NAME_scales`. The file has outputs before inputs, the dequantized tensor has inputs before outputs.

FP8: `NAME` is float8_e4m3fn, and `NAME_scale_inv` holds a factor for each block of `NAME`, as in DeepSeek-V3
(arXiv:2412.19437, section 3.3).
"""

import json
import math
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

BLOCKS, SCALES, SCALE_INV = "_blocks", "_scales", "_scale_inv"
_ACTIVATION = ".activation_scale"
FP8 = "F8_E4M3"

_FP4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
"""Values of the sixteen codes: a sign, two bits of exponent, one of mantissa."""

_EXPONENT_BIAS = 127


def plain_names(names: dict[str, str], kind: Callable[[str], str]) -> dict[str, str]:
    """Map names of dequantized tensors to names in the files of the tensors that hold their numbers.

    Args:
      names: Names in the files, by our names.
      kind: Function from a name in the files to its dtype there.
    """
    plain = {}
    for ours, theirs in names.items():
        stem = ours.removesuffix(BLOCKS).removesuffix(SCALES)
        weight = ours.removesuffix(SCALE_INV) if ours.endswith(SCALE_INV) else ours.replace(_ACTIVATION, ".weight")
        # Skip factors: those of weights are read with the weights, those of activations are for products in float8.
        factors = weight != ours and weight in names and kind(names[weight]) == FP8
        if stem == ours and not factors:
            plain[ours] = theirs
        elif ours.endswith(BLOCKS):
            plain[stem] = theirs
    return plain


class Mxfp4:
    """MXFP4 tensor of matrices `[E, inputs, outputs]`, dequantized when it is sliced.

    Args:
      blocks: Tensor `[E, outputs, inputs / 32, 16]`, read when it is sliced.
      scales: Tensor `[E, outputs, inputs / 32]`.
    """

    def __init__(self, blocks: Any, scales: Any) -> None:
        self._blocks, self._scales = blocks, scales

    def get_dtype(self) -> str:
        """Return the dtype of the slices, as safetensors names it."""
        return "BF16"

    def get_shape(self) -> list[int]:
        """Return the shape of the dequantized tensor."""
        count, outputs, groups, size = self._blocks.get_shape()
        return [count, groups * size * 2, outputs]

    def __getitem__(self, at: tuple[slice, ...]) -> np.ndarray:
        first, inputs, outputs = (*at, slice(None), slice(None))[:3]
        code = self._blocks[first, outputs]
        exponent = self._scales[first, outputs].astype(np.int32) - _EXPONENT_BIAS
        value = np.stack([_FP4[code & 15], _FP4[code >> 4]], axis=-1).reshape(*code.shape[:-1], -1)
        wide = np.ldexp(value, exponent[..., None]).reshape(*code.shape[:2], -1)
        return np.swapaxes(wide, 1, 2)[:, inputs].astype(ml_dtypes.bfloat16)


class Fp8:
    """FP8 tensor, dequantized when it is sliced.

    Args:
      tensor: Float8 numbers, mapped from the file.
      scale: Factors of blocks, or a single factor.
    """

    def __init__(self, tensor: np.ndarray, scale: np.ndarray) -> None:
        self._tensor, self._scale = tensor, scale.astype(np.float32)

    def get_dtype(self) -> str:
        """Return the dtype of the slices, as safetensors names it."""
        return "BF16"

    def get_shape(self) -> list[int]:
        """Return the shape of the dequantized tensor."""
        return list(self._tensor.shape)

    def __getitem__(self, at: tuple[slice, ...]) -> np.ndarray:
        at = tuple(slice(*part.indices(size)) for part, size in zip(at, self._tensor.shape, strict=False))
        wide = np.asarray(self._tensor[at]).astype(np.float32)
        factor = self._scale.reshape((1,) * (wide.ndim - self._scale.ndim) + self._scale.shape)
        for axis, (blocks, size) in enumerate(zip(factor.shape, self._tensor.shape, strict=True)):
            # Block sizes are powers of two; the last block may be shorter.
            block = 1 << (math.ceil(size / blocks) - 1).bit_length() if blocks > 1 else size
            part = at[axis] if axis < len(at) else slice(0, size)
            factor = np.take(factor, np.arange(part.start, part.stop) // block, axis=axis)
        return (wide * factor).astype(ml_dtypes.bfloat16)


def mapped(file: Path, name: str) -> np.ndarray:
    """Map a float8 tensor of a safetensors file, because the safetensors reader has no numpy dtype for float8."""
    header, data = _header(file, file.stat().st_mtime_ns)
    begin, _ = header[name]["data_offsets"]
    return np.memmap(file, ml_dtypes.float8_e4m3fn, "r", data + begin, tuple(header[name]["shape"]))


@cache
def _header(file: Path, written_ns: int) -> tuple[dict[str, dict[str, Any]], int]:
    """Read the header of a safetensors file, and the offset of its data; cached until the file changes."""
    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        return json.loads(opened.read(length)), 8 + length

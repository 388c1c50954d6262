"""Quantised tensors of safetensors files, read as the bfloat16 tensors that they stand for.

MXFP4 (Open Compute Project, Microscaling Formats 1.0): `NAME_blocks` holds two 4-bit floats in a byte, 32 of which
share the exponent in `NAME_scales`. The file has outputs before inputs, and the tensor that it stands for after them.

FP8: `NAME` is float8_e4m3fn, and `NAME_scale_inv` a factor for each block of it, as DeepSeek-V3 has them
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
    """Names of tensors, quantised ones by what they stand for, with the tensor in the file that holds its numbers.

    Args:
      names: Names in the files, by those that we use.
      kind: Function of a name in the files that returns its dtype there.
    """
    plain = {}
    for ours, theirs in names.items():
        stem = ours.removesuffix(BLOCKS).removesuffix(SCALES)
        weight = ours.removesuffix(SCALE_INV) if ours.endswith(SCALE_INV) else ours.replace(_ACTIVATION, ".weight")
        # Factors of activations are for products in float8.
        factors = weight != ours and weight in names and kind(names[weight]) == FP8
        if stem == ours and not factors:
            plain[ours] = theirs
        elif ours.endswith(BLOCKS):
            plain[stem] = theirs
    return plain


class Mxfp4:
    """A tensor of matrices `[E, inputs, outputs]`, of which slices are dequantised.

    Args:
      blocks: Tensor `[E, outputs, inputs / 32, 16]`, read where it is sliced.
      scales: Tensor `[E, outputs, inputs / 32]`.
    """

    def __init__(self, blocks: Any, scales: Any) -> None:
        self._blocks, self._scales = blocks, scales

    def get_dtype(self) -> str:
        """Dtype of what is read."""
        return "BF16"

    def get_shape(self) -> list[int]:
        """Shape of what is read."""
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
    """A tensor, of which slices are dequantised.

    Args:
      tensor: Numbers in float8, mapped from the file.
      scale: Factors of blocks, or one.
    """

    def __init__(self, tensor: np.ndarray, scale: np.ndarray) -> None:
        self._tensor, self._scale = tensor, scale.astype(np.float32)

    def get_dtype(self) -> str:
        """Dtype of what is read."""
        return "BF16"

    def get_shape(self) -> list[int]:
        """Shape of what is read."""
        return list(self._tensor.shape)

    def __getitem__(self, at: tuple[slice, ...]) -> np.ndarray:
        at = tuple(slice(*part.indices(size)) for part, size in zip(at, self._tensor.shape, strict=False))
        wide = np.asarray(self._tensor[at]).astype(np.float32)
        factor = self._scale.reshape((1,) * (wide.ndim - self._scale.ndim) + self._scale.shape)
        for axis, (blocks, size) in enumerate(zip(factor.shape, self._tensor.shape, strict=True)):
            # A power of two, of which the last may be cut short.
            block = 1 << (math.ceil(size / blocks) - 1).bit_length() if blocks > 1 else size
            part = at[axis] if axis < len(at) else slice(0, size)
            factor = np.take(factor, np.arange(part.start, part.stop) // block, axis=axis)
        return (wide * factor).astype(ml_dtypes.bfloat16)


def mapped(file: Path, name: str) -> np.ndarray:
    """A float8 tensor of a safetensors file, whose own reader has no numpy dtype for it."""
    header, data = _header(file, file.stat().st_mtime_ns)
    begin, _ = header[name]["data_offsets"]
    return np.memmap(file, ml_dtypes.float8_e4m3fn, "r", data + begin, tuple(header[name]["shape"]))


@cache
def _header(file: Path, written_ns: int) -> tuple[dict[str, dict[str, Any]], int]:
    """Header of a safetensors file, read once as long as that is not written anew, and where its data begin."""
    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        return json.loads(opened.read(length)), 8 + length

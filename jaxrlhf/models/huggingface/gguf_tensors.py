"""Tensors of a GGUF file by their Hugging Face names, dequantized when they are sliced."""

from collections.abc import KeysView
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from jaxrlhf.models.huggingface.config import read_config
from jaxrlhf.models.huggingface.families import stored_tensors, tensor_shapes
from jaxrlhf.models.huggingface.gguf_header import Header, read_header

_READ_ELSEWHERE = {"rope_freqs.weight"}
"""Tensors whose numbers are read into config.json."""
_EXACT = {"F16": np.dtype(np.float16), "BF16": np.dtype(ml_dtypes.bfloat16)}
"""Types of weights that are read unchanged; all other types are dequantized to float32."""


class GgufTensors:
    """Tensors of a GGUF file, with the interface of `safetensors.safe_open`.

    Args:
      link: Link to the file, in the directory that describes it.
    """

    def __init__(self, link: Path) -> None:
        import gguf

        self._header: Header = read_header(link.resolve())
        self._config = read_config(link.parent)
        architectures = {name: number for number, name in gguf.MODEL_ARCH_NAMES.items()}
        table = gguf.get_tensor_name_map(architectures[self._header.architecture], self._config.num_layers)
        ours: dict[str, str] = {}
        for name in tensor_shapes(self._config, "lm", stored_tensors(self._config, "lm")):
            theirs = table.get_name(name, try_suffixes=(".weight", ".bias"))
            if theirs is not None and theirs in self._header.tensors:
                ours[name] = theirs
        others = self._header.tensors.keys() - set(ours.values()) - _READ_ELSEWHERE
        self._names = ours | {name: name for name in sorted(others)}

    def __enter__(self) -> "GgufTensors":
        return self

    def __exit__(self, *_: object) -> None:
        """Do nothing: the file is mapped, not held open."""

    def keys(self) -> KeysView[str]:
        """Return the Hugging Face names of the tensors; a tensor without such a name keeps its GGUF name."""
        return self._names.keys()

    def get_slice(self, name: str) -> "GgufTensor":
        """Return a tensor that is read when it is sliced."""
        theirs, llama = self._names[name], self._header.architecture == "llama"
        heads = {"attn_q": self._config.num_heads, "attn_k": self._config.num_kv_heads} if llama else {}
        return GgufTensor(
            self._header.tensors[theirs],
            heads=next((count for part, count in heads.items() if f".{part}." in theirs), None),
            offset=1.0 if self._config.unit_offset and theirs.endswith("norm.weight") else 0.0,
        )


class GgufTensor:
    """Tensor of a GGUF file.

    Args:
      tensor: Tensor of the package `gguf`.
      heads: Number of heads whose rows llama.cpp reordered, None for other tensors. In llama.cpp the two rows of a
        rotated pair are adjacent; in Hugging Face the first rows of all pairs come before the second rows.
      offset: Number that llama.cpp added to the whole tensor.
    """

    def __init__(self, tensor: Any, *, heads: int | None, offset: float) -> None:
        self._tensor, self._heads, self._offset = tensor, heads, offset

    def get_dtype(self) -> str:
        """Return the dtype of the slices, as safetensors names it."""
        kind = self._tensor.tensor_type.name
        return kind if kind in _EXACT and not self._offset else "F32"

    def get_shape(self) -> list[int]:
        """Return the shape of the dequantized tensor."""
        return [int(size) for size in reversed(self._tensor.shape)]

    def __getitem__(self, at: slice | tuple[slice, ...]) -> np.ndarray:
        import gguf

        at = at if isinstance(at, tuple) else (at,)
        rows, rest = (slice(None), at) if self._heads else (at[0], (slice(None), *at[1:]))
        whole = gguf.dequantize(self._tensor.data[rows], self._tensor.tensor_type).astype(np.float32, copy=False)
        if self._heads:
            pairs = whole.reshape(self._heads, -1, 2, *whole.shape[1:])
            whole = pairs.swapaxes(1, 2).reshape(whole.shape)
        kind = _EXACT.get(self.get_dtype(), np.dtype(np.float32))
        return (whole[rest] - np.float32(self._offset)).astype(kind)

"""Writer of safetensors files from tensors that arrive one by one, in any order, so that none waits in memory."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np

from jaxrlhf.models.huggingface.tensor_files import DTYPES, INDEX, SINGLE

_UNFINISHED = ".unfinished"
_ALIGNMENT = 8


class _TensorPlace(NamedTuple):
    """File of a tensor, and the offset of its first byte."""

    file: str
    start: int


class TensorWriter:
    """Writer of a checkpoint's tensors: one file, or several files with an index.

    Headers are written first, and reserve space for every tensor. Files get their names in `close`, so an interrupted
    export leaves nothing that looks like a checkpoint.

    Args:
      tensors: Shape and dtype of each tensor, in the order in which tensors are assigned to files.
      max_file_bytes: Size limit of a file; only a file with a single tensor may exceed the limit.

    Source: https://github.com/huggingface/safetensors, section Format.
    """

    def __init__(self, directory: Path, tensors: Mapping[str, jax.ShapeDtypeStruct], *, max_file_bytes: int) -> None:
        self._directory, self._tensors = directory, dict(tensors)
        self._places: dict[str, _TensorPlace] = {}
        self._unwritten = {name: tensor.size for name, tensor in tensors.items()}
        files = self._shared_out(max_file_bytes)
        self._files = [
            SINGLE if len(files) == 1 else f"model-{number:05d}-of-{len(files):05d}.safetensors"
            for number in range(1, len(files) + 1)
        ]
        for file, names in zip(self._files, files, strict=True):
            self._begin(file, names)

    def write(
        self,
        name: str,
        rows: np.ndarray,
        *,
        start: int | None,
        place: Callable[[np.ndarray], np.ndarray],
    ) -> None:
        """Write a tensor, or a part of it, into its file.

        Args:
          start: First row to write; None if the part is not whole rows.
          place: Function from the tensor to a view of the part to write.
        """
        wanted, lies = self._tensors[name], self._places[name]
        assert rows.dtype == wanted.dtype, name
        path = self._directory / (lies.file + _UNFINISHED)
        if start is None:
            there = place(np.memmap(path, wanted.dtype, "r+", lies.start, wanted.shape))
            there[...] = rows.reshape(there.shape)
        else:
            assert rows.shape[1:] == wanted.shape[1:], name
            with path.open("r+b") as file:
                file.seek(lies.start + start * (rows.nbytes // len(rows)))
                file.write(np.ascontiguousarray(rows).reshape(-1).view(np.uint8).data)
        self._unwritten[name] -= rows.size

    def close(self) -> None:
        """Give the files their names, and write the index if there are several files."""
        missing = sorted(name for name, rows in self._unwritten.items() if rows)
        assert not missing, f"tensors are incomplete: {missing}"
        for file in self._files:
            (self._directory / (file + _UNFINISHED)).rename(self._directory / file)
        if len(self._files) > 1:
            parameters = sum(tensor.size for tensor in self._tensors.values())
            counted = {"total_parameters": parameters, "total_size": sum(map(self._num_bytes, self._tensors))}
            index = {"metadata": counted, "weight_map": {name: place.file for name, place in self._places.items()}}
            (self._directory / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")

    def _num_bytes(self, name: str) -> int:
        return self._tensors[name].size * self._tensors[name].dtype.itemsize

    def _shared_out(self, max_file_bytes: int) -> list[list[str]]:
        """Assign the tensors to files."""
        files: list[list[str]] = [[]]
        room = max_file_bytes
        for name in self._tensors:
            if files[-1] and self._num_bytes(name) > room:
                files.append([])
                room = max_file_bytes
            files[-1].append(name)
            room -= self._num_bytes(name)
        return files

    def _begin(self, file: str, names: list[str]) -> None:
        """Write the header of a file, and extend the file to its final size."""
        header: dict[str, dict] = {"__metadata__": {"format": "pt"}}
        end = 0
        kinds = list(DTYPES)
        # Wider dtypes first, so that each tensor starts at a multiple of its dtype's width.
        for name in sorted(names, key=lambda name: (kinds.index(self._tensors[name].dtype.name), name)):
            start, end = end, end + self._num_bytes(name)
            tensor = self._tensors[name]
            kind, shape = DTYPES[tensor.dtype.name], list(tensor.shape)
            header[name] = {"dtype": kind, "shape": shape, "data_offsets": [start, end]}
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % _ALIGNMENT)
        data = _ALIGNMENT + len(text)
        for name in names:
            self._places[name] = _TensorPlace(file, data + header[name]["data_offsets"][0])
        with (self._directory / (file + _UNFINISHED)).open("wb") as opened:
            opened.write(len(text).to_bytes(_ALIGNMENT, "little") + text)
            opened.truncate(data + end)

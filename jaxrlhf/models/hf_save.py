"""Parameters out to a Hugging Face directory that transformers loads with the same logits."""

import json
import math
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxrlhf.architecture import Head, ModelConfig
from jaxrlhf.batch import Params
from jaxrlhf.models.families import FAMILIES, Stored
from jaxrlhf.models.hf_config import read_fields, resolve, write_fields
from jaxrlhf.models.parameters import declare, path_name
from jaxrlhf.models.tensor_files import INDEX, SINGLE


class _Tensor(NamedTuple):
    """A tensor to write, still on its devices; `layer` picks it from a stacked parameter."""

    stored: Stored
    array: jax.Array
    layer: int | None
    dtype: np.dtype

    @property
    def num_bytes(self) -> int:
        shape = self.array.shape if self.layer is None else self.array.shape[1:]
        return math.prod(shape) * self.dtype.itemsize

    def fetch(self) -> np.ndarray:
        """The tensor on the host in the file's order of dimensions."""
        block = _to_host(self.array if self.layer is None else self.array[self.layer])
        ordered = block.transpose([self.stored.dims.index(letter) for letter in self.stored.letters])
        return np.ascontiguousarray(ordered.reshape(self.stored.shape(block.shape)).astype(self.dtype))


def save_params(
    params: Params,
    config: ModelConfig,
    directory: str | Path,
    *,
    dtype: Any = jnp.float32,
    tokenizer: Any = None,
    source: str | Path | None = None,
    max_shard_bytes: int = 5_000_000_000,
) -> None:
    """Write config.json and safetensors, sharded behind an index when they are larger than one file.

    A language model becomes a `ForCausalLM` checkpoint; a value or score head becomes
    `ForSequenceClassification` with one label. At most one file's tensors are on the host at
    a time. config.json comes last, so an interrupted export does not look like a model. With
    several processes all of them call this and the first one writes.

    Args:
      dtype: Of the tensors in the files.
      tokenizer: Saved beside the model if given.
      source: Checkpoint that the model came from: its config.json and generation_config.json are kept.

    Raises:
      ValueError: The directory already holds safetensors.
    """
    directory = Path(directory)
    if list(directory.glob("*.safetensors")):
        raise ValueError(f"{directory} already holds safetensors, which might be mixed up; export to a new directory")
    directory.mkdir(parents=True, exist_ok=True)
    dtype = np.dtype(dtype)
    head = _head_of(params)
    _write_tensors(_split(_tensors(params, config, head, dtype), max_shard_bytes), directory)
    if jax.process_index() == 0:
        if tokenizer is not None:
            tokenizer.save_pretrained(directory)
        _write_config(directory, _fields(config, head, dtype, tokenizer, source), source)


def save_description(
    config: ModelConfig, directory: str | Path, *, tokenizer: Any = None, source: str | Path | None = None
) -> None:
    """Write everything of a `ForCausalLM` checkpoint but its weights: config.json and the tokenizer."""
    if jax.process_index() == 0:
        directory = Path(directory)
        directory.mkdir(parents=True, exist_ok=True)
        if tokenizer is not None:
            tokenizer.save_pretrained(directory)
        _write_config(directory, _fields(config, "lm", np.dtype(np.float32), tokenizer, source), source)


def _head_of(params: Params) -> Head:
    return "score" if "head" in params and params["head"].ndim == 1 else "lm"


def _tensors(params: Params, config: ModelConfig, head: Head, dtype: np.dtype) -> dict[str, _Tensor]:
    """Every tensor by its name in the file."""
    arrays = {path_name(path): leaf for path, leaf in jax.tree.leaves_with_path(params)}
    tensors = {}
    for path, param in jax.tree.leaves_with_path(declare(config, head)):
        stored = FAMILIES[config.family].stored(config, head)[path_name(path)]
        for layer, name in enumerate(stored.names(config.num_layers)):
            tensors[name] = _Tensor(stored, arrays[path_name(path)], layer if param.stacked else None, dtype)
    return tensors


def _to_host(array: jax.Array) -> np.ndarray:
    if array.is_fully_addressable:
        return np.asarray(array)
    from jax.experimental.multihost_utils import process_allgather

    return np.asarray(process_allgather(array, tiled=True))


def _split(tensors: dict[str, _Tensor], max_bytes: int) -> list[dict[str, _Tensor]]:
    """Into files, in order; a file exceeds `max_bytes` only if one tensor does."""
    files: list[dict[str, _Tensor]] = [{}]
    room = max_bytes
    for name, tensor in tensors.items():
        if files[-1] and tensor.num_bytes > room:
            files.append({})
            room = max_bytes
        files[-1][name] = tensor
        room -= tensor.num_bytes
    return files


def _write_tensors(files: list[dict[str, _Tensor]], directory: Path) -> None:
    from safetensors.numpy import save_file

    weight_map: dict[str, str] = {}
    for number, tensors in enumerate(files, start=1):
        file = SINGLE if len(files) == 1 else f"model-{number:05d}-of-{len(files):05d}.safetensors"
        weight_map |= dict.fromkeys(tensors, file)
        held = {name: tensor.fetch() for name, tensor in tensors.items()}
        if jax.process_index() == 0:
            save_file(held, directory / file, metadata={"format": "pt"})
    if len(files) > 1 and jax.process_index() == 0:
        total = sum(tensor.num_bytes for tensors in files for tensor in tensors.values())
        _write_json(directory / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})


def _fields(config: ModelConfig, head: Head, dtype: np.dtype, tokenizer: Any, source: str | Path | None) -> dict:
    """config.json: the source's own fields where there is a source, else built from the shape."""
    fields = write_fields(config, head, dtype=dtype.name)
    if source is not None:
        kept = read_fields(source)
        written = {name: fields[name] for name in ("architectures", "id2label", "label2id") if name in fields}
        # Older files call it torch_dtype.
        kind = "torch_dtype" if "torch_dtype" in kept else "dtype"
        return kept | written | {kind: dtype.name}
    if tokenizer is not None:
        ids = {name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
        fields |= {name: value for name, value in ids.items() if value is not None}
    return fields


def _write_config(directory: Path, fields: dict, source: str | Path | None) -> None:
    if source is not None:
        generation = resolve(source) / "generation_config.json"
        if generation.is_file():
            shutil.copyfile(generation, directory / generation.name)
    _write_json(directory / "config.json", fields)


def _write_json(file: Path, content: dict) -> None:
    file.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n")

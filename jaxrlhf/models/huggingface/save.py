"""Export of parameters to a Hugging Face directory that transformers loads with the same logits."""

import json
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxrlhf.batch import Array, Params
from jaxrlhf.config import Refusal
from jaxrlhf.config.cli.outputs import check_writable
from jaxrlhf.config.refusal import read_object
from jaxrlhf.models.config import Head, ModelConfig
from jaxrlhf.models.huggingface.config import (
    AGAIN,
    head_fields,
    read_fields,
    read_stop_tokens,
    token_ids,
    write_fields,
)
from jaxrlhf.models.huggingface.families import FAMILIES, StoredTensor, published_name, stored_tensors, tensor_shapes
from jaxrlhf.models.huggingface.hub import HUB_FILES, resolve
from jaxrlhf.models.huggingface.load import Progress
from jaxrlhf.models.huggingface.tensor_files import INDEX, TensorFiles
from jaxrlhf.models.huggingface.tensor_writer import TensorWriter
from jaxrlhf.models.parameters import Param, declare, path_name

_KEPT = ("generation_config.json", "*processor*.json")
"""Files of a source that are copied unchanged even if another tokenizer is saved."""

_FILE_BYTES = 5_000_000_000
"""Default size limit of a file with tensors."""


def save_params(
    params: Params,
    config: ModelConfig,
    directory: str | Path,
    *,
    dtype: Any = None,
    source: str | Path | None = None,
    **how: Any,
) -> None:
    """Write config.json and safetensors, sharded with an index if they are larger than one file.

    Args:
      dtype: Dtype of the tensors in the files; None is each tensor's dtype in the source, or float32 without a source.
      how: Further arguments of `save_each`.
    """
    if dtype is None:
        dtype = jnp.float32 if source is None else read_dtypes(source, vision=config.vision is not None)
    arrays = ((path_name(path), leaf) for path, leaf in jax.tree.leaves_with_path(params))
    head: Head = "score" if "head" in params and params["head"].ndim == 1 else "lm"
    save_each(arrays, config, head, directory, dtype=dtype, source=source, **how)


def save_each(
    arrays: Iterable[tuple[str, jax.Array]],
    config: ModelConfig,
    head: Head,
    directory: str | Path,
    *,
    dtype: Any,
    tokenizer: Any = None,
    source: str | Path | None = None,
    max_shard_bytes: int = _FILE_BYTES,
    progress: Progress = lambda done, total: None,
) -> None:
    """Write a checkpoint from parameters that arrive one by one, each with its path.

    A language model becomes a `ForCausalLM` checkpoint; a value or score head becomes `ForSequenceClassification` with
    one label. One tensor is on the host at a time. config.json is written last, so an interrupted export does not look
    like a model. With several processes, all processes call this function and the first process writes.

    Args:
      arrays: Every parameter of `declare(config, head)`, in any order.
      dtype: Dtype of the tensors in the files: one for all, or a mapping by tensor name with float32 as the default.
        With a mapping, config.json keeps the dtype of the source's config.json.
      tokenizer: Tokenizer to save with the model; None copies the tokenizer files of the source.
      source: Checkpoint that the model came from; its config.json and generation_config.json are kept.
      max_shard_bytes: Size limit of a file; only a file with a single tensor may exceed the limit.
      progress: Callback, called after each tensor.

    Raises:
      Refusal: The directory already holds safetensors, or a weight is out of the dtype's range.
    """
    directory = Path(directory)
    if list(directory.glob("*.safetensors")):
        raise Refusal(f"{directory} already contains safetensors files; export to a new directory")
    shapes = _shapes(config, head)
    dtypes = dtype if isinstance(dtype, Mapping) else dict.fromkeys(shapes, dtype)
    tensors = {name: jax.ShapeDtypeStruct(shape, dtypes.get(name, "float32")) for name, shape in shapes.items()}
    writer = None
    if jax.process_index() == 0:
        directory.mkdir(parents=True, exist_ok=True)
        named = {published_name(config, name): tensor for name, tensor in tensors.items()}
        writer = TensorWriter(directory, named, max_file_bytes=max_shard_bytes)
    total = sum(tensor.size * tensor.dtype.itemsize for tensor in tensors.values())
    done = 0
    for part in _fetched(arrays, config, head, tensors):
        if writer is not None:
            writer.write(published_name(config, part.name), part.block, start=part.start, place=part.place)
        done += part.block.nbytes
        progress(done, total)
    if writer is not None:
        writer.close()
        one = None if isinstance(dtype, Mapping) else np.dtype(dtype).name
        _describe(directory, _fields(config, head, one, tokenizer, source), tokenizer, source)


def named_tensors(
    arrays: Iterable[tuple[str, jax.Array]], config: ModelConfig, head: Head, *, dtype: Any
) -> Iterator[tuple[str, np.ndarray]]:
    """Yield the tensors of a checkpoint by name, each as soon as it is complete; `arrays` is as in `save_each`."""
    shapes = _shapes(config, head)
    tensors = {name: jax.ShapeDtypeStruct(shape, dtype) for name, shape in shapes.items()}
    incomplete: dict[str, tuple[np.ndarray, int]] = {}
    for part in _fetched(arrays, config, head, tensors):
        name, block = part.name, part.block
        if block.shape == tensors[name].shape:
            yield published_name(config, name), block
            continue
        tensor, left = incomplete.get(name) or (np.empty(tensors[name].shape, block.dtype), tensors[name].size)
        there = part.place(tensor)
        there[...] = block.reshape(there.shape)
        incomplete[name] = tensor, left - block.size
        if left == block.size:
            yield published_name(config, name), incomplete.pop(name)[0]


def _shapes(config: ModelConfig, head: Head) -> dict[str, tuple[int, ...]]:
    """Return the shape of every tensor of a checkpoint by name, copies of tensors included."""
    shapes = tensor_shapes(config, head, stored_tensors(config, head))
    return shapes | {copy: shapes[name] for copy, name in FAMILIES[config.family].copies(config, head).items()}


def save_tensors(
    tensors: Iterable[tuple[str, np.ndarray]], wanted: Mapping[str, jax.ShapeDtypeStruct], directory: Path
) -> None:
    """Write some of the tensors of a checkpoint to a new directory, in files like those of `save_each`.

    Args:
      tensors: Tensors by name, as from `named_tensors`.
      wanted: Shape and dtype of each tensor to write.
    """
    directory.mkdir(parents=True)
    writer = TensorWriter(directory, wanted, max_file_bytes=_FILE_BYTES)
    for name, tensor in tensors:
        if name in wanted:
            writer.write(name, tensor, start=0, place=lambda whole: whole)
    writer.close()


class _TensorPart(NamedTuple):
    """Part of a tensor that one parameter fills, on the host.

    Attributes:
      start: First row of the part in the tensor; None if the part is not whole rows.
      place: Function from the tensor to a view of the part.
    """

    name: str
    block: np.ndarray
    start: int | None
    place: Callable[[np.ndarray], np.ndarray]


def _fetched(
    arrays: Iterable[tuple[str, jax.Array]],
    config: ModelConfig,
    head: Head,
    tensors: Mapping[str, jax.ShapeDtypeStruct],
) -> Iterator[_TensorPart]:
    """Yield parts of tensors, one after another."""
    declared = {path_name(path): param for path, param in jax.tree.leaves_with_path(declare(config, head))}
    stored, copies = stored_tensors(config, head), FAMILIES[config.family].copies(config, head)
    for path, array in arrays:
        lies, param = stored[path], declared[path]
        stacked = lies.stacked(param.shape)
        place = partial(lies.place, shape=param.unpadded[len(stacked) :])
        for at in np.ndindex(stacked):
            block = _fetch(array, lies, param, at, tensors[lies.named(at)].dtype)
            yield _TensorPart(lies.named(at), block, lies.first_row, place)
            for copy in (copy for copy, name in copies.items() if name == lies.named(at)):
                yield _TensorPart(copy, block.astype(tensors[copy].dtype, copy=False), lies.first_row, place)


def read_dtypes(path: str | Path, *, vision: bool = False) -> dict[str, str]:
    """Read the dtype of each tensor of a Hugging Face checkpoint, by tensor name.

    Args:
      vision: Include the tensors of the vision tower.
    """
    with TensorFiles(resolve(path, weights=True), vision=vision) as files:
        return files.dtypes()


def save_description(
    config: ModelConfig, directory: str | Path, *, tokenizer: Any = None, source: str | Path | None = None
) -> None:
    """Write a `ForCausalLM` checkpoint without its weights: config.json and the tokenizer."""
    if jax.process_index() == 0:
        directory = Path(directory)
        directory.mkdir(parents=True, exist_ok=True)
        _describe(directory, _fields(config, "lm", "float32", tokenizer, source), tokenizer, source)


def _fetch(array: jax.Array, stored: StoredTensor, param: Param, at: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Fetch a tensor to the host, in the layout of the file."""
    order = tuple(stored.dims.index(letter) for letter in stored.letters)
    tensor = _taken(array, at, order, dtype)
    if not tensor.is_fully_addressable:
        from jax.experimental.multihost_utils import process_allgather

        tensor = process_allgather(tensor, tiled=True)
    shape = param.unpadded[len(at) :]
    block = np.asarray(tensor)[tuple(slice(shape[place]) for place in order)].reshape(stored.shape(shape))
    if dtype == np.float16 and not np.isfinite(block).all():
        raise Refusal(
            f"tensor {stored.named(at)!r} has values beyond the maximum 65504 of {dtype}; export as bfloat16 or float32"
        )
    return block


@partial(jax.jit, static_argnums=(2, 3))
def _taken(array: Array, at: tuple[Any, ...], order: tuple[int, ...], dtype: np.dtype) -> Array:
    """Take one tensor out of a parameter, with its dimensions in the file's order."""
    for place in at:
        array = lax.dynamic_index_in_dim(array, place, keepdims=False)
    return array.transpose(order).astype(dtype)


def _fields(config: ModelConfig, head: Head, dtype: str | None, tokenizer: Any, source: str | Path | None) -> dict:
    """Return the fields of config.json: the source's fields if there is a source, else fields built from the shape.

    Args:
      dtype: Dtype of all tensors; None if tensors differ, or may differ.
    """
    if source is not None:
        given = read_fields(source, whole=config.vision is not None)
        # Weights are written without quantization, and the code that `auto_map` names is not copied.
        kept = {name: value for name, value in given.items() if name not in ("quantization_config", "auto_map")}
        # Older files call it torch_dtype.
        kinds = {"torch_dtype", "dtype"} & kept.keys() or {"dtype"}
        fields = kept | head_fields(config, head) | ({} if dtype is None else dict.fromkeys(kinds, dtype))
        if config.mtp and head == "lm" and (layer := FAMILIES[config.family].mtp) is not None:
            fields[layer.config_field] = 1  # files of Qwen3-Next do not say so
    else:
        fields = write_fields(config, head, dtype=dtype or "float32")
        for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
            if tokenizer is not None and getattr(tokenizer, name) is not None:
                fields[name] = getattr(tokenizer, name)
    if head != "lm" and fields.get("pad_token_id") in token_ids(fields.get("eos_token_id"), Path("config.json")):
        # Otherwise transformers would take the end token for padding, and score the token before it.
        fields["pad_token_id"] = None
    return fields


def _describe(directory: Path, fields: dict, tokenizer: Any, source: str | Path | None) -> None:
    """Write all files of a checkpoint except its weights."""
    if source is not None:
        copy_description(resolve(source), directory, HUB_FILES if tokenizer is None else _KEPT)
    if tokenizer is not None:
        save_tokenizer(tokenizer, directory)
        if source is not None:
            _stop_at(tokenizer.eos_token_id, directory, source)
    (directory / "config.json").write_text(json.dumps(fields, indent=2, sort_keys=True) + "\n")


def _stop_at(end: int, directory: Path, source: str | Path) -> None:
    """Add the end token of another tokenizer to the source's stop tokens, in generation_config.json."""
    stops, file = read_stop_tokens(source), directory / "generation_config.json"
    if end not in stops:
        given = read_object(file, AGAIN) if file.is_file() else {}
        file.write_text(json.dumps(given | {"eos_token_id": [*stops, end]}, indent=2) + "\n")


def copy_description(source: Path, directory: Path, patterns: Sequence[str] = HUB_FILES) -> None:
    """Copy all files of a checkpoint but its weights; config.json last, because it makes a directory look complete.

    Names of Python code (`auto_map`), which is not copied, are left out.
    """
    files = {file for pattern in patterns for file in source.glob(pattern)} - {source / INDEX}
    for file in sorted(files, key=lambda file: file.name == "config.json"):
        copy = directory / file.relative_to(source)
        copy.parent.mkdir(exist_ok=True)
        shutil.copyfile(file, copy)
        if file.name.endswith("_config.json") or file.name == "config.json":
            _drop_code(file, copy)


def save_tokenizer(tokenizer: Any, directory: Path) -> None:
    """Write the files of a tokenizer, without the names of Python code that its source had."""
    tokenizer.save_pretrained(directory)
    settings = directory / "tokenizer_config.json"
    _drop_code(settings, settings)


def _drop_code(source: Path, target: Path) -> None:
    """Write a JSON file again if it names Python code (`auto_map`), without these names."""
    fields = read_object(source, AGAIN)
    if fields.pop("auto_map", None) is not None:
        target.write_text(json.dumps(fields, indent=2) + "\n")


def check_new(directory: str | Path) -> Path:
    """Return a directory to write to; raise `Refusal` if it is a file, is not empty, or cannot be written to."""
    directory = Path(directory).expanduser()
    if directory.is_file():
        raise Refusal(f"{directory} is a file; choose a new directory")
    if directory.exists() and any(directory.iterdir()):
        raise Refusal(f"{directory} is not empty; choose a new directory")
    check_writable(directory)
    return directory

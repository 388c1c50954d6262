"""Hugging Face safetensors into sharded parameters.

Each device's shard is read from the files by itself, one parameter at a time: neither a
device nor the host ever holds the whole model unless it is asked to.
"""

import math
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrlhf.architecture import Head, ModelConfig
from jaxrlhf.batch import Params
from jaxrlhf.models.families import FAMILIES, Stored
from jaxrlhf.models.hf_config import read_family, resolve
from jaxrlhf.models.parameters import Param, declare, path_name
from jaxrlhf.models.tensor_files import TensorFiles

Index = tuple[slice, ...]


def load_params(
    path: str | Path,
    config: ModelConfig,
    head: Head,
    shardings: Any = None,
    *,
    dtype: Any = jnp.float32,
) -> Params:
    """Parameters of a checkpoint, each shard read straight onto its device.

    A `value` head starts from the score head of a sequence-classification checkpoint, and
    from zeros on a language model.

    Args:
      path: Checkpoint directory or hub id.
      config: From `read_config` of the same path.
      shardings: Tree of `jax.sharding.Sharding` like the parameters; None loads onto one device.
      dtype: Of the result, whatever the files hold: one, or a tree of them like the parameters.

    Raises:
      ValueError: The checkpoint lacks the wanted head, a tensor is missing, unexpected or of
        the wrong shape, or a file is damaged.
    """
    directory = resolve(path, weights=True)
    declared = declare(config, head)
    stored = FAMILIES[config.family].stored(config, head)
    _, saved_head = read_family(directory)
    _check_head(directory, head, saved_head)
    if head == "value" and saved_head == "lm":
        del stored["head"]
    if shardings is None:
        device = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
        shardings = jax.tree.map(lambda _: device, declared)
    dtypes = dtype if isinstance(dtype, dict) else jax.tree.map(lambda _: dtype, declared)

    with TensorFiles(directory) as files:
        _check_tensors(files, config, declared, stored)

        def load(path: tuple, param: Param, sharding: jax.sharding.Sharding, dtype: Any) -> jax.Array:
            source = stored.get(path_name(path))

            def shard(index: Any) -> np.ndarray:
                if source is None:
                    return np.zeros(_extent(param.shape, index), dtype)
                return _read_shard(files, source, param, index).astype(dtype, copy=False)

            return jax.make_array_from_callback(param.shape, sharding, shard)

        return jax.tree.map_with_path(load, declared, shardings, dtypes)


def _read_shard(files: TensorFiles, source: Stored, param: Param, index: Index) -> np.ndarray:
    """The part `index` of a parameter, in its own order of dimensions."""
    if not param.stacked:
        return _read_tensor(files[source.name], source, param.shape, index)
    layers = range(*index[0].indices(param.shape[0]))
    names = [source.name.format(layer=layer) for layer in layers]
    return np.stack([_read_tensor(files[name], source, param.shape[1:], index[1:]) for name in names])


def _read_tensor(tensor: Any, source: Stored, shape: tuple[int, ...], index: Index) -> np.ndarray:
    """The part `index` of one tensor.

    Of each dimension in the file, the range of its first letter is read; letters merged
    behind it are cut afterwards, because their part is not contiguous.
    """
    size, wanted = dict(zip(source.dims, shape, strict=True)), dict(zip(source.dims, index, strict=True))
    ranges: list[slice] = []
    cuts: list[slice] = []
    unmerged: list[int] = []
    for group in source.stored.split():
        if group == "1":
            ranges.append(slice(0, 1))
            continue
        first, merged = group[0], group[1:]
        start, stop, _ = wanted[first].indices(size[first])
        inner = math.prod(size[letter] for letter in merged)
        ranges.append(slice(start * inner, stop * inner))
        unmerged += [stop - start, *(size[letter] for letter in merged)]
        cuts += [slice(None), *(wanted[letter] for letter in merged)]
    block = tensor[tuple(ranges)].reshape(unmerged)[tuple(cuts)]
    return block.transpose([source.letters.index(letter) for letter in source.dims])


def _extent(shape: tuple[int, ...], index: Index) -> tuple[int, ...]:
    return tuple(len(range(*part.indices(size))) for part, size in zip(index, shape, strict=True))


def _check_head(directory: Path, head: Head, saved: Head) -> None:
    """A value head may start from either kind of checkpoint; the others have to be in it."""
    if head not in ("value", saved):
        says = {"lm": "a language-model head (ForCausalLM)", "score": "a score head (ForSequenceClassification)"}
        raise ValueError(
            f"{directory} was saved with {says[saved]}, but {says[head]} is needed; give another checkpoint"
        )


def _check_tensors(files: TensorFiles, config: ModelConfig, declared: dict, stored: dict[str, Stored]) -> None:
    """Every tensor is there with its shape, and none is left over that would change the numbers."""
    expected: dict[str, tuple[int, ...]] = {}
    for path, param in jax.tree.leaves_with_path(declared):
        if source := stored.get(path_name(path)):
            shape = source.shape(param.shape[1:] if param.stacked else param.shape)
            expected |= dict.fromkeys(source.names(config.num_layers), shape)
    for name, shape in expected.items():
        if name not in files.file_of:
            raise ValueError(f"tensor {name!r} of shape {list(shape)} is missing from the files in {files.directory}")
        found = tuple(files[name].get_shape())
        if found != shape:
            raise ValueError(
                f"tensor {name!r} in {files.where(name)} has shape {list(found)}, config.json and the "
                f"head asked for make it {list(shape)}; the files do not belong together"
            )
    for name in files.file_of:
        # A tied or replaced head, and the constants that old versions saved, change nothing.
        if name not in expected and name != "lm_head.weight" and not name.endswith("rotary_emb.inv_freq"):
            raise ValueError(
                f"tensor {name!r} in {files.where(name)} is no part of a {config.family} decoder; "
                f"leaving it out would change the model"
            )

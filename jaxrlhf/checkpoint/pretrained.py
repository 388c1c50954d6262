"""Pretrained models: Hugging Face checkpoints, and converted checkpoints with weights in orbax's format.

A converted checkpoint is a directory with all files of a Hugging Face checkpoint except its weights, and a folder
`weights` with one array per parameter. Every process reads its part of an array from chunks written by all devices, so
it is the fastest format for several hosts to start from. The dtype of each tensor is stored next to the
arrays, because the tensors of one array may have different dtypes.
"""

import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from jaxrlhf.batch import Params
from jaxrlhf.checkpoint.items import TreeItem, read_each, stored_shapes
from jaxrlhf.config import Refusal
from jaxrlhf.config.refusal import read_object
from jaxrlhf.models.config import Head, ModelConfig
from jaxrlhf.models.huggingface.config import labels_steps, read_config, read_family
from jaxrlhf.models.huggingface.hub import resolve
from jaxrlhf.models.huggingface.load import Keep, Progress, check_head, check_params, load_params
from jaxrlhf.models.huggingface.save import check_new, copy_description, read_dtypes, save_each
from jaxrlhf.models.huggingface.tensor_files import INDEX, PICKLED, SINGLE
from jaxrlhf.models.parameters import param_shapes, path_name
from jaxrlhf.runtime.checksums import damage_of, write_checksums

WEIGHTS = "weights"
_DTYPES = "dtypes.json"


def is_converted(path: str | Path) -> bool:
    """Return True if a path is that of a converted checkpoint."""
    return _weights(path).is_dir()


def load_pretrained(
    path: str | Path,
    config: ModelConfig,
    head: Head,
    shardings: Any,
    *,
    dtype: Any = np.float32,
    keep: Keep = lambda name, array: array,
) -> Params:
    """Load the parameters of a Hugging Face or converted checkpoint, in a layout; see `load_params`."""
    if not is_converted(path):
        return load_params(path, config, head, shardings, dtype=dtype, keep=keep)
    if jax.process_index() == 0:  # of several processes, one reads all files
        _check_whole(path)
    check_pretrained(path, config, head)
    shapes = param_shapes(config, head)
    dtypes = dtype if isinstance(dtype, dict) else jax.tree.map(lambda _: dtype, shapes)
    target = jax.tree.map(
        lambda x, sharding, dtype: jax.ShapeDtypeStruct(x.shape, dtype, sharding=sharding), shapes, shardings, dtypes
    )
    saved = {name: part for name, part in target.items() if name not in _zero_parameters(path, head)}
    arrays = {name: keep(name, array) for name, array in read_each(_weights(path), saved)}

    def take(place: tuple, wanted: jax.ShapeDtypeStruct) -> Any:
        if (name := path_name(place)) in arrays:
            return arrays[name]
        zeros = np.zeros(wanted.sharding.shard_shape(wanted.shape), wanted.dtype)
        return jax.make_array_from_callback(wanted.shape, wanted.sharding, lambda _: zeros)

    return jax.tree.map_with_path(take, target)


def check_pretrained(path: str | Path, config: ModelConfig, head: Head) -> None:
    """Refuse checkpoints that `load_pretrained` cannot read, without reading any weights.

    Raises:
      Refusal: A tensor is missing, or its shape differs from the model's.
    """
    if not is_converted(path):
        return check_params(path, config, head)
    zeros, folder = _zero_parameters(path, head), _weights(path)
    stored = stored_shapes(folder)
    for place, wanted in jax.tree.leaves_with_path(param_shapes(config, head)):
        name = path_name(place)
        found = list(stored[name].shape) if name in stored else "none"
        if name not in zeros and found != list(wanted.shape):
            raise Refusal(
                f"array {name!r} in {folder} has shape {found}, but config.json and the requested head expect "
                f"{list(wanted.shape)}; convert the checkpoint again"
            )


def check_local(path: str | Path, head: Head, *, vision: bool = False, mtp: bool = False) -> None:
    """Refuse a local checkpoint whose weights cannot all be read (see `check_pretrained`); one without weights passes.

    Weights in pickles are refused too, because a run does not read them.

    Raises:
      Refusal: See `check_pretrained`.
    """
    local = Path(path).expanduser()
    files = (local, *(local / name for name in (SINGLE, INDEX)))
    pickled = [file for pattern in PICKLED for file in local.glob(pattern)]
    if is_converted(local) or any(file.is_file() for file in (*files, *pickled)):
        check_pretrained(path, read_config(path, vision=vision, mtp=mtp), head)


def export_converted(
    path: str | Path, directory: str | Path, *, dtype: str | None = None, progress: Progress = lambda done, total: None
) -> None:
    """Write a converted checkpoint as a Hugging Face checkpoint; one array at a time is in memory.

    Args:
      dtype: Dtype of the tensors; None is the dtype in which each tensor was converted.
      progress: Callback with the number of bytes written and the total.

    Raises:
      Refusal: The directory holds files, or the checkpoint cannot be read.
    """
    directory = check_new(directory)
    stored, whole = stored_shapes(_weights(path)), SingleDeviceSharding(jax.local_devices(backend="cpu")[0])
    vision = any(name.startswith("vision.") for name in stored)
    config, (_, head) = read_config(path, vision=vision), read_family(path)
    check_pretrained(path, config, head)

    def place(path: tuple, _: Any) -> jax.ShapeDtypeStruct:
        array = stored[path_name(path)]
        return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=whole)

    target = jax.tree.map_with_path(place, param_shapes(config, head))
    arrays = read_each(_weights(path), target)
    converted = dtype or read_object(_weights(path) / _DTYPES, "convert the checkpoint again")  # by tensor name
    _check_whole(path)
    save_each(arrays, config, head, directory, dtype=converted, source=path, progress=progress)


def convert(
    source: str | Path,
    directory: str | Path,
    *,
    dtype: str | None = None,
    vision: bool = False,
    progress: Progress = lambda done, total: None,
) -> None:
    """Write a converted checkpoint from a Hugging Face checkpoint; with several processes, all of them call this.

    Every device reads its share of each tensor, so together the devices hold the model once.

    Args:
      directory: New directory on a file system that all processes see.
      dtype: Dtype of the arrays; None is the dtype of their tensors.
      progress: Callback with the number of bytes read and the total.

    Raises:
      Refusal: The directory holds files, or the checkpoint cannot be read.
    """
    directory = check_new(directory)
    config, (_, head) = read_config(source, vision=vision), read_family(source)
    if labels_steps(source):
        raise Refusal(
            f"{source} classifies tokens, which converted checkpoints do not support; use the checkpoint without "
            "conversion"
        )
    found = resolve(source, weights=True)
    shapes, mesh = param_shapes(config, head), Mesh(np.array(jax.devices()), ("device",))
    layout = jax.tree.map(lambda x: NamedSharding(mesh, _sharded(x.shape, mesh.size)), shapes)
    params = load_params(found, config, head, layout, dtype=dtype, progress=progress)
    dtypes = read_dtypes(found, vision=vision)
    if dtype is not None:
        dtypes = dict.fromkeys(dtypes, dtype)
    _barrier("the directory is checked")
    _weights(directory).mkdir(parents=True, exist_ok=True)
    _barrier("the directory is created")
    item = TreeItem(lambda: params, lambda _: None)
    item.save(_weights(directory))
    item.finish()
    _barrier("the arrays are written")
    item.merge()
    if jax.process_index() == 0:
        (_weights(directory) / _DTYPES).write_text(json.dumps(dtypes, indent=0, sort_keys=True) + "\n")
        write_checksums(_weights(directory))
        copy_description(found, directory)
    _barrier("the checkpoint is complete")


def _check_whole(path: str | Path) -> None:
    """Compare the files of a converted checkpoint with their checksums; an earlier version wrote none.

    Raises:
      Refusal: A file is not what was written.
    """
    if (damage := damage_of(_weights(path), checked=False)) is not None:
        raise Refusal(f"{damage}; convert the checkpoint again")


def _weights(path: str | Path) -> Path:
    return Path(path).expanduser().absolute() / WEIGHTS  # orbax takes absolute paths only


def _zero_parameters(path: str | Path, head: Head) -> set[str]:
    """Return the parameters that are absent from the checkpoint and start at zero."""
    directory, saved = Path(path).expanduser(), read_family(path)[1]
    check_head(directory, head, saved)
    return {"head"} if head != saved and saved == "lm" else set()


def _sharded(shape: tuple[int, ...], devices: int) -> PartitionSpec:
    """Return a sharding that splits the longest dimension that is divisible by the number of devices."""
    even = [size if size % devices == 0 else 0 for size in shape]
    chosen = even.index(max(even)) if max(even) else len(shape)
    return PartitionSpec(*[None] * chosen, "device") if chosen < len(shape) else PartitionSpec()


def _barrier(name: str) -> None:
    """Wait for the other processes."""
    if jax.process_count() > 1:
        from jax.experimental.multihost_utils import sync_global_devices

        sync_global_devices(name)

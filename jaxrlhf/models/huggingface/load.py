"""Import of Hugging Face safetensors into sharded parameters.

Tensors are read one after another, and only the parts that this process's devices need. A piece goes to its devices in
the layout of the file. On the devices, a compiled program casts and transposes the piece and writes it into the
parameter, whose layers are stacked. The host never holds more than one tensor.
"""

import functools
import gc
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from jaxrlhf.batch import Array, Params
from jaxrlhf.config import Refusal
from jaxrlhf.models.config import Head, ModelConfig
from jaxrlhf.models.huggingface.config import labels_steps, read_config, read_family
from jaxrlhf.models.huggingface.families import (
    FAMILIES,
    LM_HEAD,
    VISION_FORMATS,
    StoredTensor,
    stored_tensors,
    tensor_shapes,
)
from jaxrlhf.models.huggingface.hub import resolve
from jaxrlhf.models.huggingface.tensor_files import DTYPES, INDEX, TensorFiles
from jaxrlhf.models.parameters import Param, declare, path_name

ADAPTERS = "adapter_config.json"
"""Settings file of adapters, as peft writes it."""
_TIED_ROWS = 16_384
"""Rows of an embedding and of a head that are compared at a time."""

Ranges = tuple[tuple[int, int], ...]
Progress = Callable[[int, int], None]
"""Callback with the number of bytes that are done, and the number of all bytes."""
Keep = Callable[[str, jax.Array], Any]
"""Function from a parameter's path and array to the node that takes its place in the tree."""


def load_params(
    path: str | Path,
    config: ModelConfig,
    head: Head,
    shardings: Any = None,
    *,
    dtype: Any = jnp.float32,
    progress: Progress = lambda done, total: None,
    keep: Keep = lambda name, array: array,
) -> Params:
    """Load the parameters of a checkpoint, each shard straight onto its device.

    A `value` head starts from the score head of a sequence-classification checkpoint, and from zeros on a language
    model. The `score` head of a token classifier with two labels is the second label's row minus the first label's
    row. So the sigmoid of the score is the second label's probability, except for `label_bias`.

    Args:
      config: Shape, from `read_config` of the same path.
      shardings: Tree of `NamedSharding` like the parameters; None loads onto one device.
      dtype: Dtype of all parameters, or a tree of dtypes like the parameters. None takes, for each parameter, the
        narrowest dtype that holds all of its tensors in the files unchanged.
      progress: Callback, called after each tensor.
      keep: Callback, called with each parameter before the next parameter is read.

    Raises:
      Refusal: The checkpoint lacks the wanted head or has two, or its tensors do not fit the model.
    """
    declared = declare(config, head)
    if shardings is None:
        device = SingleDeviceSharding(jax.local_devices()[0])
        shardings = jax.tree.map(lambda _: device, declared)

    with TensorFiles(resolve(path, weights=True), vision=config.vision is not None) as files:
        stored, labelled = _check(files, config, head), head != "lm" and labels_steps(path)
        if head == "lm" and config.tie_embeddings:
            _check_tied(files, stored["embed"].name)
        if dtype is None:
            dtype = _dtypes(files, declared, stored)
        dtypes = dtype if isinstance(dtype, dict) else jax.tree.map(lambda _: dtype, declared)
        sizes = jax.tree.map(lambda param, dtype: math.prod(param.shape) * np.dtype(dtype).itemsize, declared, dtypes)
        total, done = sum(jax.tree.leaves(sizes)), 0

        def load(path: tuple, param: Param, sharding: Sharding, dtype: Any, num_bytes: int) -> jax.Array:
            nonlocal done
            source = stored.get(path_name(path))
            if source is None and labelled and path_name(path) == "head":
                row_2D = files["score.weight"][:].astype(np.float32)
                row_D = (row_2D[1] - row_2D[0]).astype(dtype)
                return jax.make_array_from_callback(param.shape, sharding, lambda part: row_D[part])
            if source is None:
                zeros = np.zeros(sharding.shard_shape(param.shape), dtype)
                return jax.make_array_from_callback(param.shape, sharding, lambda _: zeros)
            array: Any = None
            shard = sharding.shard_shape(param.shape)
            steps = source.stacked(shard)
            order = tuple(source.letters.index(letter) for letter in source.dims)
            put = _put(order, param.shape, np.dtype(dtype), sharding)
            for at in np.ndindex(steps):
                array = put(array, _piece(files, source, param, sharding, at), at)
                array.block_until_ready()  # otherwise the host would read faster than its devices copy
                gc.collect(0)  # JAX frees host buffers when Python collects garbage
                done += num_bytes // math.prod(steps)
                progress(done, total)
            return array

        return jax.tree.map_with_path(
            lambda path, *leaves: keep(path_name(path), load(path, *leaves)), declared, shardings, dtypes, sizes
        )


def check_params(path: str | Path, config: ModelConfig, head: Head) -> None:
    """Refuse a checkpoint that `load_params` could not read, from the headers of the files alone.

    Raises:
      Refusal: The checkpoint lacks the wanted head, a tensor is missing, unexpected or of
        the wrong shape or dtype, or a file is missing or damaged.
    """
    with TensorFiles(resolve(path, weights=True), vision=config.vision is not None) as files:
        _check(files, config, head)


def has_mtp(path: str | Path) -> bool:
    """Return whether the files of a checkpoint have a layer that predicts the second next token."""
    names = read_family(path)[0].mtp
    if names is None:
        return False
    with TensorFiles(resolve(path, weights=True), vision=False) as files:
        return names.join.format(layer=read_config(path).num_layers) in files.file_of


def label_bias(path: str | Path) -> float:
    """Return the second label's bias minus the first's, of a token classifier with two labels; 0 for all others."""
    if not labels_steps(path):
        return 0.0
    with TensorFiles(resolve(path, weights=True), vision=False) as files:
        if "score.bias" not in files.file_of:
            return 0.0
        wrong, right = files["score.bias"][:].astype(np.float32)
    return float(right - wrong)


def _piece(
    files: TensorFiles, source: StoredTensor, param: Param, sharding: Sharding, at: tuple[int, ...]
) -> jax.Array:
    """Read the tensors of layer `at` of each device's range, with their dimensions in the file's order.

    The stacked dimensions come first, with one entry for each range that devices hold.
    """
    stacked = len(at)
    holders: dict[Ranges, list[jax.Device]] = {}
    held: Any = sharding.addressable_devices_indices_map(param.shape)
    for device, index in held.items():
        ranges = tuple(part.indices(size)[:2] for part, size in zip(index, param.shape, strict=True))
        holders.setdefault(ranges, []).append(device)
    blocks: list[jax.Array] = []
    for ranges, devices in holders.items():
        name = source.named([start + step for (start, _), step in zip(ranges, at, strict=False)])
        block = _read(files[name], source, param.unpadded[stacked:], ranges[stacked:])[(None,) * stacked]
        blocks += jax.block_until_ready([jax.device_put(block, device) for device in devices])
    places = [*range(stacked), *(stacked + source.dims.index(letter) for letter in source.letters)]
    counts = [size // part for size, part in zip(param.shape, sharding.shard_shape(param.shape), strict=True)]
    shape = tuple(counts[place] if place < stacked else param.shape[place] for place in places)
    if isinstance(sharding, NamedSharding):
        spec = [*sharding.spec, *[None] * (len(places) - len(sharding.spec))]
        sharding = NamedSharding(sharding.mesh, PartitionSpec(*(spec[place] for place in places)))
    return jax.make_array_from_single_device_arrays(shape, sharding, blocks)


@functools.cache
def _put(order: tuple[int, ...], shape: tuple[int, ...], dtype: np.dtype, sharding: Sharding) -> Any:
    """Return a jitted program that writes a piece into its place in the parameter, cast and in our dimension order.

    Stacked dimensions are reshaped to (ranges, places in a range), so that each device writes into its own range.
    """
    stacked = len(shape) - len(order)
    rest = shape[stacked:]

    def put(array: Array | None, piece: Array, at: tuple[Array, ...]) -> Array:
        counts = piece.shape[:stacked]
        piece = piece.transpose(*range(stacked), *(stacked + place for place in order)).astype(dtype)
        whole = jnp.zeros(shape, dtype) if array is None else array
        ranges = [part for size, count in zip(shape, counts, strict=False) for part in (count, size // count)]
        places = [part for count in counts for part in (count, 1)]
        start = [part for step in at for part in (0, step)]
        filled = lax.dynamic_update_slice(
            whole.reshape(*ranges, *rest), piece.reshape(*places, *rest), [*start, *[0] * len(rest)]
        )
        return filled.reshape(shape)

    return jax.jit(put, donate_argnums=0, out_shardings=sharding)


def _read(tensor: Any, source: StoredTensor, shape: tuple[int, ...], ranges: Ranges) -> np.ndarray:
    """Read ranges of our dimensions from one tensor, in the file's order; zeros beyond the tensor's end.

    For each dimension of the file, the range of its first letter is read. The letters after the first are sliced after
    reading, because their part of the file is not contiguous.
    """
    size, wanted = source.sizes(shape), {"1": (0, 1), **dict(zip(source.dims, ranges, strict=True))}
    there = {letter: slice(*(min(end, size[letter]) for end in wanted[letter])) for letter in size}
    outer: list[slice] = []
    own: list[slice] = []  # our part of dimensions that other parameters share
    split: list[int] = []
    inner: list[slice] = []
    unmerged: list[int] = []
    for group in source.stored.split():
        first, merged = there[group[0]], group[1:]
        inside = source.shared(group)
        whole = inside is not None and inside[0] == group  # a single contiguous range
        offset = inside[1] if inside is not None and whole else 0
        inside = None if whole else inside
        plain = merged if inside is None else merged.removesuffix(inside[0])
        width = math.prod(size[letter] for letter in plain) * (1 if inside is None else inside[2])
        count = first.stop - first.start
        # A shard of only padding has nothing in the file; read one entry, because files refuse empty slices.
        start = first.start if count else 0
        outer.append(slice(offset + start * width, offset + (start + max(1, count)) * width))
        split += [max(1, count), *(size[letter] for letter in plain)]
        own += [slice(None)] * (1 + len(plain))
        if inside is not None:
            letters, begin, total = inside
            split.append(total)
            own.append(slice(begin, begin + math.prod(size[letter] for letter in letters)))
        unmerged += [max(1, count), *(size[letter] for letter in merged)]
        inner += [slice(count), *(there[letter] for letter in merged)]
    block = tensor[tuple(outer)].reshape(split)[tuple(own)].reshape(unmerged)[tuple(inner)]
    letters = source.stored.replace(" ", "")
    block = block.squeeze(tuple(place for place, letter in enumerate(letters) if letter == "1"))
    widths = [stop - start for start, stop in (wanted[letter] for letter in source.letters)]
    if block.shape == tuple(widths):
        return block
    return np.pad(block, [(0, width - have) for width, have in zip(widths, block.shape, strict=True)])


def _dtypes(files: TensorFiles, declared: dict, stored: dict[str, StoredTensor]) -> dict:
    """Return the narrowest dtype of each parameter that holds all of its tensors unchanged."""
    kinds = files.dtypes()

    def widest(path: tuple, param: Param) -> np.dtype:
        source = stored.get(path_name(path))
        if source is None:
            return np.dtype(np.float32)
        return jnp.result_type(*{kinds[source.named(at)] for at in np.ndindex(source.stacked(param.shape))})

    return jax.tree.map_with_path(widest, declared)


def _check(files: TensorFiles, config: ModelConfig, head: Head) -> dict[str, StoredTensor]:
    """Check the files against the model, and return the table of the parameters that the files have.

    Raises:
      Refusal: The files do not fit the model.
    """
    stored = stored_tensors(config, head)
    if (adapters := files.directory / ADAPTERS).is_file():
        raise Refusal(
            f"{adapters} has adapters for these weights, which transformers adds and jaxrlhf does not; use merged "
            "weights without this file"
        )
    _, saved = read_family(files.directory)
    check_head(files.directory, head, saved)
    labelled = head != "lm" and labels_steps(files.directory)
    if labelled or (head == "value" and saved == "lm"):
        del stored["head"]
    if head == "value" and labelled:
        raise Refusal(
            f"{files.directory} classifies tokens, with a bias that a value head does not have; use it as a "
            "ProcessModelReward, or start training from a language model or an export of ProcessRewardModel"
        )
    expected = tensor_shapes(config, head, stored)
    if labelled:
        names = {"score.weight": (2, config.hidden_size), "score.bias": (2,)}
        expected |= {name: shape for name, shape in names.items() if name == "score.weight" or name in files.file_of}
    _check_tensors(files, config, expected)
    return stored


def check_head(directory: Path, head: Head, saved: Head) -> None:
    """Raise `Refusal` unless the checkpoint has the wanted head; a value head may start from any checkpoint."""
    if head not in ("value", saved):
        says = {"lm": "a language-model head (ForCausalLM)", "score": "a score head (ForSequenceClassification)"}
        raise Refusal(f"{directory} was saved with {says[saved]}, but {says[head]} is required; use another checkpoint")


def _check_tied(files: TensorFiles, embed: str) -> None:
    """Refuse a stored head that differs from the tied embedding; both are read some rows at a time."""
    head = LM_HEAD.name
    if not {head, embed} <= files.file_of.keys():
        return
    shape = files[embed].get_shape()
    same = files[head].get_shape() == shape
    for start in range(0, shape[0] if same else 0, _TIED_ROWS):
        rows = slice(start, min(start + _TIED_ROWS, shape[0])), slice(None)
        same = same and np.array_equal(*(files[name][rows].astype(np.float32) for name in (embed, head)))
    if not same:
        raise Refusal(
            f"tensor {head!r} in {files.where(head)} differs from {embed!r}, but config.json ties them, so readers "
            f"disagree; set tie_word_embeddings=false in config.json, or remove {head}"
        )


def _check_tensors(files: TensorFiles, config: ModelConfig, expected: Mapping[str, tuple[int, ...]]) -> None:
    """Check that every tensor exists with its shape, and that no tensor is left over that would change the numbers."""
    family = FAMILIES[config.family]
    for name, shape in expected.items():
        if name in files.absent:
            where = files.directory / files.absent[name]
            raise Refusal(f"tensor {name!r} is missing from {where}, where {INDEX} lists it")
        if name not in files.file_of:
            raise Refusal(f"tensor {name!r} of shape {list(shape)} is missing from the files in {files.directory}")
        found, kind = tuple(files[name].get_shape()), files[name].get_dtype()
        if found != shape:
            raise Refusal(
                f"tensor {name!r} in {files.where(name)} has shape {list(found)}, but config.json and the requested "
                f"head expect {list(shape)}; use matching files"
            )
        if kind not in DTYPES.values():
            raise Refusal(
                f"tensor {name!r} in {files.where(name)} has dtype {kind}; convert the checkpoint to one of "
                f"{', '.join(DTYPES.values())}"
            )
    ignored = () if config.vision is None else VISION_FORMATS[config.vision.family].leaves_out
    for name in files.file_of:
        # A tied or replaced head, and the constants that old versions saved, change nothing.
        constant = name == "lm_head.weight" or name.endswith("rotary_emb.inv_freq")
        unread = constant or family.leaves_out(name, config) or name.startswith(ignored)
        if name not in expected and not unread:
            raise Refusal(
                f"tensor {name!r} in {files.where(name)} is not part of a {config.family} decoder; ignoring it would "
                "change the model"
            )

"""Import and export of adapters in `peft` directories: adapter_config.json and adapter_model.safetensors."""

import json
import math
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxrlhf.batch import Params
from jaxrlhf.config import Lora, Refusal
from jaxrlhf.config.refusal import read_object
from jaxrlhf.models.config import Head, ModelConfig
from jaxrlhf.models.huggingface.families import module_name, stored_tensors
from jaxrlhf.models.huggingface.hub import without_revision
from jaxrlhf.models.huggingface.load import ADAPTERS
from jaxrlhf.models.lora.lora import INPUTS, adapter_shapes
from jaxrlhf.models.parameters import path_name
from jaxrlhf.runtime.checksums import is_special

CONFIG, WEIGHTS = ADAPTERS, "adapter_model.safetensors"
_PREFIX = "base_model.model."
_HEAD = f"{_PREFIX}score.weight"
_READ = ("peft_type", "r", "lora_alpha", "use_rslora", "target_modules", "modules_to_save", "init_lora_weights")
_HARMLESS = (
    *("base_model_name_or_path", "revision", "task_type", "auto_mapping", "inference_mode", "peft_version"),
    *("exclude_modules", "lora_dropout", "qalora_group_size", "megatron_core", "runtime_config", "loftq_config"),
)
_PLAIN_STARTS = (True, False, None, "gaussian", "orthogonal", "eva")
"""Values of `init_lora_weights` that leave the base weights as their checkpoint has them."""


class _AdapterPlace(NamedTuple):
    """Place in the tree of adapters of a tensor of the file; the file has it transposed.

    Attributes:
      layer: Index of the layer; None if the tensor is not part of a layer.
      rows: Number of leading dimensions that are the rows of the matrix; the other dimensions are its columns.
    """

    path: str
    layer: int | None
    rows: int

    def of(self, arrays: dict[str, np.ndarray]) -> np.ndarray:
        """Return the part of the tree that the tensor holds."""
        return arrays[self.path] if self.layer is None else arrays[self.path][self.layer]

    def shape(self, block: np.ndarray) -> tuple[int, int]:
        """Return the shape of the tensor in the file."""
        rows = math.prod(block.shape[: self.rows])
        return block.size // rows, rows


def save_adapters(
    adapters: Params,
    config: ModelConfig,
    head: Head,
    lora: Lora,
    directory: str | Path,
    *,
    model: str,
    dtype: Any = jnp.float32,
) -> None:
    """Write a directory that `peft.PeftModel.from_pretrained` loads over the checkpoint.

    Args:
      model: Path or hub id of the checkpoint that the adapters are for.
    """
    from safetensors.numpy import save_file

    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    arrays = {path_name(path): np.asarray(leaf) for path, leaf in jax.tree.leaves_with_path(adapters)}
    tensors = {}
    for name, place in _places(config, head, lora).items():
        block = place.of(arrays)
        tensors[name] = np.ascontiguousarray(block.reshape(place.shape(block)[::-1]).T.astype(dtype))
    save_file(tensors, directory / WEIGHTS, metadata={"format": "pt"})
    name, revision = without_revision(model)
    fields = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM" if head == "lm" else "SEQ_CLS",
        "base_model_name_or_path": name,
        "revision": revision,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "use_rslora": lora.rslora,
        "target_modules": _targets(tensors, config),
        "modules_to_save": None if head == "lm" else ["score"],
        "lora_dropout": 0.0,
        "bias": "none",
        "inference_mode": True,
    }
    (directory / CONFIG).write_text(json.dumps(fields, indent=2, sort_keys=True) + "\n")


def _targets(tensors: dict[str, np.ndarray], config: ModelConfig) -> list[str]:
    """Return the modules that have adapters: by last name, or by path if another part of the model has these names."""
    paths = {name.removeprefix(_PREFIX).rpartition(".lora_")[0] for name in tensors if name != _HEAD}
    return sorted(paths if config.vision is not None else {path.rpartition(".")[2] for path in paths})


def load_adapters(path: str | Path, config: ModelConfig, head: Head, lora: Lora, layout: Any) -> Params:
    """Load float32 adapters from a directory, with the shardings of `layout`; a missing head starts at zero.

    Raises:
      Refusal: The directory holds no adapters of this rank, scale and targets, or has settings that change numbers in
        another way than adapters do.
    """
    from safetensors import SafetensorError
    from safetensors.numpy import load_file

    file = Path(path) / WEIGHTS
    _check_fields(Path(path) / CONFIG, lora)
    try:
        if is_special(file):
            raise OSError("no regular file")
        tensors = load_file(file)
    except (SafetensorError, OSError) as error:
        raise Refusal(f"{file} is missing or damaged ({error}); export the adapters again") from error
    shapes = jax.tree.leaves_with_path(adapter_shapes(config, head, lora))
    arrays = {path_name(at): np.zeros(shape.shape, np.float32) for at, shape in shapes}
    places = {name: place for name, place in _places(config, head, lora).items() if name != _HEAD or name in tensors}
    for name in sorted(tensors.keys() ^ places.keys()):
        wrong = "is missing from" if name in places else "does not match lora.targets, but is in"
        raise Refusal(f"tensor {name!r} {wrong} {file}; lora.targets are {', '.join(lora.targets)}")
    for name, place in places.items():
        block, tensor = place.of(arrays), tensors[name]
        if tensor.shape != place.shape(block):
            raise Refusal(
                f"tensor {name!r} in {file} has shape {list(tensor.shape)}, but the model and lora.rank={lora.rank} "
                f"require {list(place.shape(block))}"
            )
        block[...] = tensor.astype(np.float32).T.reshape(block.shape)

    def put(at: tuple, sharding: Any) -> jax.Array:
        array = arrays[path_name(at)]
        return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])

    return jax.tree.map_with_path(put, layout)


def _places(config: ModelConfig, head: Head, lora: Lora) -> dict[str, _AdapterPlace]:
    """Return the place in the tree of every tensor of the file, by tensor name.

    Raises:
      Refusal: The checkpoint's family stores a target in one tensor with other matrices.
    """
    stored = stored_tensors(config, head)
    places = {}
    for at, shape in jax.tree.leaves_with_path(adapter_shapes(config, head, lora)):
        path = path_name(at)
        if path == "head":
            places[_HEAD] = _AdapterPlace(path, None, 1)
            continue
        weight, _, side = path.rpartition(".")
        inputs = INPUTS.get(weight.rpartition(".")[2], 1)
        tensor = stored[weight]
        if tensor.inside is not None or tensor.stored != f"{tensor.dims[inputs:]} {tensor.dims[:inputs]}":
            raise Refusal(
                f"{config.family} checkpoints store {weight} with other weights in {tensor.name}, so it cannot have "
                "its own adapter; remove it from lora.targets"
            )
        for layer in range(shape.shape[0]):
            part = {"down": "lora_A", "up": "lora_B"}[side]
            module = module_name(config, tensor.named((layer,)).removesuffix(".weight"))
            places[f"{_PREFIX}{module}.{part}.weight"] = _AdapterPlace(path, layer, inputs if side == "down" else 1)
    return places


def _check_fields(file: Path, lora: Lora) -> None:
    """Raise `Refusal` unless the file's settings equal `lora`, and no other setting changes numbers."""
    fields = read_object(file, "use a directory that peft wrote")
    if fields.get("peft_type") != "LORA" or fields.get("init_lora_weights", True) not in _PLAIN_STARTS:
        raise Refusal(
            f"{file} has peft_type={fields.get('peft_type')!r} and "
            f"init_lora_weights={fields.get('init_lora_weights')!r}; only LORA with unchanged base weights is "
            "supported"
        )
    plain = {"bias": "none"}
    unread = {name: value for name, value in fields.items() if name not in (*_READ, *_HARMLESS)}
    strange = [name for name, value in unread.items() if value and value != plain.get(name)]
    if strange:
        raise Refusal(f"{file} has {', '.join(f'{name}={fields[name]!r}' for name in strange)}, which is not supported")
    given = {
        "r": fields.get("r"),
        "lora_alpha": fields.get("lora_alpha"),
        "use_rslora": fields.get("use_rslora", False),
    }
    wanted = {"r": lora.rank, "lora_alpha": lora.alpha, "use_rslora": lora.rslora}
    if given != wanted:
        raise Refusal(
            f"{file} has {', '.join(f'{name}={value}' for name, value in given.items())}, but lora has "
            f"rank={lora.rank}, alpha={lora.alpha}, rslora={lora.rslora}; set the same values"
        )

"""Weights of a role: shapes, dtypes, shardings and initial values."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxrlhf.batch import Params
from jaxrlhf.checkpoint import TreeItem, load_pretrained
from jaxrlhf.config import Config, Lora, Model, Pretrained, Refusal
from jaxrlhf.models.causal_lm import AnyModel, CausalLM
from jaxrlhf.models.config import Head, ModelConfig
from jaxrlhf.models.huggingface.peft import load_adapters
from jaxrlhf.models.lora.lora import adapter_dims, adapter_shapes, declare_adapters, quantized
from jaxrlhf.models.lora.quantized import TILE, Format, Quantized, is_quantized, quantize_layers
from jaxrlhf.models.parameters import draw, init_params, param_dims, param_shapes, path_name
from jaxrlhf.resharding.hybrid import HybridEngine
from jaxrlhf.sharding.described import described
from jaxrlhf.sharding.mesh import STAGE_AXES, TENSOR_AXES, TOKEN_AXES
from jaxrlhf.sharding.pool import ResourcePool
from jaxrlhf.sharding.rules import GENERATE, TRAIN, Rules, cast_shapes, check_divisible, shardings


@dataclass(frozen=True)
class RoleWeights:
    """Shapes, dtypes and shardings of one role's weights, on any mesh.

    Attributes:
      dtype: Dtype of frozen weights.
      lora: Adapter settings of the role, or of the policy that a frozen role copies; None has no adapters.
      quantize: Format of the layers' matrices during generation; None is `dtype`.
    """

    role: str
    model: AnyModel
    head: Head
    dtype: Any
    lora: Lora | None
    quantize: Format | None = None

    def trained_params(self, mesh: Mesh) -> Params:
        """Return the parameters of a trained role as sharded shapes: float32 masters, or frozen ones with adapters."""
        if self.lora is not None:
            return self.frozen_params(mesh)
        return described(param_shapes(self.model, self.head, jnp.float32), self.layout(mesh))

    def frozen_params(self, mesh: Mesh) -> Params:
        """Return frozen parameters as sharded shapes."""
        self.layout(mesh)  # raises Refusal early
        self._check_tiles(mesh, TRAIN, role=self.role)
        return described(self._frozen_shapes(self.dtype), shardings(mesh, self._frozen_dims(), TRAIN))

    def layout(self, mesh: Mesh) -> Any:
        """Return the training shardings of the parameters, after a check that they split evenly."""
        if isinstance(self.model, CausalLM) and (stages := int(np.prod([mesh.shape[axis] for axis in STAGE_AXES]))) > 1:
            raise Refusal(
                f"{self.role}: stage={stages} requires the built-in decoder, but the model is {self.model.name}; set "
                "stage=1"
            )
        self._check_context(mesh)
        dims = param_dims(self.model, self.head)
        check_divisible(mesh, dims, param_shapes(self.model, self.head, jnp.float32), TRAIN, role=self.role)
        return shardings(mesh, dims, TRAIN)

    def _check_context(self, mesh: Mesh) -> None:
        """Raise `Refusal` if the tokens of rows cannot be split over the devices of a mesh."""
        context, tensor = (math.prod(mesh.shape[axis] for axis in axes) for axes in (TOKEN_AXES, TENSOR_AXES))
        if context == 1:
            return
        if isinstance(self.model, CausalLM):
            raise Refusal(
                f"{self.role}: context={context} requires the built-in decoder, but the model is {self.model.name}; "
                f"set context=1 and fsdp={context}"
            )
        if self.model.vision is not None:
            raise Refusal(
                f"{self.role}: context={context} does not support models that read images; set context=1 and "
                f"fsdp={context}"
            )
        if 3 * context * tensor > 4 * self.model.num_heads:
            most = self.model.num_heads // tensor
            raise Refusal(
                f"{self.role}: context={context} x tensor={tensor} devices split {self.model.num_heads} attention "
                f"heads, and more than a quarter of the devices would have none; set context to at most {most}, and "
                "use fsdp or data for the other devices"
            )

    def adapter_shapes(self) -> Params:
        """Return the shapes of the adapters."""
        return adapter_shapes(self.model, self.head, self._adapters)

    def adapter_layout(self, mesh: Mesh) -> Any:
        """Return the training shardings of the adapters, after a check that they split evenly."""
        dims = adapter_dims(self.model, self.head, self._adapters)
        check_divisible(mesh, dims, self.adapter_shapes(), TRAIN, role=self.role)
        return shardings(mesh, dims, TRAIN)

    def dims(self) -> dict[str, Any]:
        """Return the dimension names of `parameters`, and of `adapters` if the role has any."""
        adapters = {} if self.lora is None else {"adapters": adapter_dims(self.model, self.head, self.lora)}
        return {"parameters": self._frozen_dims(), **adapters}

    def shapes(self) -> dict[str, Any]:
        """Return the shapes of a trained role's weights, with the keys of `dims`."""
        if self.lora is None:
            return {"parameters": param_shapes(self.model, self.head, jnp.float32)}
        return {"parameters": self._frozen_shapes(self.dtype), "adapters": self.adapter_shapes()}

    def generation_shapes(self) -> dict[str, Any]:
        """Return the shapes of the generation weights, with the keys of `dims`."""
        shapes = cast_shapes(self.dims(), self.shapes(), dtype=self.dtype)
        return shapes | {"parameters": _quantized_shapes(shapes["parameters"], self.quantize)}

    def generation_dims(self) -> dict[str, Any]:
        """Return the dimension names of the generation weights, with the keys of `dims`."""
        dims = self.dims()
        return dims | {"parameters": quantized_dims(dims["parameters"], self.quantize)}

    def generation_layout(self, mesh: Mesh) -> Any:
        """Return the shardings of the generation weights, with the keys of `dims`."""
        return shardings(mesh, self.generation_dims(), GENERATE)

    @property
    def sent(self) -> "RoleWeights":
        """Weights as another pool receives them for generation, before it quantizes them."""
        return replace(self, quantize=None)

    def apart(self, mesh: Mesh) -> tuple[tuple[Any, Any], Callable[[Params], Params]]:
        """Return layout and shapes of what another pool receives for generation, and the `quantizer` of parameters."""
        shapes, layout = self.generation_shapes(), self.generation_layout(mesh)
        received = self.sent.generation_layout(mesh), self.sent.generation_shapes()
        return received, quantizer(described(shapes["parameters"], layout["parameters"]))

    def switch(self, mesh: Mesh, generation: Mesh) -> HybridEngine:
        """Build the engine that switches a trained role's weights between the training and generation layouts.

        Raises:
          Refusal: A dimension does not split evenly, or a split separates weights that share a scale.
        """
        if self.quantize is None:
            return HybridEngine.by_rules(mesh, generation, self.dims(), self.shapes(), dtype=self.dtype)
        dims, shapes = self.generation_dims(), self.generation_shapes()
        for axes, rules, where in ((mesh, TRAIN, self.role), (generation, GENERATE, f"{self.role} in generation")):
            _check_scales(axes, dims, shapes, rules, role=where, name="rollout.quantize")
        trained = described(self.shapes(), shardings(mesh, self.dims(), TRAIN))
        stages = int(np.prod([mesh.shape[axis] for axis in STAGE_AXES]))
        generated = described(shapes, self.generation_layout(generation))
        return HybridEngine(trained, generated, convert=partial(_generating, stages=stages))

    def check_generation(self, mesh: Mesh) -> None:
        """Raise `Refusal` if the weights do not split evenly over a generation mesh."""
        shapes = param_shapes(self.model, self.head, jnp.float32)
        check_divisible(mesh, param_dims(self.model, self.head), shapes, GENERATE, role="generation")
        self._check_tiles(mesh, GENERATE, role="generation")
        if self.quantize is not None:
            own = self.generation_dims(), self.generation_shapes()
            _check_scales(mesh, *own, GENERATE, role="generation", name="rollout.quantize")

    @property
    def _adapters(self) -> Lora:
        assert self.lora is not None, f"the {self.role} has no adapters"
        return self.lora

    @property
    def _frozen_format(self) -> Format | None:
        """Format of the matrices of frozen parameters; None is `dtype`."""
        return None if self.lora is None else self.lora.quantize

    def _frozen_shapes(self, dtype: Any) -> Any:
        dims, shapes = param_dims(self.model, self.head), param_shapes(self.model, self.head, jnp.float32)
        return _quantized_shapes(cast_shapes(dims, shapes, dtype=dtype), self._frozen_format)

    def _frozen_dims(self) -> dict[str, Any]:
        """Return the dimension names of frozen parameters; the last dimension of a scale counts tiles."""
        return quantized_dims(param_dims(self.model, self.head), self._frozen_format)

    def _check_tiles(self, mesh: Mesh, rules: Rules, *, role: str) -> None:
        """Raise `Refusal` if quantized frozen weights that share a scale would be split."""
        shapes = self._frozen_shapes(jnp.float32)
        _check_scales(mesh, self._frozen_dims(), shapes, rules, role=role, name="lora.quantize")


def rollout_format(config: Config, model: AnyModel, pool: ResourcePool) -> Format | None:
    """Return the format of the generation matrices on a pool; None is the compute dtype.

    Raises:
      Refusal: A format is configured for a user-defined model, or the pool's chips do not support it.
    """
    kind, device = config.rollout.quantize, pool.devices[0]
    if kind is not None and isinstance(model, CausalLM):
        raise Refusal(
            f"rollout.quantize={kind!r} requires the built-in decoder, but the model is {model.name}; set "
            "rollout.quantize=None"
        )
    if kind == "fp8" and not _has_fp8(device):
        raise Refusal(
            f"rollout.quantize='fp8' requires chips that multiply 8-bit floats, but {device.device_kind} does not; "
            "set rollout.quantize='int8'"
        )
    return kind


def _has_fp8(device: jax.Device) -> bool:
    """Return True if the device multiplies 8-bit floats, or is a CPU, which emulates a device."""
    if device.platform == "gpu":
        return float(getattr(device, "compute_capability", "0")) >= 8.9
    return device.platform == "cpu" or "7" in device.device_kind


def quantized_dims(dims: dict[str, Any], kind: Format | None) -> dict[str, Any]:
    """Return the dimension names of quantized parameters; the last dimension of a scale counts tiles."""
    if kind is None:
        return dims
    return quantized(dims, kind, lambda names: Quantized(names, names, kind), is_leaf=lambda x: isinstance(x, tuple))


def _quantized_shapes(shapes: Any, kind: Format | None) -> Any:
    return shapes if kind is None else jax.eval_shape(partial(quantized, kind=kind), shapes)


def _check_scales(mesh: Mesh, dims: Any, shapes: Any, rules: Rules, *, role: str, name: str) -> None:
    """Raise `Refusal` if quantized weights that share a scale would be split."""
    try:
        check_divisible(mesh, dims, shapes, rules, role=role)
    except Refusal as error:
        raise Refusal(
            f"{error}; with {name}, the dimension counts groups of up to {TILE} neighbors that share a scale"
        ) from error


def layout_in(tree: Any) -> Any:
    """Return the shardings of a tree of arrays or of sharded shapes."""
    return jax.tree.map(lambda leaf: leaf.sharding, tree)


def initial_params(model: Model, weights: RoleWeights, target: Params, *, seed: int) -> Params:
    """Return the parameters at the start of a run: random, or loaded from a checkpoint.

    Args:
      target: Sharded shapes of the result.
    """
    config, head = weights.model, weights.head
    if not isinstance(model, Pretrained):

        def build(seed: Any) -> Params:
            # The key is made inside: a program over several processes cannot take an array of a single process.
            return jax.tree.map(_converted, init_params(config, head, jax.random.key(seed)), target)

        return jax.jit(build, out_shardings=layout_in(target))(np.uint32(seed))
    assert isinstance(config, ModelConfig), "only the decoder loads checkpoints"
    floats = jax.tree.map(lambda x: x.scale if isinstance(x, Quantized) else x, target, is_leaf=is_quantized)
    dtypes = jax.tree.map(lambda x: x.dtype, floats)
    wanted = {path_name(path): node for path, node in jax.tree.leaves_with_path(target, is_leaf=is_quantized)}

    def keep(name: str, array: jax.Array) -> Any:
        return _quantized_leaf(array, _leaf_quantizer(wanted[name]))

    return load_pretrained(model.path, config, head, layout_in(floats), dtype=dtypes, keep=keep)


def initial_adapters(weights: RoleWeights, mesh: Mesh, *, seed: int) -> Params:
    """Return float32 adapters at the start of a run, in the training layout: random, or a checkpoint's."""
    config, head, lora, layout = weights.model, weights.head, weights.lora, weights.adapter_layout(mesh)
    assert lora is not None
    if lora.start is not None:
        assert isinstance(config, ModelConfig), "only the decoder has adapters"
        return load_adapters(lora.start, config, head, lora, layout)
    declared = declare_adapters(config, head, lora)
    build = jax.jit(lambda seed: draw(declared, jax.random.fold_in(jax.random.key(seed), 1)), out_shardings=layout)
    return build(np.uint32(seed))


def saved_params(folder: Path, target: Params) -> Params:
    """Restore the parameters of a checkpoint item, in the shapes and shardings of `target`."""
    restored: list[Params] = []
    TreeItem(lambda: target, restored.append).restore(folder)
    return restored[0]


def copied(params: Params, target: Params) -> Params:
    """Copy parameters to new buffers in the shapes and shardings of `target`; parameters missing in `params` are zeros.

    Trained parameters are donated to their update, so no buffer is shared.
    """

    def copy(tree: Params) -> Params:
        zeros = {name: jnp.zeros(shape.shape, shape.dtype) for name, shape in target.items() if name not in tree}
        there = {name: target[name] for name in tree}
        return {**jax.tree.map(_converted, tree, there), **zeros}

    return jax.jit(copy, out_shardings=layout_in(target))(params)


def quantized_as(params: Params, target: Params) -> Params:
    """Quantize the parameters that are quantized in `target`, one by one; each replaced parameter is deleted."""
    return quantizer(target)(params)


def quantizer(target: Params) -> Callable[[Params], Params]:
    """Return `quantized_as` for a target, with programs that are compiled once for all calls."""
    programs = jax.tree.map(_leaf_quantizer, target, is_leaf=is_quantized)
    return lambda params: jax.tree.map(_quantized_leaf, params, programs, is_leaf=is_quantized)


def _leaf_quantizer(wanted: Any) -> Callable[[jax.Array], Any]:
    """Return the program that quantizes a leaf as wanted; of leaves that stay, a function that returns the leaf."""
    if not isinstance(wanted, Quantized):
        return lambda leaf: leaf
    return jax.jit(partial(_converted, wanted=wanted), out_shardings=layout_in(wanted))


def _quantized_leaf(leaf: Any, quantize: Callable[[jax.Array], Any]) -> Any:
    """Quantize a leaf unless it is quantized, and delete the original: only one leaf exists twice at a time."""
    if isinstance(leaf, Quantized) or (made := quantize(leaf)) is leaf:
        return leaf
    jax.block_until_ready(made)
    leaf.delete()
    return made


def _generating(leaf: jax.Array, wanted: Any, *, stages: int) -> Any:
    """Convert a weight to its generation dtype or format."""
    if not isinstance(wanted, Quantized):
        return leaf.astype(wanted.dtype)
    return quantize_layers(leaf.astype(wanted.scale.dtype), wanted.kind, layers=leaf.shape[0] // stages)


def _converted(leaf: jax.Array, wanted: Any) -> Any:
    """Copy a leaf in another dtype, or quantize it one layer of each stage at a time, to limit temporary memory."""
    if not isinstance(wanted, Quantized):
        return jnp.array(leaf, wanted.dtype, copy=True)
    layers = wanted.scale.sharding.shard_shape(wanted.scale.shape)[0]
    return quantize_layers(leaf.astype(wanted.scale.dtype), wanted.kind, layers=layers)

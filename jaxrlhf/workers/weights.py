"""The trees of weights that roles hold: frozen, trained, and as they generate."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxrlhf.config import Lora, Quantization, Refusal
from jaxrlhf.models.causal_lm import AnyModel
from jaxrlhf.models.config import Head
from jaxrlhf.models.lora.lora import adapter_dims, adapter_shapes, quantized
from jaxrlhf.models.lora.quantized import TILE, Quantized
from jaxrlhf.models.parameters import param_dims, param_shapes
from jaxrlhf.sharding.rules import TRAIN, Rules, cast_shapes, check_divisible, laid_out, shardings
from jaxrlhf.workers.model import layout_of


def held(mesh: Mesh, config: AnyModel, head: Head, lora: Lora | None, *, dtype: Any, role: str) -> Any:
    """The parameters of a trained role, as shapes with shardings: masters, or frozen where adapters are trained."""
    if lora is not None:
        return frozen(mesh, config, head, lora, dtype=dtype, role=role)
    return laid_out(param_shapes(config, head, jnp.float32), layout_of(mesh, config, head, role=role))


def frozen(mesh: Mesh, config: AnyModel, head: Head, lora: Lora | None, *, dtype: Any, role: str) -> Any:
    """Parameters that are not trained, as shapes with shardings.

    Args:
      lora: Of the adapters beside them, or of the policy that they are a copy of.
    """
    layout = layout_of(mesh, config, head, role=role)
    shapes = _frozen_shapes(config, head, lora, dtype=dtype)
    if lora is not None and lora.quantize is not None:
        check_tiles(mesh, config, head, lora, TRAIN, role=role)
        layout = shardings(mesh, _frozen_dims(config, head, lora), TRAIN)
    return laid_out(shapes, layout)


def layout_in(tree: Any) -> Any:
    """The shardings of arrays, or of shapes with shardings."""
    return jax.tree.map(lambda leaf: leaf.sharding, tree)


def check_tiles(mesh: Mesh, config: AnyModel, head: Head, lora: Lora | None, rules: Rules, *, role: str) -> None:
    """Raise `Refusal` if quantised weights that share a scale would be parted."""
    shapes = _frozen_shapes(config, head, lora, dtype=jnp.float32)
    try:
        check_divisible(mesh, _frozen_dims(config, head, lora), shapes, rules, role=role)
    except ValueError as error:
        raise Refusal(
            f"{error}; it counts what shares a scale, up to {TILE} neighbours, which lora.quantize keeps together"
        ) from error


def policy_dims(config: AnyModel, lora: Lora | None) -> dict[str, Any]:
    """Names of the dimensions of a policy's weights: of its parameters and, where it has some, its adapters."""
    adapters = {} if lora is None else {"adapters": adapter_dims(config, "lm", lora)}
    return {"parameters": _frozen_dims(config, "lm", lora), **adapters}


def policy_shapes(config: AnyModel, lora: Lora | None, *, dtype: Any) -> dict[str, Any]:
    """Shapes of a policy's weights as they are trained."""
    if lora is None:
        return {"parameters": param_shapes(config, "lm", jnp.float32)}
    return {
        "parameters": _frozen_shapes(config, "lm", lora, dtype=dtype),
        "adapters": adapter_shapes(config, "lm", lora),
    }


def adapter_layout(mesh: Mesh, config: AnyModel, head: Head, lora: Lora, *, role: str) -> Any:
    """The training shardings of a role's adapters, checked to split evenly."""
    dims = adapter_dims(config, head, lora)
    check_divisible(mesh, dims, adapter_shapes(config, head, lora), TRAIN, role=role)
    return shardings(mesh, dims, TRAIN)


def _frozen_shapes(config: AnyModel, head: Head, lora: Lora | None, *, dtype: Any) -> Any:
    shapes = cast_shapes(param_dims(config, head), param_shapes(config, head, jnp.float32), dtype=dtype)
    kind = _kind(lora)
    return shapes if kind is None else jax.eval_shape(partial(quantized, kind=kind), shapes)


def _frozen_dims(config: AnyModel, head: Head, lora: Lora | None) -> dict[str, Any]:
    """Names of dimensions; the last of a scale counts tiles."""
    dims, kind = param_dims(config, head), _kind(lora)
    if kind is None:
        return dims
    return quantized(dims, kind, lambda names: Quantized(names, names, kind), is_leaf=lambda x: isinstance(x, tuple))


def _kind(lora: Lora | None) -> Quantization | None:
    return None if lora is None else lora.quantize

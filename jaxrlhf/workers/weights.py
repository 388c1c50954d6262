"""The trees of weights that roles hold: frozen, trained, and as they generate."""

from typing import Any

import jax.numpy as jnp
from jax.sharding import Mesh

from jaxrlhf.architecture import Head
from jaxrlhf.config import Lora
from jaxrlhf.models.lora import adapter_dims, adapter_shapes
from jaxrlhf.models.own_model import AnyModel
from jaxrlhf.models.parameters import param_dims, param_shapes
from jaxrlhf.parallel import TRAIN, cast_shapes, check_divisible, shardings


def held_shapes(config: AnyModel, head: Head, lora: Lora | None, *, dtype: Any) -> Any:
    """Shapes of the parameters of a trained role: float32 masters, or frozen where adapters are trained."""
    return param_shapes(config, head, jnp.float32) if lora is None else frozen_shapes(config, head, dtype=dtype)


def frozen_shapes(config: AnyModel, head: Head, *, dtype: Any) -> Any:
    """Shapes of parameters that are not trained."""
    return cast_shapes(param_dims(config, head), param_shapes(config, head, jnp.float32), dtype=dtype)


def policy_dims(config: AnyModel, lora: Lora | None) -> dict[str, Any]:
    """Names of the dimensions of a policy's weights: of its parameters and, where it has some, its adapters."""
    adapters = {} if lora is None else {"adapters": adapter_dims(config, "lm", lora)}
    return {"parameters": param_dims(config, "lm"), **adapters}


def policy_shapes(config: AnyModel, lora: Lora | None, *, dtype: Any) -> dict[str, Any]:
    """Shapes of a policy's weights as they are trained."""
    adapters = {} if lora is None else {"adapters": adapter_shapes(config, "lm", lora)}
    return {"parameters": held_shapes(config, "lm", lora, dtype=dtype), **adapters}


def adapter_layout(mesh: Mesh, config: AnyModel, head: Head, lora: Lora, *, role: str) -> Any:
    """The training shardings of a role's adapters, checked to split evenly."""
    dims = adapter_dims(config, head, lora)
    check_divisible(mesh, dims, adapter_shapes(config, head, lora), TRAIN, role=role)
    return shardings(mesh, dims, TRAIN)

"""Printed JSON lines, timing and measured models of the benchmark parts."""

import json
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh

from jaxrlhf import models
from jaxrlhf.config import FromScratch
from jaxrlhf.models.config import ModelConfig
from jaxrlhf.models.from_config import from_scratch
from jaxrlhf.planner.shapes import SHAPES
from jaxrlhf.runtime import compilation_cache

SIZES: dict[str, ModelConfig] = {
    "0.5B": SHAPES["Qwen/Qwen2.5-0.5B"],
    "1.5B": SHAPES["Qwen/Qwen2.5-1.5B"],
    "tiny": from_scratch(FromScratch(), tokens=512),
}
"""Model shapes by name; `tiny` is for trying the parts on CPU."""


def say(part: str, **figures: Any) -> None:
    """Print one JSON line of figures."""
    print(json.dumps({"part": part, "device": jax.devices()[0].device_kind, **figures}), flush=True)


def refused(error: Exception) -> str:
    """Return the first line of an error."""
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"[:400]


def one_device() -> Mesh:
    """Return a mesh of the first device."""
    return Mesh(np.array(jax.devices()[:1]), ("data",), axis_types=(AxisType.Auto,))


def seconds(call: Callable[[], Any], *, repeats: int = 5) -> float:
    """Return the median seconds of a call, after a first call that compiles."""
    jax.block_until_ready(call())
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(call())
        times.append(time.perf_counter() - start)
    return median(times)


def random_params(config: ModelConfig, dtype: Any) -> Any:
    """Return random parameters of a model on the first device."""

    def made(key: Any) -> Any:
        return jax.tree.map(lambda leaf: leaf.astype(dtype), models.init_params(config, "lm", key))

    return jax.jit(made)(jax.random.key(0))


def compute_dtype() -> Any:
    """Return bfloat16 on accelerators, and float32 on CPU, where the parts are only tried out."""
    return jnp.float32 if jax.default_backend() == "cpu" else jnp.bfloat16


compilation_cache.turn_on()

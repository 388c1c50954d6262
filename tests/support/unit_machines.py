"""Hardware whose rates are 1, so that seconds are counts, and small models with naive counts."""

import dataclasses
import math

import jax

from jaxrlhf import models
from jaxrlhf.models.config import Experts, ModelConfig
from jaxrlhf.planner.hardware import Hardware
from jaxrlhf.planner.plan import Cost
from jaxrlhf.planner.workload import Role, Software, Workload

FREE = 1e30
"""Rate so high that the work costs nothing."""

UNIT = Hardware(
    name="unit",
    machines=1,
    devices_per_machine=1024,
    memory_bytes=1.0,
    matmul_flops_per_s=1.0,
    memory_bytes_per_s=1.0,
    link_bytes_per_s=1.0,
    network_bytes_per_s=1.0,
    host_bytes_per_s=1.0,
    link_latency_s=0.0,
    network_latency_s=0.0,
    layer_overhead_s=0.0,
    dispatch_overhead_s=0.0,
    matmul_efficiency=1.0,
    memory_efficiency=1.0,
    link_efficiency=1.0,
    usable_memory=1.0,
)
STEPS = dataclasses.replace(UNIT, link_bytes_per_s=FREE, link_latency_s=1.0)
"""Hardware on which the seconds of collectives are the steps of their rings."""

DENSE = ModelConfig("llama", 64, 32, 48, 4, 4, 4, 8)
GROUPED = ModelConfig("llama", 64, 32, 48, 4, 4, 2, 8)
ROUTED = ModelConfig("llama", 64, 32, 48, 4, 4, 2, 8, experts=Experts(8, 2, 16, 24))
ALL_SPLIT = ModelConfig("llama", 64, 32, 64, 8, 8, 8, 8)
"""Model whose dimensions all split eight ways."""

WORK = Workload(prompts=8, responses=64, prompt_tokens=10, response_tokens=6, longest_tokens=30)
TOKENS = 64 * 16
HALVES = Software(
    weight_bytes=2,
    gradient_bytes=2,
    optimizer_bytes=4,
    compute_bytes=2,
    unstacks_layers=False,
    cache_copies=1.0,
    decode_tokens_per_dispatch=None,
)
"""Software in two bytes a number, without copies and program starts in generation."""


def trained(model: ModelConfig, **changes) -> Role:
    """Return a trained actor without rematerialization, with 4 rows in a microbatch."""
    settings = {"head": "lm", "trained": True, "rows_per_microbatch": 4, "remat": False}
    return Role("actor", model, **{**settings, **changes})


def naive_layer_flops(model: ModelConfig, *, tokens: float, context: float) -> float:
    """Return the operations of all matrix products of a decoder layer, two for each multiplication."""
    width, heads, kv_heads = model.hidden_size, model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    products = [(width, heads), (width, kv_heads), (width, kv_heads), (heads, width)]
    products += [(model.head_dim, context), (context, model.head_dim)] * model.num_heads
    if model.experts is None:
        products += [(width, model.intermediate_size)] * 2 + [(model.intermediate_size, width)]
    else:
        products.append((width, model.experts.count))
        for inner in [model.experts.intermediate_size] * model.experts.per_token + [
            model.experts.shared_intermediate_size
        ]:
            products += [(width, inner), (width, inner), (inner, width)]
    return sum(2 * tokens * before * after for before, after in products)


def count_weights(tree) -> int:
    """Return the number of entries of a tree of shapes."""
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(tree))


def weights_of(model: ModelConfig, head: str = "lm") -> int:
    """Return the number of weights of a model by its shapes."""
    return count_weights(models.param_shapes(model, head))


def parts(cost: Cost) -> list[float]:
    """Return the seconds of each part of a cost."""
    return [getattr(cost, field.name) for field in dataclasses.fields(cost)]

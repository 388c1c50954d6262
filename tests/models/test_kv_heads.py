"""Fewer key-value heads than tensor shards: eight devices train and generate what one does."""

import math
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from tiny_models import close

from jaxrlhf import models
from jaxrlhf.config import Lora, Sampling
from jaxrlhf.engine import Engine, Request
from jaxrlhf.models.config import FullHeads, LayerInputs, ModelConfig
from jaxrlhf.models.lora.lora import adapted, adapter_dims, adapter_shapes
from jaxrlhf.resharding.hybrid import HybridEngine
from jaxrlhf.sharding.mesh import BATCH_AXES, SLOT_AXES, TENSOR_AXES, mesh_of
from jaxrlhf.sharding.rules import TRAIN, shardings

ROWS, WIDTH = 4, 12
CONFIGS = {
    "two and biases": ModelConfig("qwen2", 32, 32, 64, 2, 8, 2, 8, qkv_bias=True),
    "one norm over both": ModelConfig("olmo2", 32, 32, 64, 2, 8, 1, 8, qk_norm=True, qk_norm_across_heads=True),
    "three of six": ModelConfig("llama", 32, 32, 64, 2, 12, 3, 8),
    "two, and one without a window": ModelConfig(
        *("gemma4_text", 32, 32, 64, 4, 8, 2, 8),
        qk_norm=True,
        value_norm=True,
        layer_scale=True,
        sliding_window=4,
        sliding_layers=(True, False) * 2,
        full_heads=FullHeads(1, 16, values_are_keys=True),
        borrowing_layers=2,
        layer_inputs=LayerInputs(8, 32),
    ),
}


def run(config, lora, cache, **sizes):
    """Gradients of adapters (or of all parameters), log-probabilities, and what is generated after the switch."""
    mesh = mesh_of(sizes, jax.devices()[: math.prod(sizes.values())])
    rng = np.random.default_rng(0)

    def draw(shape):
        return jnp.asarray(0.2 * rng.standard_normal(shape.shape), jnp.float32)

    dims, shapes = models.param_dims(config, "lm"), models.param_shapes(config, "lm")
    params = {"parameters": jax.tree.map(draw, shapes)}
    dims = {"parameters": dims}
    if lora is not None:
        params["adapters"] = jax.tree.map(draw, adapter_shapes(config, "lm", lora))
        dims["adapters"] = adapter_dims(config, "lm", lora)
    params = jax.device_put(params, shardings(mesh, dims, TRAIN))
    by_row = NamedSharding(mesh, PartitionSpec(BATCH_AXES))
    execution = models.choose_execution(config, jnp.float32, mesh, row_axes=BATCH_AXES, head_axes=TENSOR_AXES)
    execution = replace(execution, mesh=mesh, row_axes=BATCH_AXES)

    def loss(params, token_RW, position_RW, segment_RW):
        whole = adapted(params["parameters"], params.get("adapters", {}))
        rows = token_RW, position_RW, segment_RW
        hidden_RWD = models.hidden_states(whole, config, *rows, execution=execution).hidden_RWD
        logp_RW = models.token_logp(whole, config, hidden_RWD, token_RW).logp
        return (logp_RW * jnp.sin(jnp.arange(logp_RW.size)).reshape(logp_RW.shape)).sum(), logp_RW

    token_RW = rng.integers(0, 32, (ROWS, WIDTH), dtype=np.int32)
    position_RW = np.broadcast_to(np.arange(WIDTH, dtype=np.int32), token_RW.shape)
    rows = jax.device_put((token_RW, position_RW, np.ones_like(token_RW)), by_row)
    learnt = jax.device_get(jax.jit(jax.grad(loss, has_aux=True))(params, *rows))

    hybrid = HybridEngine.by_rules(mesh, mesh, dims, params, dtype=jnp.float32)
    before = jax.device_get(params)
    weights, _ = hybrid.to_generation(params)
    axes = {"row_axes": SLOT_AXES, "head_axes": ("tensor",)}
    engine = Engine(
        config,
        mesh,
        slots=6,
        max_prompt_tokens=12,
        max_response_tokens=8,
        stop_tokens=(3,),
        decode_tokens_per_dispatch=4,
        slot_axes=SLOT_AXES,
        kv_head_axis="tensor",
        execution=models.choose_execution(config, jnp.float32, mesh, **axes, decodes=True, cache=cache),
    )
    engine.load(adapted(weights["parameters"], weights.get("adapters", {})), version=0)
    requests = [Request(i, tuple(token_RW[i % ROWS, : 3 + i % ROWS].tolist())) for i in range(8)]
    completions = engine.generate(requests, Sampling(temperature=0.8), seed=11)
    params, _ = hybrid.to_training(weights, params)
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(params), before)
    return learnt, [c.tokens for c in completions], [np.asarray(c.logps) for c in completions]


@pytest.mark.parametrize(
    ("name", "lora", "cache", "sizes"),
    [
        pytest.param("two and biases", Lora(rank=2), "slots", {"data": 2, "tensor": 4}, marks=pytest.mark.seeds),
        pytest.param(
            *("one norm over both", None, "pages", {"data": 2, "tensor": 2, "micro_tensor": 2}), marks=pytest.mark.seeds
        ),
        pytest.param("three of six", None, "slots", {"fsdp": 4, "tensor": 2}, marks=pytest.mark.slow),
        pytest.param(
            *("two, and one without a window", Lora(rank=2, targets=("query", "value")), "slots"),
            {"data": 2, "tensor": 4},
            marks=pytest.mark.seeds,
        ),
    ],
)
def test_heads_that_do_not_split_are_repeated(name, lora, cache, sizes):
    learnt, tokens, logps = run(CONFIGS[name], lora, cache, **sizes)
    expected, same_tokens, same_logps = run(CONFIGS[name], lora, cache)
    close(learnt, expected)
    assert tokens == same_tokens
    close(logps, same_logps)

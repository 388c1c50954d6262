"""Bytes that are predicted, against what XLA says a compiled program needs and what real parameters take."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from unit_machines import ALL_SPLIT, DENSE, ROUTED, weights_of

from jaxrlhf import models
from jaxrlhf.architecture import ModelConfig
from jaxrlhf.config import Layout
from jaxrlhf.parallel import (
    GENERATE,
    TRAIN,
    activation_bytes,
    factored_mesh,
    generation_mesh,
    logit_bytes,
    shard_bytes,
    shardings,
)
from jaxrlhf.parallel.memory import (
    cache_bytes_per_token,
    inference_activation_bytes,
    training_activation_bytes,
    weights_generating,
    weights_held,
)

ALONE = Layout(1)


@pytest.mark.parametrize("remat", [False, True])
def test_activations_and_logits_are_about_what_xla_allocates(remat: bool) -> None:
    config = ModelConfig("qwen2", 512, 128, 384, 6, 4, 4, 32, qkv_bias=True, tie_embeddings=True)
    rows, width = 8, 256
    ints = jax.ShapeDtypeStruct((rows, width), jnp.int32)

    def loss(params, token, position, segment):
        hidden = models.hidden_states(params, config, token, position, segment, remat=remat, dtype=jnp.float32)
        return models.token_logp(params, config, hidden, token, temperature=1.0).logp.sum()

    shapes = models.param_shapes(config, "lm")
    compiled = jax.jit(jax.value_and_grad(loss)).lower(shapes, ints, ints, ints).compile()
    allocated = compiled.memory_analysis().temp_size_in_bytes
    estimated = activation_bytes(config, tokens=rows * width, row_tokens=width, itemsize=4, remat=remat)
    estimated += logit_bytes(config, tokens=rows * width)
    assert 0.5 < estimated / allocated < 2
    sizes = {"tokens": rows * width, "row_tokens": width, "itemsize": 4, "remat": remat}
    assert 0.5 < training_activation_bytes(config, "lm", ALONE, **sizes) / allocated < 2


@pytest.mark.parametrize("head", ["lm", "value"])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("layout", [
    Layout(8), Layout(1, 8), Layout(2, 4), Layout(1, 1, 1, 8), Layout(1, 1, 8), Layout(1, 1, 2, 4, 1, 2),
    Layout(1, 2, 2, 2, 2, 1), Layout(2, 2, 1, 2, 1, 2), Layout(2, 1, 4, 1, 2, 1),
])  # fmt: skip
def test_devices_hold_the_share_of_the_weights_that_is_predicted(layout: Layout, tied: bool, head: Any) -> None:
    config = replace(ALL_SPLIT, tie_embeddings=tied)
    dims, shapes = models.param_dims(config, head), models.param_shapes(config, head)
    # What is split by stage alone, or not at all: the norms, and the vector of a value head.
    vectors = (2 * 8 + 1 + (head == "value")) * 32
    held = shard_bytes(shapes, shardings(factored_mesh(layout, jax.devices()), dims, TRAIN)) / 4
    assert 0 <= held - weights_held(config, head, layout) <= vectors < weights_of(config, head) / 40
    if head == "lm":
        generating = shard_bytes(shapes, shardings(generation_mesh(layout, jax.devices()), dims, GENERATE)) / 4
        assert 0 <= generating - weights_generating(config, layout) <= vectors


def test_an_expert_model_holds_all_its_experts() -> None:
    layer = 2 * 32 * 32 + 2 * 32 * 16 + 32 * 8 + 3 * 32 * (8 * 16 + 24) + 2 * 32
    assert weights_held(ROUTED, "lm", Layout(2, 2, 2, 1)) == (4 * layer + 2 * 64 * 32 + 32) / 4


@pytest.mark.parametrize(("kv_heads", "itemsize", "dtype"), [(4, 2, jnp.bfloat16), (2, 4, jnp.float32)])
def test_a_cached_token_takes_what_the_cache_allocates_for_it(kv_heads: int, itemsize: int, dtype: Any) -> None:
    config = replace(DENSE, num_kv_heads=kv_heads)
    cache = jax.eval_shape(lambda: models.empty_cache(config, slots=6, capacity=50, dtype=dtype))
    whole = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(cache)) / (6 * 50)
    assert cache_bytes_per_token(config, Layout(8), itemsize=itemsize) == whole
    assert cache_bytes_per_token(config, Layout(1, 1, 8), itemsize=itemsize) == whole
    assert cache_bytes_per_token(config, Layout(1, 1, 2, 4, 2, 2), itemsize=itemsize) == whole / 4
    # A head cannot be cut: more shards than heads hold copies.
    assert cache_bytes_per_token(config, Layout(1, 1, 1, 4, 1, 4), itemsize=itemsize) == whole / min(4, kv_heads)


def test_scoring_holds_about_what_xla_allocates() -> None:
    config = ModelConfig("llama", 1024, 128, 384, 6, 4, 2, 32)
    rows, width = 8, 256
    ints = jax.ShapeDtypeStruct((rows, width), jnp.int32)

    def forward(params, token, position, segment):
        hidden = models.hidden_states(params, config, token, position, segment, dtype=jnp.float32)
        return models.token_logp(params, config, hidden, token).logp

    compiled = jax.jit(forward).lower(models.param_shapes(config, "lm"), ints, ints, ints).compile()
    allocated = compiled.memory_analysis().temp_size_in_bytes
    estimated = inference_activation_bytes(config, "lm", ALONE, tokens=rows * width, row_tokens=width, itemsize=4)
    assert 0.5 < estimated / allocated < 2


def test_activations_grow_with_tokens_and_shrink_with_everything_that_splits_or_recomputes_them() -> None:
    config = ModelConfig("llama", 4096, 128, 384, 8, 4, 4, 32)

    def trains(layout: Layout = ALONE, *, tokens: float = 4096, row_tokens: int = 256, remat: bool = True) -> float:
        return training_activation_bytes(
            config, "lm", layout, tokens=tokens, row_tokens=row_tokens, itemsize=2, remat=remat
        )

    def scores(layout: Layout = ALONE, *, tokens: float = 4096) -> float:
        return inference_activation_bytes(config, "lm", layout, tokens=tokens, row_tokens=256, itemsize=2)

    for remat in (False, True):
        grown = [trains(tokens=tokens, remat=remat) for tokens in (256, 1024, 4096, 16384)]
        assert grown == sorted(set(grown))
        assert (
            trains(row_tokens=0, remat=remat)
            < trains(row_tokens=256, remat=remat)
            < trains(row_tokens=512, remat=remat)
        )
        for layout in (Layout(1, 1, 2), Layout(1, 1, 1, 2)):
            assert trains(layout, remat=remat) < trains(remat=remat)
        # Rows are split before; replicas and shards of weights change nothing.
        assert trains(Layout(4, 2), remat=remat) == trains(remat=remat)
    assert scores() < trains() < trains(remat=False)
    assert scores(Layout(1, 1, 1, 2)) < scores() < scores(tokens=8192)
    # Of 4096 tokens the logits of 1024 exist at a time, with their gradient in float32.
    assert trains() - training_activation_bytes(
        config, "value", ALONE, tokens=4096, row_tokens=256, itemsize=2, remat=True
    ) == 2 * 1024 * 4096 * 4  # fmt: skip


@pytest.mark.parametrize(("stage", "tensor"), [(1, 1), (2, 1), (1, 2), (4, 2)])
def test_a_device_keeps_its_layers_and_its_shards_of_them(stage: int, tensor: int) -> None:
    config, layout = ModelConfig("llama", 4096, 128, 384, 8, 4, 4, 32), Layout(1, 1, stage, tensor)
    # Of a token: queries, keys, values and what is mixed of them; four of the MLP; scores and weights of 256 positions.
    split = [4 * 32] * 4 + [384] * 4 + [4 * 256] * 2
    # The residual stream before attention and MLP, and the norms of both.
    layer = 4 * 128 + sum(split) / tensor
    sizes = {"tokens": 4096, "row_tokens": 256, "itemsize": 2}
    for head, logits in [("value", 0), ("lm", 2 * 1024 * 4096 * 4 / (stage * tensor))]:
        kept = training_activation_bytes(config, head, layout, **sizes, remat=False)
        assert kept == 4096 * 8 / stage * layer * 2 + logits
        inputs = training_activation_bytes(config, head, layout, **sizes, remat=True)
        assert inputs == 4096 * (8 / stage * 128 + layer) * 2 + logits
        assert inference_activation_bytes(config, head, layout, **sizes) == 4096 * layer * 2 + logits

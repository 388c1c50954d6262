"""A decoder with experts on one device and on eight, packed, decoded and generated."""

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jaxrlhf import models
from jaxrlhf.config import Layout, Sampling
from jaxrlhf.engine import Engine, Request
from jaxrlhf.models.config import Experts, ModelConfig
from jaxrlhf.models.decoder import hidden_states
from jaxrlhf.models.lora.quantized import quantize
from jaxrlhf.models.moe.experts import RouterInputs
from jaxrlhf.resharding.hybrid import HybridEngine
from jaxrlhf.sharding.mesh import (
    BATCH_AXES,
    EXPERT_AXES,
    SLOT_AXES,
    STAGE_AXES,
    TENSOR_AXES,
    WEIGHT_AXES,
    factored_mesh,
    generation_mesh,
    mesh_of,
)
from jaxrlhf.sharding.rules import TRAIN, check_divisible, shardings

MODEL = ModelConfig(
    family="qwen3_moe",
    vocab_size=32,
    hidden_size=16,
    intermediate_size=32,
    num_layers=2,
    num_heads=4,
    num_kv_heads=4,
    head_dim=8,
    qk_norm=True,
    experts=Experts(8, 2, 8, shared_intermediate_size=8, scores="sigmoid", bias=True),
)
ROWS, WIDTH = 8, 12


@pytest.fixture(scope="module")
def params():
    """Weights large enough that every part shows, the bias of the router included."""
    rng = np.random.default_rng(0)

    def draw(param):
        return ((param.init == "ones") + 0.2 * rng.standard_normal(param.shape)).astype(np.float32)

    return jax.tree.map(draw, models.declare(MODEL, "lm"))


@pytest.fixture(scope="module")
def rows():
    """Two sequences and padding in each row."""
    token_RW = np.random.default_rng(1).integers(0, 32, (ROWS, WIDTH), dtype=np.int32)
    segment_RW = np.tile(np.repeat(np.array([1, 2, 0], np.int32), [5, 6, 1]), (ROWS, 1))
    position_RW = np.tile(np.r_[0:5, 0:6, 0].astype(np.int32), (ROWS, 1))
    return token_RW, position_RW, segment_RW


AGAIN = models.Execution(remat=True)


def execution_of(mesh, *, dtype=jnp.float32, pipeline=None):
    axes = {"row_axes": BATCH_AXES, "head_axes": TENSOR_AXES, "expert_axes": EXPERT_AXES}
    return replace(models.choose_execution(MODEL, dtype, mesh, **axes, remat=True), pipeline=pipeline)


@pytest.mark.parametrize(
    ("layout", "quantized"),
    [
        pytest.param(Layout(1, 8), False, id="fsdp, float32"),
        pytest.param(Layout(2, expert=4), True, id="expert, nf4"),
        pytest.param(None, True, marks=pytest.mark.slow, id="alone, nf4"),
    ],
)
def test_no_copy_of_the_experts_waits_for_the_backward_pass(layout, quantized) -> None:
    execution = models.Execution(jnp.bfloat16)
    if layout is not None:
        execution = replace(execution_of(factored_mesh(layout, jax.devices()), dtype=jnp.bfloat16), remat=False)
    params, tokens = models.param_shapes(MODEL, "lm"), jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.int32)
    experts = params["layers"]["mlp"]["experts"]
    if quantized:
        experts |= jax.eval_shape(functools.partial(jax.tree.map, lambda leaf: quantize(leaf, "nf4")), experts)

    def derivative(params, tokens):
        def forward(embed):
            whole = {**params, "embed": embed}
            return models.hidden_states(whole, MODEL, tokens, tokens, tokens, execution=execution).hidden_RWD

        return jax.vjp(forward, params["embed"])[1]

    kept = jax.tree.leaves(jax.eval_shape(derivative, params, tokens))
    assert (MODEL.num_layers, ROWS, WIDTH, MODEL.hidden_size) in {leaf.shape for leaf in kept}  # activations are
    found = [leaf for leaf in kept if leaf.shape[-2:] in ((16, 8), (8, 16)) and leaf.size >= 2 * 8 * 16 * 8]
    assert {(leaf.ndim, leaf.dtype.name) for leaf in found} == (set() if quantized else {(4, "float32")})


@functools.partial(jax.jit, static_argnums=2)
def slopes(params, rows, execution=AGAIN):
    """Logits, what routers did, and gradients of a sum over both."""

    def total(params):
        how = {"router": RouterInputs(rows[2]), "execution": execution}
        hidden_RWD, routed = hidden_states(params, MODEL, *rows, **how)
        logits_RWV = models.logits(params, MODEL, hidden_RWD)
        weight_RWV = jnp.cos(jnp.arange(logits_RWV.size, dtype=jnp.float32)).reshape(logits_RWV.shape)
        return (weight_RWV * logits_RWV).sum() + routed.loss_RW.sum(), (logits_RWV, routed)

    return jax.grad(total, has_aux=True)(params)


@pytest.fixture(scope="module")
def expected(params, rows):
    return jax.tree.map(np.asarray, slopes(params, rows))


@pytest.mark.slow
def test_logits_and_gradients_on_eight_devices_are_those_on_one(params, rows, expected):
    mesh = factored_mesh(Layout(data=1, fsdp=2, expert=2, tensor=2), jax.devices())
    layout = shardings(mesh, models.param_dims(MODEL, "lm"), TRAIN)
    by_row = NamedSharding(mesh, PartitionSpec(BATCH_AXES))
    pipeline = models.pipeline_over(mesh, STAGE_AXES, row_axes=BATCH_AXES, weight_axes=WEIGHT_AXES)
    execution = execution_of(mesh, pipeline=pipeline)
    many = slopes(jax.device_put(params, layout), jax.device_put(rows, by_row), execution)
    real = np.array(rows[2]) > 0
    (_, (ours_RWV, ours)), (_, (theirs_RWV, theirs)) = many, expected
    np.testing.assert_allclose(np.asarray(ours_RWV)[real], theirs_RWV[real], atol=1e-4)
    np.testing.assert_array_equal(np.asarray(ours.choice_RWk)[:, real], theirs.choice_RWk[:, real])
    for a, b in zip(jax.tree.leaves(many[0]), jax.tree.leaves(expected[0]), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-4 * max(1, np.abs(b).max()))


def generated(params, layout, devices):
    """Responses from weights that were switched to the generation layout."""
    mesh, generation = factored_mesh(layout, devices), generation_mesh(layout, devices)
    dims, shapes = models.param_dims(MODEL, "lm"), models.param_shapes(MODEL, "lm")
    hybrid = HybridEngine.by_rules(mesh, generation, dims, shapes, dtype=jnp.float32)
    weights, _ = hybrid.to_generation(jax.device_put(params, hybrid.train))
    engine = Engine(
        MODEL,
        generation,
        slots=8,
        max_prompt_tokens=8,
        max_response_tokens=6,
        stop_tokens=(3,),
        decode_tokens_per_dispatch=3,
        slot_axes=SLOT_AXES,
        kv_head_axis="tensor",
        execution=models.choose_execution(
            MODEL, jnp.float32, generation, row_axes=SLOT_AXES, head_axes=("tensor",), expert_axes=EXPERT_AXES
        ),
    )
    engine.load(weights, version=0)
    requests = [Request(index, (1 + index, 2, 7 * index % 32)) for index in range(8)]
    return hybrid, engine.generate(requests, Sampling(temperature=0.8), seed=11)


@pytest.mark.slow
def test_eight_devices_generate_with_divided_experts_what_one_does(params):
    """Experts stay where they are when layouts switch; all else is gathered."""
    _, expected = generated(params, Layout(), jax.devices()[:1])
    hybrid, completions = generated(params, Layout(fsdp=2, expert=2, tensor=2, generation_tensor=1), jax.devices())
    assert hybrid.refines
    gate = hybrid.generate["layers"]["mlp"]["experts"]["gate"].shard_shape((2, 8, 16, 8))
    assert gate == (2, 4, 16, 8), "half of the experts, all of each"
    for one, other in zip(completions, expected, strict=True):
        assert one.tokens == other.tokens
        np.testing.assert_allclose(one.logps, other.logps, atol=1e-5)


@pytest.mark.parametrize(
    ("model", "sizes", "message"),
    [
        (replace(MODEL, experts=None), {"expert": 2}, "actor: expert=2 requires a model with experts; set expert=1"),
        (MODEL, {"stage": 2}, "actor: stage=2 does not support layers with experts"),
        (replace(MODEL, experts=Experts(3, 2, 8)), {"expert": 2}, "actor: the model's 'experts' dimension of 3"),
    ],
)
def test_layouts_that_do_not_fit_the_experts_are_refused(model, sizes, message):
    mesh = mesh_of(sizes, jax.devices()[:2])
    with pytest.raises(ValueError, match=message):
        check_divisible(mesh, models.param_dims(model, "lm"), models.param_shapes(model, "lm"), TRAIN, role="actor")

"""Predicted bytes, compared with XLA's memory of compiled programs and with sharded parameters."""

import itertools
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from compiled import to_read
from unit_machines import ALL_SPLIT, DENSE, HALVES, ROUTED, UNIT, WORK, trained, weights_of

from jaxrlhf import models
from jaxrlhf.config import Layout, Lora
from jaxrlhf.models.attention.attention_xla import LONG_ROW, attend_blocks
from jaxrlhf.models.config import Experts, ModelConfig
from jaxrlhf.models.counts import weight_counts
from jaxrlhf.models.lora.lora import adapter_dims, adapter_shapes
from jaxrlhf.models.memory import (
    adapters_held,
    inference_activation_bytes,
    layer_activation_bytes,
    score_bytes,
    training_activation_bytes,
    weights_held,
)
from jaxrlhf.planner.cost.batches import batch_of
from jaxrlhf.planner.cost.memory import weights_generating
from jaxrlhf.planner.cost.simulate import update_bytes
from jaxrlhf.planner.plan import PlacementProblem
from jaxrlhf.sharding.mesh import factored_mesh, generation_mesh
from jaxrlhf.sharding.rules import GENERATE, TRAIN, shard_bytes, shardings

ALONE = Layout(1)


def test_a_program_to_read_says_what_the_one_to_run_says() -> None:
    program = jax.jit(lambda x: jnp.tanh(x @ x).sum()).lower(jax.ShapeDtypeStruct((64, 64), jnp.float32))
    optimised = {"xla_backend_optimization_level": 3, "xla_llvm_disable_expensive_passes": False}  # XLA's own defaults
    read, run = to_read(program), program.compile(compiler_options=optimised)
    assert read.as_text() == run.as_text()
    assert str(read.memory_analysis()) == str(run.memory_analysis())
    assert read.cost_analysis() == run.cost_analysis()


@pytest.mark.slow
@pytest.mark.parametrize("remat", [False, True])
def test_activations_and_logits_are_about_what_xla_allocates(remat: bool) -> None:
    config = ModelConfig("qwen2", 512, 128, 384, 6, 4, 4, 32, qkv_bias=True, tie_embeddings=True)
    rows, width = 8, 256
    ints = jax.ShapeDtypeStruct((rows, width), jnp.int32)

    def loss(params, token, position, segment):
        hidden = models.hidden_states(
            params, config, token, position, segment, execution=models.Execution(remat=remat)
        ).hidden_RWD
        return models.token_logp(params, config, hidden, token, temperature=1.0).logp.sum()

    shapes = models.param_shapes(config, "lm")
    compiled = to_read(jax.jit(jax.value_and_grad(loss)).lower(shapes, ints, ints, ints))
    allocated = compiled.memory_analysis().temp_size_in_bytes
    sizes = {"tokens": rows * width, "row_tokens": width, "itemsize": 4, "remat": remat}
    assert 0.7 < training_activation_bytes(config, "lm", ALONE, **sizes) / allocated < 1.5


@pytest.mark.parametrize(("dtype", "itemsize", "rows", "width"), [(jnp.float32, 4, 8, 256), (jnp.bfloat16, 2, 1, 2048)])
def test_layers_keep_about_what_their_derivative_takes_over_from_the_forward_pass(
    dtype: Any, itemsize: int, rows: int, width: int
) -> None:
    config = ModelConfig("qwen2", 512, 128, 384, 6, 4, 4, 32, qkv_bias=True)
    estimated = layer_activation_bytes(config, itemsize=itemsize)
    if width < LONG_ROW:
        estimated += score_bytes(config, row_tokens=width, itemsize=itemsize)
    assert 0.75 < estimated / kept_bytes(config, dtype, rows, width) < 1.1


@pytest.mark.parametrize("config", [
    ModelConfig("qwen3", 512, 128, 384, 6, 8, 2, 32, qk_norm=True),
    ModelConfig("olmo2", 512, 128, 384, 6, 4, 4, 32, norms="post", qk_norm=True, qk_norm_across_heads=True),
    ModelConfig("gemma2", 512, 128, 384, 6, 4, 4, 32, norms="sandwich", activation="gelu_tanh"),
    ModelConfig("qwen3_moe", 512, 128, 384, 6, 4, 4, 32, qk_norm=True, experts=Experts(8, 2, 32)),
], ids=lambda config: config.family)  # fmt: skip
def test_what_layers_keep_knows_of_every_norm_and_of_experts(config: ModelConfig) -> None:
    estimated = layer_activation_bytes(config, itemsize=2) + score_bytes(config, row_tokens=256, itemsize=2)
    assert 0.85 < estimated / kept_bytes(config, jnp.bfloat16, 8, 256) < 1.1


def kept_bytes(config: ModelConfig, dtype: Any, rows: int, width: int) -> float:
    """Return the bytes per token and layer that the forward pass of six layers keeps for the backward pass."""
    ints, shapes = jax.ShapeDtypeStruct((rows, width), jnp.int32), models.param_shapes(config, "lm")

    def derivative(params, token, position, segment):
        def forward(layers):
            return models.hidden_states(
                {**params, "layers": layers}, config, token, position, segment, execution=models.Execution(dtype)
            ).hidden_RWD

        return jax.vjp(forward, params["layers"])[1]

    kept = jax.eval_shape(derivative, shapes, ints, ints, ints)
    # Arrays stacked over layers, without weights and without arrays smaller than the tokens.
    weights = {leaf.shape for leaf in jax.tree.leaves(shapes)}
    arrays = [leaf for leaf in jax.tree.leaves(kept) if leaf.shape[:1] == (6,) and leaf.shape not in weights]
    found = sum(leaf.size * leaf.dtype.itemsize for leaf in arrays if leaf.size >= 6 * rows * width)
    return found / (6 * rows * width)


@pytest.mark.parametrize(("width", "keeps"), [(LONG_ROW - 1, True), (LONG_ROW, False)])
def test_rows_keep_their_scores_up_to_the_width_that_the_estimate_says(width: int, keeps: bool) -> None:
    heads, segment = jax.ShapeDtypeStruct((1, width, 2, 4), jnp.float32), jax.ShapeDtypeStruct((1, width), jnp.int32)
    kept = jax.eval_shape(lambda *arrays: jax.vjp(lambda *three: attend_blocks(*three, arrays[3]), *arrays[:3])[1],
                          heads, heads, heads, segment)  # fmt: skip
    assert (max(leaf.size for leaf in jax.tree.leaves(kept)) >= 2 * (width // 8) * width) == keeps


@pytest.mark.parametrize(
    ("head", "sizes"), [("lm", {}), ("lm", {"tie_embeddings": True}), ("lm", {"num_kv_heads": 2}), ("value", {})]
)
@pytest.mark.parametrize("layout", [
    Layout(8), Layout(1, 8), Layout(2, 4), Layout(1, 1, 1, 8), Layout(1, 1, 8), Layout(1, 1, 2, 4, 1, 2),
    Layout(1, 2, 2, 2, 2, 1), Layout(2, 2, 1, 2, 1, 2), Layout(2, 1, 4, 1, 2, 1),
])  # fmt: skip
def test_devices_hold_the_share_of_the_weights_that_is_predicted(layout: Layout, head: Any, sizes: Any) -> None:
    config = replace(ALL_SPLIT, **sizes)
    dims, shapes = models.param_dims(config, head), models.param_shapes(config, head)
    # Norms and the vector of a value head are split by stages only, or not at all.
    vectors = (2 * 8 + 1 + (head == "value")) * 32
    held = shard_bytes(shapes, shardings(factored_mesh(layout, jax.devices()), dims, TRAIN)) / 4
    assert 0 <= held - weights_held(config, head, layout) <= vectors < weights_of(config, head) / 40
    if head == "lm":
        generating = shard_bytes(shapes, shardings(generation_mesh(layout, jax.devices()), dims, GENERATE)) / 4
        assert 0 <= generating - weights_generating(config, layout) <= vectors


@pytest.mark.parametrize("layout", [
    Layout(2, 1, 1, 4), Layout(2, 1, 1, 4, 1, 4), Layout(1, 2, 1, 4, 1, 2), Layout(1, 1, 2, 4, 2, 1),
    Layout(2, 2, 1, 2, 1, 4),
], ids=str)  # fmt: skip
def test_key_value_heads_that_do_not_split_are_whole_on_every_device(layout: Layout) -> None:
    config = replace(ALL_SPLIT, num_heads=8, num_kv_heads=2, head_dim=8, qkv_bias=True)
    lora = Lora(rank=4, targets=("query", "key", "value", "down"))
    mesh = factored_mesh(layout, jax.devices())
    dims, shapes = models.param_dims(config, "lm"), models.param_shapes(config, "lm")
    held = shard_bytes(shapes, shardings(mesh, dims, TRAIN)) / 4
    generating = shard_bytes(shapes, shardings(generation_mesh(layout, jax.devices()), dims, GENERATE)) / 4
    vectors = (2 * 8 + 1) * 32 + 8 * (8 + 2 * 2) * 8  # norms and biases, which not every axis splits
    assert 0 <= held - weights_held(config, "lm", layout) <= vectors
    assert 0 <= generating - weights_generating(config, layout) <= vectors
    adapters = shardings(mesh, adapter_dims(config, "lm", lora), TRAIN)
    assert adapters_held(config, lora, layout) == shard_bytes(adapter_shapes(config, "lm", lora), adapters) / 4


@pytest.mark.parametrize("layout", [ALONE, Layout(2, 4), Layout(1, 2, 1, 4)], ids=str)
def test_copies_that_compilers_make_are_counted(layout: Layout) -> None:
    """Count copies of the TPU compiler: cast weights, activations of MLPs, and gradients that are split by width.

    The GPU compiler copies output matrices of attention and MLPs, and all experts.
    """
    lora, width, shards = Lora(rank=2), layout.fsdp > 1, layout.fsdp * layout.tensor

    def more(compiler: str, model: ModelConfig = DENSE, adapters: Lora | None = None, **changes: Any) -> float:
        role, software = trained(model, remat=True, lora=adapters), replace(HALVES, **{"weight_bytes": 4} | changes)
        plain, copied = (
            update_bytes(PlacementProblem((role,), WORK, each, UNIT), role, layout)
            for each in (software, replace(software, compiler=compiler))
        )
        return copied - plain

    layers = 4 * (4 * 32 * 32 + 3 * 32 * 48 + 2 * 32)
    tokens = batch_of(trained(DENSE), layout, WORK.responses, WORK, HALVES).tokens
    widened = tokens * 2 * 6 * 48 / layout.tensor
    assert more("tpu") - more("tpu", weight_bytes=2) == pytest.approx(2 * layers / shards, rel=0.05)
    learnt = {None: weight_counts(DENSE, "lm").total / shards, lora: adapters_held(DENSE, lora, layout)}
    for (adapters, count), gradient_bytes in itertools.product(learnt.items(), (2, 4)):
        copied = more("tpu", adapters=adapters, weight_bytes=2, gradient_bytes=gradient_bytes)
        expected = widened + HALVES.compute_bytes * count * width
        assert copied == pytest.approx(expected), "gradients are gathered in the compute dtype"
    for model, inner, experts in ((DENSE, 48, 0), (ROUTED, 24, 4 * 8 * 3 * 32 * 16)):
        turned = 4 * (4 * 8 + inner) * 32 + experts
        assert more("gpu", model) == pytest.approx(4 * turned * width / shards)


def test_scoring_holds_about_what_xla_allocates() -> None:
    config = ModelConfig("llama", 1024, 128, 384, 6, 4, 2, 32)
    rows, width = 8, 256
    ints = jax.ShapeDtypeStruct((rows, width), jnp.int32)

    def forward(params, token, position, segment):
        hidden = models.hidden_states(params, config, token, position, segment).hidden_RWD
        return models.token_logp(params, config, hidden, token).logp

    compiled = to_read(jax.jit(forward).lower(models.param_shapes(config, "lm"), ints, ints, ints))
    allocated = compiled.memory_analysis().temp_size_in_bytes
    estimated = inference_activation_bytes(config, "lm", ALONE, tokens=rows * width, row_tokens=width, itemsize=4)
    assert 0.5 < estimated / allocated < 2


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "remat"), [(jnp.float32, True), (jnp.bfloat16, False)])
def test_long_rows_take_about_what_xla_allocates(dtype: Any, remat: bool) -> None:
    config, width = ModelConfig("llama", 512, 64, 128, 3, 4, 2, 16), 2048
    itemsize = 4  # on CPU XLA computes bfloat16 in float32
    ints = jax.ShapeDtypeStruct((1, width), jnp.int32)
    shapes, sizes = models.param_shapes(config, "lm"), {"tokens": width, "row_tokens": width, "itemsize": itemsize}

    def loss(params, token, position, segment):
        hidden = models.hidden_states(
            params, config, token, position, segment, execution=models.Execution(dtype, remat)
        ).hidden_RWD
        return models.token_logp(params, config, hidden, token).logp.sum()

    def allocated(program: Any) -> int:
        compiled = to_read(jax.jit(program).lower(shapes, ints, ints, ints))
        return compiled.memory_analysis().temp_size_in_bytes

    estimated = training_activation_bytes(config, "lm", ALONE, **sizes, remat=remat)
    assert 0.7 < estimated / allocated(jax.value_and_grad(loss)) < 1.5
    if not remat:
        estimated = inference_activation_bytes(config, "lm", ALONE, **sizes)
        assert 0.7 < estimated / allocated(loss) < 1.3


@pytest.mark.slow
def test_adding_a_microbatchs_gradient_takes_a_second_gradient() -> None:
    config = ModelConfig("llama", 512, 256, 1024, 6, 4, 2, 64)
    ints, shapes = jax.ShapeDtypeStruct((1, 16), jnp.int32), models.param_shapes(config, "lm", jnp.float32)

    def loss(params, token, position, segment):
        hidden = models.hidden_states(
            params, config, token, position, segment, execution=models.Execution(remat=True)
        ).hidden_RWD
        return models.token_logp(params, config, hidden, token).logp.sum()

    def add(params, gradient, *rows):
        return jax.tree.map(jnp.add, gradient, jax.grad(loss)(params, *rows))

    alone = to_read(jax.jit(jax.grad(loss)).lower(shapes, ints, ints, ints)).memory_analysis()
    # As in the workers: the new sum takes the memory of the donated sum.
    added = to_read(jax.jit(add, donate_argnums=1).lower(shapes, shapes, ints, ints, ints)).memory_analysis()
    gradient = 4 * weights_of(config)
    assert added.alias_size_in_bytes == gradient
    assert 0.9 * gradient < added.temp_size_in_bytes - alone.temp_size_in_bytes < 1.05 * gradient


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
        assert trains(Layout(1, 1, 1, 2), remat=remat) < trains(remat=remat)
        if not remat:  # with recomputation, stages also keep their inputs and outputs
            assert trains(Layout(1, 1, 2), remat=remat) < trains(remat=remat)
        # Replicas and shards of weights change nothing, as `tokens` is per device.
        assert trains(Layout(4, 2), remat=remat) == trains(remat=remat)
    assert scores() < trains() < trains(remat=False)
    assert scores(Layout(1, 1, 1, 2)) < scores() < scores(tokens=8192)
    # With few tokens all logits and their gradient exist at once, after the layers' activations are freed.
    few = {"tokens": 64, "row_tokens": 64, "itemsize": 2, "remat": True}
    assert training_activation_bytes(config, "lm", ALONE, **few) == 2 * 64 * 4096 * 4 + 64 * config.num_layers * 128 * 2

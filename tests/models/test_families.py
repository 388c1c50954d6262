"""Families compared with themselves: stages, devices, shared prompts and a cache do not change a number."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from tiny_models import DECODER, close, random_params

from jaxrlhf import models
from jaxrlhf.models.config import Experts, LatentAttention, LinearRope, YarnRope
from jaxrlhf.models.kernels import cpu
from jaxrlhf.sharding.mesh import BATCH_AXES, STAGE_AXES, WEIGHT_AXES, mesh_of
from jaxrlhf.sharding.rules import TRAIN, shardings

GEMMA = dataclasses.replace(
    DECODER,
    family="gemma3_text",
    num_layers=4,
    qk_norm=True,
    tie_embeddings=True,
    activation="gelu_tanh",
    norms="sandwich",
    unit_offset=True,
    scale_embeddings=True,
    query_pre_attn_scalar=20,
    attn_logit_softcapping=2.0,
    final_logit_softcapping=3.0,
    rope_scaling=LinearRope(2.0),
    sliding_window=4,
    sliding_layers=(True, False, True, True),
    sliding_rope_theta=50.0,
)
OLMO = dataclasses.replace(
    DECODER,
    family="olmo2",
    qk_norm=True,
    qk_norm_across_heads=True,
    norms="post",
    partial_rotary_factor=0.5,
)
DEEPSEEK = dataclasses.replace(
    DECODER,
    family="deepseek_v3",
    num_layers=3,
    num_kv_heads=4,
    head_dim=12,
    rope_scaling=YarnRope(4.0, 8, mscale_all_dim=1.0),
    latent=LatentAttention(rank=8, rope_dim=4, value_dim=6, query_rank=16),
    dense_layers=1,
    experts=Experts(8, 2, 16, 16, scores="sigmoid", bias=True, groups=4, groups_per_token=2, group_best=2),
)
ROWS, WIDTH = 4, 18


def tokens():
    return np.random.default_rng(1).integers(0, 96, (ROWS, WIDTH), dtype=np.int32)


def packed():
    """Two sequences in each row, and padding."""
    index_RW = np.broadcast_to(np.arange(WIDTH), (ROWS, WIDTH))
    cut_R1 = np.array([[7], [9], [5], [12]])
    position_RW = np.where(index_RW < cut_R1, index_RW, index_RW - cut_R1).astype(np.int32)
    segment_RW = np.where(index_RW < cut_R1, 1, 2 * (index_RW < WIDTH - 1)).astype(np.int32)
    return tokens(), position_RW, segment_RW


@functools.partial(jax.jit, static_argnums=1)
def hidden_states(params, config, token_RW, shared_prefix=None):
    """Hidden states of rows that hold one sequence each, or share prompts."""
    position_RW = jnp.broadcast_to(jnp.arange(token_RW.shape[1]), token_RW.shape)
    return models.hidden_states(
        params, config, token_RW, position_RW, jnp.ones_like(token_RW), shared_prefix=shared_prefix
    ).hidden_RWD


def loss(params, rows, config, **how):
    hidden_RWD = models.hidden_states(params, config, *rows, **how).hidden_RWD
    output = models.token_logp(params, config, hidden_RWD, rows[0], temperature=0.9, entropy=True, chunk_tokens=16)
    weight_RW = jnp.sin(jnp.arange(output.logp.size)).reshape(output.logp.shape)
    return (jnp.where(rows[2] > 0, output.logp + 0.1 * output.entropy, 0.0) * weight_RW).sum(), output.logp


@functools.cache
def program(config, gradients, **how):
    function = functools.partial(loss, config=config, **how)
    return jax.jit(jax.grad(function, has_aux=True) if gradients else function)


@pytest.mark.parametrize(
    ("config", "sizes", "gradients"),
    [
        pytest.param(GEMMA, {"fsdp": 2, "stage": 2, "tensor": 2}, True, marks=pytest.mark.slow),
        pytest.param(OLMO, {"fsdp": 4, "tensor": 2}, False, marks=pytest.mark.seeds),
    ],
    ids=["gemma-stages", "olmo"],
)
def test_eight_devices_say_what_one_says(config, sizes, gradients):
    mesh, params, rows = mesh_of(sizes, jax.devices()), random_params(config), packed()
    by_row = NamedSharding(mesh, PartitionSpec(BATCH_AXES))
    pipeline = models.pipeline_over(mesh, STAGE_AXES, row_axes=BATCH_AXES, weight_axes=WEIGHT_AXES)
    execution = models.Execution(remat=True, mesh=mesh, row_axes=BATCH_AXES, pipeline=pipeline)
    layout = shardings(mesh, models.param_dims(config, "lm"), TRAIN)
    many = program(config, gradients, execution=execution)
    found = many(jax.device_put(params, layout), jax.device_put(rows, by_row))
    close(found, program(config, gradients)(params, rows))


def test_soft_capped_logits_have_the_gradient_of_their_formula():
    params, rows = random_params(GEMMA), packed()

    def plain(params):
        hidden_RWD = models.hidden_states(params, GEMMA, *rows).hidden_RWD
        logit_RWV = 3.0 * jnp.tanh(hidden_RWD @ params["embed"].T / 3.0) / 0.9
        logp_RWV = logit_RWV - jax.nn.logsumexp(logit_RWV, axis=-1, keepdims=True)
        logp_RW = jnp.take_along_axis(logp_RWV[:, :-1], rows[0][:, 1:, None], axis=-1)[..., 0]
        entropy_RW = -(jnp.exp(logp_RWV) * logp_RWV).sum(axis=-1)[:, :-1]
        weight_RW = jnp.sin(jnp.arange(ROWS * WIDTH)).reshape(ROWS, WIDTH)[:, 1:]
        return (jnp.where(rows[2][:, 1:] > 0, logp_RW + 0.1 * entropy_RW, 0.0) * weight_RW).sum()

    close(program(GEMMA, True)(params, rows)[0], jax.jit(jax.grad(plain))(params))


def through_the_cache(params, token_RW, execution=models.ONE_DEVICE):
    """Logits of all but the first three tokens, one by one."""
    each, length_R = jnp.arange(ROWS), jnp.full(ROWS, 3)
    _, prefix, _ = models.prefill(params, GEMMA, token_RW[:, :3], length_R, execution=execution)
    cache = models.empty_cache(GEMMA, slots=ROWS, capacity=WIDTH, execution=execution)
    cache = models.insert_prefix(cache, prefix, each, each, execution=execution)
    layers = models.unstack_layers(params, GEMMA, execution=execution)

    def step(cache, place):
        at_R = jnp.full(ROWS, place)
        hidden_RD, cache, _ = models.decode(layers, params, GEMMA, token_RW[:, place], at_R, cache, execution=execution)
        return cache, models.logits(params, GEMMA, hidden_RD)

    return jnp.swapaxes(jax.lax.scan(step, cache, jnp.arange(3, WIDTH))[1], 0, 1)


@pytest.mark.slow
@pytest.mark.parametrize("transposed_from", [pytest.param(cpu.MANY_WEIGHTS, marks=pytest.mark.seeds), 1])
def test_decoding_through_the_caches_of_two_stages_is_the_full_forward(transposed_from, monkeypatch):
    monkeypatch.setattr(cpu, "MANY_INPUTS", 1)
    monkeypatch.setattr(cpu, "MANY_WEIGHTS", transposed_from)
    params, token_RW = random_params(GEMMA), tokens()
    hidden_RWD = hidden_states(params, GEMMA, token_RW)
    mesh = mesh_of({"stage": 2}, jax.devices()[:2])
    pipeline = models.pipeline_over(mesh, STAGE_AXES, row_axes=())
    layout = shardings(mesh, models.param_dims(GEMMA, "lm"), TRAIN)
    run = jax.jit(functools.partial(through_the_cache, execution=models.Execution(pipeline=pipeline)))
    found = run(jax.device_put(params, layout), jax.device_put(token_RW, NamedSharding(mesh, PartitionSpec())))
    close(found, models.logits(params, GEMMA, hidden_RWD)[:, 3:])


def test_layers_of_two_kinds_are_not_divided_over_stages():
    pipeline = models.pipeline_over(mesh_of({"stage": 2}, jax.devices()[:2]), STAGE_AXES, row_axes=())
    staged = models.Execution(pipeline=pipeline)
    with pytest.raises(ValueError, match=r"first 1 of 3 layers have no experts.* over 2 stages"):
        jax.eval_shape(
            lambda params: models.unstack_layers(params, DEEPSEEK, execution=staged), random_params(DEEPSEEK)
        )
    with pytest.raises(ValueError, match="dense_layers=3 of num_layers=3 requires experts in the later layers"):
        dataclasses.replace(DEEPSEEK, dense_layers=3)
    with pytest.raises(ValueError, match=r"activation='gelu_tanh' differs from experts\.activation=silu"):
        dataclasses.replace(DEEPSEEK, activation="gelu_tanh")


def test_layers_that_windows_are_not_told_of_are_refused():
    with pytest.raises(ValueError, match="sliding_layers has 4 entries, but num_layers=3"):
        dataclasses.replace(GEMMA, num_layers=3)
    with pytest.raises(ValueError, match=r"head_dim=10 with partial_rotary_factor=0\.5 rotates 5 dimensions"):
        dataclasses.replace(OLMO, head_dim=10)

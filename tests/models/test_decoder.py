"""The decoder against itself: chunks, caches, packing and meshes do not change a number."""

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compiled import to_read
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from tiny_models import DECODER, close, random_params

from jaxrlhf import models
from jaxrlhf.models.kernels import cpu
from jaxrlhf.sharding.rules import shardings

CONFIG = replace(DECODER, qkv_bias=True, qk_norm=True)
ROWS, WIDTH = 4, 18


@pytest.fixture(scope="module")
def params():
    return random_params(CONFIG)


@pytest.fixture(scope="module")
def rows():
    token_RW = np.random.default_rng(0).integers(0, 96, (ROWS, WIDTH), dtype=np.int32)
    position_RW = np.tile(np.arange(WIDTH, dtype=np.int32), (ROWS, 1))
    return token_RW, position_RW, np.ones((ROWS, WIDTH), np.int32)


def test_no_copy_of_a_weight_waits_for_the_backward_pass(params, rows):
    forward = functools.partial(hidden, rows=rows, dtype=jnp.bfloat16)
    kept = jax.tree.leaves(jax.eval_shape(lambda params: jax.vjp(forward, params)[1], params))
    # No dimension of a weight is a multiple of the width, and each array of tokens has one that is.
    of_tokens = [any(size % WIDTH == 0 for size in leaf.shape) for leaf in kept]
    assert any(of_tokens)
    assert not [leaf for leaf, own in zip(kept, of_tokens, strict=True) if leaf.dtype == jnp.bfloat16 and not own]


@functools.partial(jax.jit, static_argnames="dtype")
def hidden(params, rows, dtype=jnp.float32):
    return models.hidden_states(params, CONFIG, *rows, execution=models.Execution(dtype)).hidden_RWD


def test_initial_parameters():
    config = replace(CONFIG, num_layers=1)
    params = jax.jit(functools.partial(models.init_params, config, "value"))(jax.random.key(0))
    declared = models.declare(config, "value")
    jax.tree.map(lambda leaf, param: np.testing.assert_equal(leaf.shape, param.shape), params, declared)
    assert not params["head"].any() and not params["layers"]["attention"]["query_bias"].any()
    assert (params["final_norm"] == 1).all()
    inner = config.num_heads * config.head_dim
    for leaf, inputs in (
        (params["embed"], config.hidden_size),
        (params["layers"]["attention"]["query"], config.hidden_size),
        (params["layers"]["attention"]["output"], inner),
        (params["layers"]["mlp"]["down"], config.intermediate_size),
    ):
        np.testing.assert_allclose(np.std(leaf), inputs**-0.5, rtol=0.05)


def test_values_speak_of_the_prefix_before_the_token(params, rows):
    hidden_RWD = np.asarray(hidden(params, rows))
    params = {"head": np.linspace(-1, 1, 32, dtype=np.float32)}
    value_RW = models.values(params, hidden_RWD)
    assert not value_RW[:, 0].any()
    np.testing.assert_allclose(value_RW[:, 1:], hidden_RWD[:, :-1] @ params["head"], rtol=1e-5, atol=1e-5)
    score_B = models.score(params, hidden_RWD, jnp.array([2, 0, 2]), jnp.array([5, 17, 0]))
    np.testing.assert_allclose(score_B[0], hidden_RWD[2, 5] @ params["head"], rtol=1e-5)


def plain_logp(params, hidden_RWD, token_RW, temperature):
    """Log-probability and entropy with every logit in memory."""
    logp_RWV = jax.nn.log_softmax(hidden_RWD @ params["head"].T / temperature)[:, :-1]
    logp_RW = jnp.take_along_axis(logp_RWV, token_RW[:, 1:, None], axis=-1)[..., 0]
    entropy_RW = -(jnp.exp(logp_RWV) * logp_RWV).sum(-1)
    return jnp.pad(logp_RW, ((0, 0), (1, 0))), jnp.pad(entropy_RW, ((0, 0), (1, 0)))


@pytest.mark.parametrize(("chunk_tokens", "wanted_share"), [(1, 0.4), (20, 0.0), (20, 1.0), (10_000, 0.4)])
def test_chunks_and_what_they_leave_out_do_not_change_logp_entropy_or_gradients(
    params, rows, chunk_tokens, wanted_share
):
    hidden_RWD, token_RW = hidden(params, rows), jnp.asarray(rows[0])
    weight_RW = jax.random.normal(jax.random.key(2), (2, ROWS, WIDTH))
    wanted_RW = jax.random.uniform(jax.random.key(3), (ROWS, WIDTH)) < wanted_share

    def total(read, head, hidden_RWD, temperature):
        outputs = read({"head": head}, hidden_RWD, token_RW, temperature)
        logp_RW, entropy_RW = (jnp.where(wanted_RW.at[:, 0].set(False), output, 0.0) for output in outputs[:2])
        return (weight_RW[0] * logp_RW + weight_RW[1] * entropy_RW).sum(), (logp_RW, entropy_RW)

    def chunked(params, hidden_RWD, token_RW, temperature):
        outputs = models.token_logp(
            params,
            CONFIG,
            hidden_RWD,
            token_RW,
            wanted_RW,
            temperature=temperature,
            entropy=True,
            chunk_tokens=chunk_tokens,
        )
        assert outputs.entropy is not None
        return outputs

    def both(read):
        return jax.jit(jax.grad(functools.partial(total, read), argnums=(0, 1, 2), has_aux=True))(
            params["head"], hidden_RWD, jnp.float32(0.7)
        )

    close(both(chunked), both(plain_logp))


def test_logits_are_never_whole(params, rows):
    """No array of the compiled gradient is as large as the logits of all tokens."""
    config = replace(CONFIG, vocab_size=4096)
    shapes = models.param_shapes(config, "lm")
    hidden_RWD = jax.ShapeDtypeStruct((ROWS, 64, 32), jnp.float32)
    token_RW = jax.ShapeDtypeStruct((ROWS, 64), jnp.int32)

    def loss(head, hidden_RWD, token_RW):
        return models.token_logp({"head": head}, config, hidden_RWD, token_RW, chunk_tokens=16).logp.sum()

    program = to_read(jax.jit(jax.grad(loss, argnums=(0, 1))).lower(shapes["head"], hidden_RWD, token_RW))
    assert program.memory_analysis().temp_size_in_bytes < ROWS * 64 * 4096 * 4 / 2


def test_padding_gradients_are_finite_and_do_not_leak(params, rows):
    token_RW, position_RW, segment_RW = rows
    segment_RW = segment_RW * (position_RW < 7)

    @jax.jit
    @jax.grad
    def slope(params, token_RW):
        return jnp.square(hidden(params, (token_RW, position_RW, segment_RW))[:, :7]).sum()

    gradient = slope(params, token_RW)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(gradient))
    other = slope(params, np.where(segment_RW == 0, 5, token_RW))
    close(other, gradient)


@jax.jit
def prefill(params, token_PS, length_P):
    return models.prefill(params, CONFIG, token_PS, length_P)


def test_decoding_through_the_cache_equals_the_full_forward(params, rows):
    """Prompts are shared by several slots, one insertion is skipped, one slot is taken again."""
    token_RW, _, _ = rows
    hidden_RWD = np.asarray(hidden(params, rows))
    length_P = np.array([5, 3, 8])
    last_PD, prefix, _ = prefill(params, token_RW[:3, :10], length_P)
    close(last_PD, hidden_RWD[np.arange(3), length_P - 1])

    # 7 stands for what an earlier response left behind.
    cache = jax.tree.map(lambda leaf: jnp.full_like(leaf, 7), models.empty_cache(CONFIG, slots=5, capacity=WIDTH))
    insert = jax.jit(models.insert_prefix, donate_argnums=0)
    cache = insert(cache, prefix, np.array([0, 1, 2, 0, 1]), np.array([4, 1, 2, 3, 5]))
    cache = insert(cache, prefix, np.array([2, 0, 0, 0, 0]), np.array([0, 5, 6, 7, 8]))
    row_B = np.array([2, 1, 2, 0, 0])

    layers = jax.jit(lambda params: models.unstack_layers(params, CONFIG))(params)
    step = jax.jit(lambda *state: models.decode(layers, params, CONFIG, *state), donate_argnums=2)
    position_B = length_P[row_B]
    for _ in range(4):
        hidden_BD, cache, _ = step(token_RW[row_B, position_B], position_B, cache)
        close(hidden_BD, hidden_RWD[row_B, position_B])
        position_B = position_B + 1


def test_prompts_longer_than_the_cache_are_refused():
    prefix = models.Prefix(*np.zeros((2, 2, 1, 10, 2, 8)))
    cache = models.empty_cache(CONFIG, slots=1, capacity=8)
    with pytest.raises(ValueError, match="prompts of 10 tokens do not fit a cache of capacity 8"):
        models.insert_prefix(cache, prefix, np.array([0]), np.array([0]))


def test_half_precision_keeps_norms_and_logits_wide(params, rows):
    hidden_RWD = hidden(params, rows, dtype=jnp.bfloat16)
    assert hidden_RWD.dtype == jnp.bfloat16
    output = models.token_logp(params, CONFIG, hidden_RWD, jnp.asarray(rows[0]), entropy=True)
    assert output.logp.dtype == jnp.float32
    wide = models.token_logp(params, CONFIG, hidden(params, rows), jnp.asarray(rows[0]))
    np.testing.assert_allclose(output.logp, wide.logp, atol=0.1)


MESH_RULES = {"embed": "fsdp", "heads": "tensor", "kv_heads": "tensor", "mlp": "tensor", "vocab": "tensor"}


def test_eight_devices_say_what_one_says(params, rows):
    """Logp, entropy and gradients under fsdp 4 x tensor 2 and rematerialisation."""
    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("fsdp", "tensor"), axis_types=(AxisType.Auto,) * 2)
    by_row = NamedSharding(mesh, PartitionSpec("fsdp"))
    execution = models.Execution(remat=True, mesh=mesh, row_axes=("fsdp",))

    def loss(params, rows, execution):
        hidden_RWD = models.hidden_states(params, CONFIG, *rows, execution=execution).hidden_RWD
        output = models.token_logp(params, CONFIG, hidden_RWD, rows[0], temperature=0.9, entropy=True, chunk_tokens=16)
        return (output.logp + 0.1 * output.entropy).sum(), output

    program = jax.jit(jax.grad(loss, has_aux=True), static_argnums=2)
    layout = shardings(mesh, models.param_dims(CONFIG, "lm"), MESH_RULES)
    split = jax.device_put(params, layout)
    many = program.lower(split, jax.device_put(rows, by_row), execution).compile()
    close(many(split, jax.device_put(rows, by_row)), program(params, rows, models.ONE_DEVICE))
    # A quarter of the rows and half of the MLP's width on each device, at no time all rows.
    inner = CONFIG.intermediate_size // 2
    assert f"f32[{ROWS // 4},{WIDTH},{inner}]" in many.as_text()
    assert f"f32[{ROWS},{WIDTH},{inner}]" not in many.as_text()


def test_decoding_on_eight_devices(params, rows, monkeypatch):
    """Slots over fsdp, heads over tensor, weights as the left factor; the cache keeps its layout."""
    monkeypatch.setattr(cpu, "MANY_INPUTS", 1)
    monkeypatch.setattr(cpu, "MANY_WEIGHTS", 1)
    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("fsdp", "tensor"), axis_types=(AxisType.Auto,) * 2)
    rules = {name: axis for name, axis in MESH_RULES.items() if axis == "tensor"}
    split = jax.device_put(params, shardings(mesh, models.param_dims(CONFIG, "lm"), rules))
    layout = NamedSharding(mesh, PartitionSpec("fsdp", "tensor"))

    def run(params, token_RW):
        _, prefix, _ = models.prefill(params, CONFIG, token_RW[:, :6], jnp.array([6, 4, 5, 6]))
        cache = models.empty_cache(CONFIG, slots=4, capacity=WIDTH)
        cache = models.insert_prefix(cache, prefix, jnp.arange(4), jnp.arange(4))
        layers = models.unstack_layers(params, CONFIG)
        return models.decode(layers, params, CONFIG, token_RW[:, 6], jnp.array([6, 4, 5, 6]), cache)

    one_BD, *_ = jax.jit(run)(params, rows[0])
    many_BD, cache, _ = jax.jit(run, out_shardings=models.DecodeOutput(None, layout, None))(split, rows[0])
    close(many_BD, one_BD)
    assert cache[0].key_BKHS.addressable_shards[0].data.shape == (1, 1, 8, WIDTH)


def test_a_decode_loop_computes_cosines_once(params):
    """XLA would compute them in every layer, at every token and for every head."""
    unstack = jax.jit(lambda params: models.unstack_layers(params, CONFIG))
    layers, cache = unstack(params), models.empty_cache(CONFIG, slots=2, capacity=64)

    def step(position, carry):
        token_B, cache = carry
        at_B = jnp.full(2, position, jnp.int32)
        hidden_BD, cache, _ = models.decode(layers, params, CONFIG, token_B, at_B, cache)
        return hidden_BD.argmax(axis=-1).astype(jnp.int32), cache

    def loop(token_B, cache):
        return jax.lax.fori_loop(0, 64, step, (token_B, cache))

    lines = jax.jit(loop).lower(jnp.zeros(2, jnp.int32), cache).compile().as_text().splitlines()
    computed = [line for line in lines if " cosine(" in line or " sine(" in line]
    assert len(computed) == 2
    # What lies outside the loop has the size of the table, and not of a token's heads.
    assert all(
        f"f32[64,{CONFIG.head_dim // 2}]" in line or f"f32[1,64,{CONFIG.head_dim // 2}]" in line for line in computed
    )

"""Generation with layers and cache divided over stages: the same tokens, a part of the memory."""

import re
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compiled import named
from jax.sharding import NamedSharding, PartitionSpec
from tiny_models import SMALL, same_responses, sharp

from jaxrlhf import models
from jaxrlhf.config import Sampling
from jaxrlhf.engine import Engine, Request
from jaxrlhf.models.attention.attention import DECODE, ROWS
from jaxrlhf.models.config import ModelConfig
from jaxrlhf.sharding.mesh import BATCH_AXES, SLOT_AXES, STAGE_AXES, WEIGHT_AXES, mesh_of
from jaxrlhf.sharding.rules import GENERATE, TRAIN, shardings

pytestmark = pytest.mark.usefixtures("programs")

MODEL = replace(SMALL, num_layers=4, qk_norm=True)
DIMS = models.param_dims(MODEL, "lm")
SAMPLING = Sampling(temperature=0.8)


@pytest.fixture(scope="module")
def params():
    return sharp(MODEL)


@pytest.fixture(scope="module")
def requests():
    """Five groups of three: more responses than slots, so that slots are taken again."""
    rng = np.random.default_rng(0)
    prompts = [tuple(rng.integers(0, 32, rng.integers(1, 13)).tolist()) for _ in range(5)]
    return [Request(3 * group + i, prompt) for group, prompt in enumerate(prompts) for i in range(3)]


def engine_of(mesh, stage_axes=("stage",), model=MODEL, slots=6, stop_tokens=(3,), kernels=False):
    """An engine without weights."""
    pipeline = models.pipeline_over(mesh, stage_axes, row_axes=SLOT_AXES) if stage_axes else None
    execution = models.Execution(pipeline=pipeline)
    if kernels:
        axes = {"row_axes": SLOT_AXES, "head_axes": ("tensor",)}
        execution = replace(execution, mesh=mesh, rows_kernel="splash", decode_kernel="pallas", **axes)
    return Engine(
        model,
        mesh,
        slots=slots,
        max_prompt_tokens=12,
        max_response_tokens=8,
        stop_tokens=stop_tokens,
        decode_tokens_per_dispatch=4 if slots == 6 else 1,
        slot_axes=SLOT_AXES,
        kv_head_axis="tensor",
        execution=execution,
    )


def engine_on(mesh, params, **changes):
    engine = engine_of(mesh, **changes)
    engine.load(jax.device_put(params, shardings(mesh, DIMS, GENERATE)), version=0)
    return engine


def generate(engine, requests):
    return engine.generate(requests, SAMPLING, seed=11)


@pytest.fixture(scope="module")
def one_device(params):
    return engine_on(mesh_of({}, jax.devices()[:1]), params)


@pytest.fixture(scope="module")
def expected(one_device, requests):
    return generate(one_device, requests)


@pytest.fixture(scope="module")
def staged(params):
    """Two replicas of four stages."""
    return engine_on(mesh_of({"data": 2, "stage": 4}, jax.devices()), params)


@pytest.mark.slow
def test_stages_generate_what_one_device_does(staged, requests, expected):
    same_responses(generate(staged, requests), expected)


@pytest.mark.slow
def test_kernels_compute_inside_stages(params, requests, expected, monkeypatch):
    seen = set()

    def counted(kernel):
        def run(query, *rest):
            seen.add((query.shape[0], query.shape[-2]))
            return kernel(query, *rest)

        return run

    monkeypatch.setitem(ROWS, "splash", counted(ROWS["xla"]))
    monkeypatch.setitem(DECODE, "pallas", counted(DECODE["xla"]))
    mesh = mesh_of({"data": 2, "stage": 2, "tensor": 2}, jax.devices())
    same_responses(generate(engine_on(mesh, params, kernels=True), requests), expected)
    assert seen == {(1, 2), (3, 2)}, "rows of a microbatch and slots of a replica, with half of the heads"


@pytest.mark.slow
def test_generation_on_two_of_the_four_stages_of_training(params, requests, expected):
    """One mesh for both; the trainer reads the log-probabilities that the sampler reports."""
    mesh = mesh_of({"data": 2, "stage": 2, "micro_stage": 2}, jax.devices())
    completions = generate(engine_on(mesh, params), requests)
    same_responses(completions, expected)
    token_RW, segment_RW = np.zeros((16, 20), np.int32), np.zeros((16, 20), np.int32)
    for row, (request, completion) in enumerate(zip(requests, completions, strict=True)):
        tokens = request.prompt_tokens + completion.tokens
        token_RW[row, : len(tokens)], segment_RW[row, : len(tokens)] = tokens, 1
    pipeline = models.pipeline_over(mesh, STAGE_AXES, row_axes=BATCH_AXES, weight_axes=WEIGHT_AXES)

    @jax.jit
    def read(params, token_RW, segment_RW):
        position_RW = jnp.broadcast_to(jnp.arange(20), token_RW.shape)
        hidden_RWD = models.hidden_states(
            params, MODEL, token_RW, position_RW, segment_RW, execution=models.Execution(pipeline=pipeline)
        ).hidden_RWD
        return models.token_logp(params, MODEL, hidden_RWD, token_RW, temperature=SAMPLING.temperature).logp

    rows = jax.device_put((token_RW, segment_RW), NamedSharding(mesh, PartitionSpec(BATCH_AXES)))
    logp_RW = np.asarray(read(jax.device_put(params, shardings(mesh, DIMS, TRAIN)), *rows))
    for row, (request, completion) in enumerate(zip(requests, completions, strict=True)):
        start = len(request.prompt_tokens)
        np.testing.assert_allclose(logp_RW[row, start : start + len(completion.tokens)], completion.logps, atol=1e-5)


@pytest.fixture(scope="module")
def running(staged, requests):
    """An engine in the middle of its responses, and what its prefill left."""
    prefilled = staged._prefill([requests[0].prompt_tokens])
    staged.add(requests[0], SAMPLING, seed=1)
    staged.step()
    yield staged, prefilled
    staged.free()


@pytest.mark.slow
def test_replicas_leave_idle_slots_together(params, one_device, monkeypatch):
    monkeypatch.setattr("jaxrlhf.engine.buckets.FEWEST_SLOTS", 2)
    stop = (3, 5, 7, 9, 11)
    many = [Request(index, tuple(range(1, 2 + index % 5)), stop_tokens=stop) for index in range(16)]
    several = engine_on(mesh_of({"data": 2, "stage": 2, "tensor": 2}, jax.devices()), params, slots=len(many))
    for seed in range(2):  # so that replicas empty in different order
        expected = one_device.generate(many, SAMPLING, seed=seed)
        same_responses(several.generate(many, SAMPLING, seed=seed), expected)
    assert len({sizes[1] for sizes in several.compiled.programs if sizes[0] == "decode"}) > 1


def held_bytes(tree):
    """Most bytes that one device holds."""
    totals = {}
    for leaf in jax.tree.leaves(tree):
        for shard in leaf.addressable_shards:
            totals[shard.device] = totals.get(shard.device, 0) + shard.data.nbytes
    return max(totals.values())


def test_a_stage_holds_its_own_layers_of_the_cache(running):
    engine, prefilled = running
    floats_per_token = 2 * MODEL.num_layers // 4 * MODEL.num_kv_heads * MODEL.head_dim
    assert held_bytes(engine.cache.arrays) == 4 * floats_per_token * (12 + 8) * 6 // 2
    assert held_bytes(prefilled.prompts.prefix) == 4 * floats_per_token * 12 * len(prefilled.prompts.length_P)
    assert held_bytes(engine.weights.params["layers"]) * 4 == sum(
        leaf.nbytes for leaf in jax.tree.leaves(engine.weights.params["layers"])
    )


def test_weights_and_cache_stay_on_their_stage(running):
    """While decoding, one hidden state per slot is all that stages send to each other before the head."""
    engine, _ = running
    (program,) = named(engine, "decode")
    text = program.as_text()
    kinds = "all-gather|all-reduce|collective-permute|reduce-scatter|all-to-all"
    results = re.findall(rf"= (.*?) ({kinds})(?:-start)?\(", text)
    assert {kind for _, kind in results} <= {"all-gather", "all-reduce", "collective-permute"}
    for result, kind in results:
        for dims in re.findall(r"\[([\d,]*)\]", result):
            assert np.prod([int(size) for size in dims.split(",") if size]) <= 6 * MODEL.vocab_size, (kind, result)
    hops = re.findall(r"= (\S+?)\{\S* collective-permute\(.*source_target_pairs=\{(.*?\})\}.*ppermute", text)
    assert hops == [("f32[3,1,16]", "{0,1},{1,2},{2,3},{4,5},{5,6},{6,7}")] * 3


def test_one_stage_is_the_engine_without_stages(params):
    """All that programs depend on is the same."""
    mesh = mesh_of({"data": 2, "micro_stage": 2, "tensor": 2}, jax.devices())
    one, other = (engine_on(mesh, params, stage_axes=stage_axes) for stage_axes in ((), ("stage",)))
    assert one._shape == other._shape
    assert vars(one._layout) == vars(other._layout)


def test_layers_that_do_not_split_over_the_stages_are_refused(params):
    model = ModelConfig(**{**vars(MODEL), "num_layers": 3})
    with pytest.raises(ValueError, match="3 layers do not split 2 ways over mesh axis 'stage'; set"):
        engine_on(mesh_of({"stage": 2}, jax.devices()[:2]), params, model=model)

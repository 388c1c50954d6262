"""Devices that share the positions of every slot: the same responses, a part of the cache each, one small gather."""

import functools
import math
from dataclasses import replace

import jax
import numpy as np
import pytest
from compiled import named
from tiny_models import DECODER, gaussian, same_responses

from jaxrlhf import models
from jaxrlhf.config import Sampling, load_module
from jaxrlhf.engine import Engine, Request
from jaxrlhf.engine.checks import check_shared
from jaxrlhf.models.config import Experts, LatentAttention, LinearAttention
from jaxrlhf.planner.hlo import Collective, collectives
from jaxrlhf.sharding.mesh import SLOT_AXES, mesh_of
from jaxrlhf.sharding.rules import GENERATE, shardings

pytestmark = pytest.mark.usefixtures("programs")

SLOTS = tuple(axis for axis in SLOT_AXES if axis != "context")
PLAIN = replace(DECODER, vocab_size=32, hidden_size=16, intermediate_size=32)
KINDS = {
    "plain": PLAIN,
    "sinks, windows and soft caps": replace(
        PLAIN,
        family="gemma3_text",
        attention_sinks=True,
        sliding_window=7,
        sliding_layers=(True, False),
        attn_logit_softcapping=3.0,
    ),
    "latents": replace(
        PLAIN,
        family="deepseek_v3",
        num_kv_heads=4,
        latent=LatentAttention(rank=6, rope_dim=4, value_dim=6, query_rank=10),
        dense_layers=1,
        experts=Experts(4, 2, 8, 8, scores="sigmoid", bias=True),
    ),
    "linear attention": replace(
        PLAIN,
        family="qwen3_5_text",
        qk_norm=True,
        attention_gate=True,
        linear=LinearAttention(key_heads=2, value_heads=4, key_dim=8, value_dim=6),
        linear_layers=(True, False),
    ),
}


@pytest.fixture(scope="module", autouse=True)
def small():
    """Caches that grow, few sizes of programs, and chunks of long prompts."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("jaxrlhf.engine.buckets.RING_STEP", 4)
        patch.setattr("jaxrlhf.engine.cache.contents.RING_STEP", 4)
        patch.setattr("jaxrlhf.engine.buckets.CAPACITY_STEP", 16)
        patch.setattr("jaxrlhf.engine.buckets.MOST_CAPACITIES", 2)
        patch.setattr("jaxrlhf.engine.buckets.SHORTEST_BUCKET", 32)
        patch.setattr("jaxrlhf.engine.prefill.PREFILL_TOKENS", 40)
        patch.setattr("jaxrlhf.engine.prefill.CHUNK_TOKENS", 16)
        patch.setattr("jaxrlhf.engine.prefill.CHUNK_PARTS", (4, 1))
        patch.setattr("jaxrlhf.engine.engine.CHUNK_TOKENS", 16)
        patch.setattr("jaxrlhf.engine.engine.CHUNK_PARTS", (4, 1))
        yield


@functools.cache
def build(kind: str, **sizes: int) -> Engine:
    model, mesh = KINDS[kind], mesh_of(sizes, jax.devices()[: math.prod(sizes.values())])
    execution = models.Execution(
        mesh=mesh,
        row_axes=SLOTS,
        head_axes=("tensor",),
        kv_ways=1 if model.latent else mesh.shape["tensor"],
        cache_axes=("context",),
    )
    engine = Engine(
        model,
        mesh,
        slots=4,
        max_prompt_tokens=60,
        max_response_tokens=21,
        stop_tokens=(3,),
        decode_tokens_per_dispatch=2,
        slot_axes=SLOTS,
        kv_head_axis="tensor",
        execution=execution if sizes else models.ONE_DEVICE,
        dispatch_ahead=True,
    )
    engine.load(jax.device_put(gaussian(model), shardings(mesh, models.param_dims(model, "lm"), GENERATE)), version=0)
    return engine


def generated(engine: Engine):
    """Six prompts, run whole or in chunks; slots are refilled."""
    rng = np.random.default_rng(1)
    prompts = [tuple(rng.integers(4, 32, length).tolist()) for length in (5, 57, 20, 33, 8, 41)]
    return engine.generate([Request(i, prompt) for i, prompt in enumerate(prompts)], Sampling(temperature=1.1), seed=7)


@functools.cache
def expected(kind: str):
    return generated(build(kind))


@pytest.mark.parametrize(
    ("kind", "sizes"),
    [
        *[
            pytest.param(kind, {"context": 4, "tensor": 2}, marks=pytest.mark.slow)  # the session below is a fast one
            for kind in ("plain", "sinks, windows and soft caps", "latents")
        ],
        pytest.param("plain", {"data": 2, "context": 2, "tensor": 2}, marks=pytest.mark.seeds),
        pytest.param("linear attention", {"context": 4, "tensor": 2}, marks=pytest.mark.seeds),
    ],
    ids=str,
)
def test_responses_are_those_of_one_device(kind, sizes):
    same_responses(generated(build(kind, **sizes)), expected(kind))


def turns(engine: Engine):
    """A response that is kept, and a response to its continuation."""
    prompt = tuple(range(4, 25))
    ended = engine.generate([Request(0, prompt, keep=True, max_tokens=5)], Sampling(), seed=1)
    longer = Request(1, (*prompt, *ended[0].tokens[:3], *range(5, 20)), max_tokens=5)
    return [*ended, *engine.generate([longer], Sampling(), seed=1)]


@pytest.mark.slow
def test_a_session_goes_on_from_what_devices_share():
    split, whole = build("plain", context=4, tensor=2), build("plain")
    before = split.prefill.reused_tokens
    same_responses(turns(split), turns(whole))
    assert split.prefill.reused_tokens >= before + 16


@pytest.mark.slow
def test_each_device_has_its_part_and_one_gather_in_each_layer_joins_them():
    """A query has its weighted values, their sum of weights and the largest score from every other device."""
    engine, model = build("plain", context=4, tensor=2), KINDS["plain"]
    engine.cache.free()
    engine.cache.keep(np.arange(4, dtype=np.int32)[None])
    engine.cache.grow(84)
    held = [leaf.addressable_shards[0].data.size for leaf in jax.tree.leaves(engine.cache.arrays)]
    assert held == [4 * (model.num_kv_heads // 2) * model.head_dim * 84 // 4] * 2 * model.num_layers
    engine.free()
    generated(engine)
    turns(engine)
    for name, queries in (("decode", 4), ("prefill from", 4), ("prefill", 16)):
        program = named(engine, name)[-1]
        sent = 3 * queries * (model.num_heads // 2) * (model.head_dim + 2) * 4
        (gathers,) = (each for each in collectives(program.as_text(), engine.mesh.shape) if "context" in each.axes)
        assert gathers == Collective("all-gather", ("context",), model.num_layers, model.num_layers * sent), name
    for name in ("place", "resize", "take", "insert", "unstack", "empty cache"):
        for program in named(engine, name):
            found = collectives(program.as_text(), engine.mesh.shape)
            assert not [each for each in found if "context" in each.axes], name


def test_what_devices_cannot_share_is_refused(refused):
    mesh = mesh_of({"context": 8}, jax.devices())
    sizes = {"row_axes": SLOTS, "head_axes": ("tensor",), "cache_axes": ("context",), "decodes": True}
    with refused():
        models.choose_execution(PLAIN, np.float32, mesh, **sizes, cache="pages")
    execution = models.choose_execution(PLAIN, np.float32, mesh, **sizes, cache="auto")
    assert execution.cache_ways == 8 and execution.pages_kernel is None
    with refused():
        check_shared(PLAIN, execution, shortest_chunk=4)
    pipeline = models.pipeline_over(mesh_of({"stage": 2}, jax.devices()[:2]), ("stage",), row_axes=SLOTS)
    with refused():
        check_shared(PLAIN, replace(execution, pipeline=pipeline), shortest_chunk=32)
    with refused():
        check_shared(load_module("nash_md").GeometricMixture.of(PLAIN, 0.5), execution, shortest_chunk=32)

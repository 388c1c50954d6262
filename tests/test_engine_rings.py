"""Layers with a window that keep their window alone: the same responses as from caches that keep everything."""

import functools
import math
from dataclasses import replace

import jax
import numpy as np
import pytest
from tiny_models import gaussian

from jaxrlhf import models
from jaxrlhf.config import Sampling
from jaxrlhf.engine import Engine, Request
from jaxrlhf.engine.cache.contents import Contents, Known, Ring, _Content
from jaxrlhf.models.config import FullHeads, ModelConfig
from jaxrlhf.sharding.mesh import SLOT_AXES, mesh_of
from jaxrlhf.sharding.rules import GENERATE, shardings

pytestmark = pytest.mark.usefixtures("programs")

WINDOW, STEP, DISPATCH, LONGEST_PROMPT, LONGEST_RESPONSE = 8, 4, 2, 56, 24
ENTRIES = WINDOW + 2 * DISPATCH + 2 * STEP

MIXED = ModelConfig(
    family="gemma3_text",
    vocab_size=32,
    hidden_size=16,
    intermediate_size=32,
    num_layers=4,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    qk_norm=True,
    attn_logit_softcapping=2.0,
    sliding_window=WINDOW,
    sliding_layers=(True, False) * 2,
)
EVERYWHERE = replace(MIXED, num_layers=2, sliding_layers=())
SINKS = replace(MIXED, num_layers=2, sliding_layers=(True, False), attention_sinks=True)
APART = replace(MIXED, sliding_layers=(True, True, False, True), full_heads=FullHeads(1, 16))
BORROWED = {"borrowing_layers": 2, "full_heads": FullHeads(2, 8)}
BORROWING = replace(MIXED, num_layers=5, sliding_layers=(True, True, False, True, False), **BORROWED)
MODELS = {"mixed": MIXED, "everywhere": EVERYWHERE, "sinks": SINKS, "apart": APART, "borrowing": BORROWING}


@pytest.fixture(scope="module", autouse=True)
def small():
    """Rings that are soon full, few sizes of programs, and chunks of long prompts."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("jaxrlhf.engine.buckets.RING_STEP", STEP)
        patch.setattr("jaxrlhf.engine.cache.contents.RING_STEP", STEP)
        patch.setattr("jaxrlhf.engine.buckets.CAPACITY_STEP", 4)
        patch.setattr("jaxrlhf.engine.buckets.MOST_CAPACITIES", 2)
        patch.setattr("jaxrlhf.engine.buckets.SHORTEST_BUCKET", 32)
        patch.setattr("jaxrlhf.engine.prefill.PREFILL_TOKENS", 40)
        patch.setattr("jaxrlhf.engine.prefill.CHUNK_TOKENS", 16)
        yield


@functools.cache
def build(model, *, rings: bool, **sizes: int) -> Engine:
    mesh = mesh_of(sizes, jax.devices()[: math.prod(sizes.values())])
    with pytest.MonkeyPatch.context() as patch:
        if not rings:
            patch.setattr("jaxrlhf.engine.buckets.ring_entries", lambda *_, **__: None)
        engine = Engine(
            model,
            mesh,
            slots=4,
            max_prompt_tokens=LONGEST_PROMPT,
            max_response_tokens=LONGEST_RESPONSE,
            stop_tokens=(3,),
            decode_tokens_per_dispatch=DISPATCH,
            slot_axes=SLOT_AXES,
            kv_head_axis="tensor",
            execution=models.Execution(pipeline=models.pipeline_over(mesh, ("stage",), row_axes=SLOT_AXES)),
            goes_ahead=True,
        )
    engine.load(jax.device_put(gaussian(model), shardings(mesh, models.param_dims(model, "lm"), GENERATE)), version=0)
    return engine


def same(ours, theirs):
    for one, other in zip(ours, theirs, strict=True):
        assert (one.tokens, one.truncated) == (other.tokens, other.truncated)
        np.testing.assert_allclose(one.logps, other.logps, atol=1e-5)


def generated(engine: Engine, *, keep: bool = False):
    """Six prompts, shorter than the window up to many times as long; slots are refilled."""
    rng = np.random.default_rng(1)
    prompts = [tuple(rng.integers(4, 32, length).tolist()) for length in (5, 55, 20, 33, 8, 41)]
    asked = [Request(i, prompt, keep=keep) for i, prompt in enumerate(prompts)]
    return engine.generate(asked, Sampling(temperature=1.1), seed=7)


@pytest.mark.parametrize(
    "name",
    [
        *("mixed", "everywhere", "borrowing"),
        *(pytest.param(name, marks=pytest.mark.seeds) for name in ("sinks", "apart")),
    ],
)
def test_responses_are_those_of_caches_that_keep_everything(name):
    ringed, whole = (build(MODELS[name], rings=rings) for rings in (True, False))
    assert ringed.execution.ring_entries == ENTRIES < LONGEST_PROMPT
    ours = generated(ringed)
    assert max(len(completion.tokens) for completion in ours) > ENTRIES, "no response goes round its ring"
    same(ours, generated(whole))
    assert ringed.compilations <= ringed.most_compilations


@pytest.mark.parametrize(
    "sizes", [{"stage": 2}, pytest.param({"data": 2, "tensor": 2}, marks=pytest.mark.seeds)], ids=str
)
def test_split_over_devices_too(sizes):
    same(generated(build(MIXED, rings=True, **sizes)), generated(build(MIXED, rings=False)))


def test_a_cache_holds_the_window_in_layers_that_have_it():
    engine = build(MIXED, rings=True)
    for rings, expected in ((True, 2 * ENTRIES + 2 * 80), (False, 4 * 80)):
        execution = engine.execution if rings else replace(engine.execution, ring_entries=None)
        cache = models.empty_cache(MIXED, slots=3, capacity=80, execution=execution)
        assert sum(leaf.size for leaf in jax.tree.leaves(cache)) == 3 * expected * 2 * 2 * 8


def turns(engine: Engine, *, keep: bool, cut: int):
    """Three turns of three conversations, the last tokens of each reply of which are told otherwise."""
    rng = np.random.default_rng(2)
    conversations, completions = [tuple(rng.integers(4, 32, n).tolist()) for n in (21, 30, 26)], []
    for turn in range(3):
        asked = [Request(3 * turn + i, prompt, max_tokens=11, keep=keep) for i, prompt in enumerate(conversations)]
        completions += engine.generate(asked, Sampling(temperature=1.1, min_tokens=11), seed=5)
        replies = [completion.tokens for completion in completions[-3:]]
        conversations = [(*p, *r[: len(r) - cut], 7, 8) for p, r in zip(conversations, replies, strict=True)]
    return completions


@pytest.mark.parametrize("cut", [0, 3, 10])
@pytest.mark.parametrize("name", ["mixed", pytest.param("borrowing", marks=pytest.mark.seeds)])
def test_conversations_go_on_where_the_window_is_there_and_are_run_whole_where_it_is_not(name, cut):
    ringed, whole = (build(MODELS[name], rings=rings) for rings in (True, False))
    before = ringed.prefill.reused_tokens
    ours = turns(ringed, keep=True, cut=cut)
    reused = ringed.prefill.reused_tokens - before
    same(ours, turns(whole, keep=False, cut=cut))
    assert (reused > 0) == (cut < 10)
    ringed.free()


def test_what_a_ring_lost_is_never_gone_on_from():
    """Every beginning of a response of which a token's window is gone: brute force over positions that are there."""
    for length in range(1, 60):
        contents = Contents(slots=1, ring=Ring(ENTRIES, WINDOW, ahead=2 * DISPATCH))
        contents._content[0] = _Content(0, np.arange(length), 1, parked=True)
        for known in range(1, length + 1):
            found = contents.longest((*range(known), -1, -2)[: known + 1])
            # After the response up to four tokens were written, and the place of the next one.
            there = {p for p in range(length + 2 * DISPATCH) if p > length + 2 * DISPATCH - ENTRIES}
            window = set(range(max(0, found.tokens - WINDOW + 1), found.tokens))
            assert not found.tokens or window <= there
            assert found.tokens % STEP == 0
    assert found == Known(56, 0)

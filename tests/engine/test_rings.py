"""Layers with a window that keep their window alone: the same responses as from caches that keep everything."""

import functools
import math
from dataclasses import replace

import jax
import numpy as np
import pytest
from compiled import most_compilations
from tiny_models import gaussian, same_responses

from jaxrlhf import models
from jaxrlhf.config import Sampling
from jaxrlhf.engine import Engine, Request
from jaxrlhf.engine.cache.contents import PrefixCache, PrefixMatch, Ring, _Content
from jaxrlhf.engine.sequence import SequenceState
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
        patch.setattr("jaxrlhf.engine.buckets.SHORTEST_BUCKET", 40)
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
            dispatch_ahead=True,
        )
    engine.load(jax.device_put(gaussian(model), shardings(mesh, models.param_dims(model, "lm"), GENERATE)), version=0)
    return engine


def generated(engine: Engine, *, keep: bool = False):
    """Six prompts, shorter than the window up to many times as long; slots are refilled."""
    rng = np.random.default_rng(1)
    prompts = [tuple(rng.integers(4, 32, length).tolist()) for length in (5, 55, 20, 33, 8, 41)]
    asked = [Request(i, prompt, keep=keep) for i, prompt in enumerate(prompts)]
    return engine.generate(asked, Sampling(temperature=1.1), seed=7)


@pytest.mark.parametrize(
    "name",
    [
        "mixed",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("everywhere", "borrowing")),
        *(pytest.param(name, marks=pytest.mark.seeds) for name in ("sinks", "apart")),
    ],
)
def test_responses_are_those_of_caches_that_keep_everything(name):
    ringed, whole = (build(MODELS[name], rings=rings) for rings in (True, False))
    assert ringed.execution.ring_entries == ENTRIES < LONGEST_PROMPT
    ours = generated(ringed)
    assert max(len(completion.tokens) for completion in ours) > ENTRIES, "no response goes round its ring"
    same_responses(ours, generated(whole))
    assert len(ringed.compiled) <= most_compilations(ringed)


@pytest.mark.slow
@pytest.mark.parametrize(
    "sizes", [{"stage": 2}, pytest.param({"data": 2, "tensor": 2}, marks=pytest.mark.seeds)], ids=str
)
def test_split_over_devices_too(sizes):
    same_responses(generated(build(MIXED, rings=True, **sizes)), generated(build(MIXED, rings=False)))


def test_a_cache_holds_the_window_in_layers_that_have_it():
    engine = build(MIXED, rings=True)
    for rings, expected in ((True, 2 * ENTRIES + 2 * 80), (False, 4 * 80)):
        execution = engine.execution if rings else replace(engine.execution, ring_entries=None)
        cache = models.empty_cache(MIXED, slots=3, capacity=80, execution=execution)
        assert sum(leaf.size for leaf in jax.tree.leaves(cache)) == 3 * expected * 2 * 2 * 8


def turns(engine: Engine, *, keep: bool, cut: int):
    """Three turns of three conversations, with other last tokens of each reply than were sampled."""
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
    same_responses(ours, turns(whole, keep=False, cut=cut))
    assert (reused > 0) == (cut < 10)
    ringed.free()


def test_what_a_ring_lost_is_never_gone_on_from():
    """Every first part of a response that has lost a token's window: brute force over positions that are there."""
    for length in range(1, 60):
        contents = PrefixCache(slots=1, ring=Ring(ENTRIES, WINDOW, ahead=2 * DISPATCH))
        contents._content[0] = _Content(0, np.arange(length), 1, parked=True)
        for known in range(1, length + 1):
            found = contents.longest((*range(known), -1, -2)[: known + 1])
            # After the response up to four tokens were written, and the place of the next one.
            there = {p for p in range(length + 2 * DISPATCH) if p > length + 2 * DISPATCH - ENTRIES}
            window = set(range(max(0, found.tokens - WINDOW + 1), found.tokens))
            assert not found.tokens or window <= there
            assert found.tokens % STEP == 0
    assert found == PrefixMatch(56, 0)


class Slots:
    """Rings of slots whose entries are the tokens themselves, and what a cache says that they hold."""

    def __init__(self, count: int) -> None:
        self.contents = PrefixCache(slots=count, ring=Ring(ENTRIES, WINDOW, ahead=2 * DISPATCH))
        self.rings, self.turns = [[-1] * ENTRIES for _ in range(count)], 0

    def turn(self, slot: int, prompt: list[int], response: list[int]) -> PrefixMatch:
        """One turn in a slot, from what is known of its prompt, all of whose first token's window has to be there."""
        known = self.contents.longest(prompt)
        row = [self.rings[known.slot][place % ENTRIES] for place in range(known.tokens)]
        seen = slice(max(0, known.tokens - WINDOW + 1), known.tokens)
        assert row[seen] == prompt[seen]
        row += prompt[known.tokens :]
        request = Request(self.turns, tuple(prompt), keep=True)
        sequence = SequenceState(request, Sampling(), seed=0, limit=99, stop_tokens=(), tokens=[*response, 0])
        self.contents.start(slot, sequence, first=self.contents.reuse(known))
        tokens = [*row, *response, *[-1] * (2 * DISPATCH + 1)]  # the last are of windows that nobody reads
        self.rings[slot] = ring = [-1] * ENTRIES
        for place in range(max(0, len(row) - ENTRIES), len(tokens)):
            ring[place % ENTRIES] = tokens[place]
        self.contents.end(slot, sequence)
        self.turns += 1
        return known


def test_what_a_ring_never_had_is_never_gone_on_from():
    """Conversations that are rewritten, or begin like others, again and again: no token sees what is of another."""
    reused = 0
    for seed in range(60):
        rng, slots = np.random.default_rng(seed), Slots(3)
        told = [[0]]
        for turn in range(1, 30):
            old = told[rng.integers(max(0, len(told) - 4), len(told))]
            prompt = old[: rng.integers(1, len(old) + 1)] + [100 * turn + i for i in range(rng.integers(1, 10))]
            response = [100 * turn + 50 + i for i in range(rng.integers(0, 6))]
            reused += slots.turn(int(rng.integers(3)), prompt, response).tokens > 0
            told.append([*prompt, *response])
    assert reused > 700


def test_a_conversation_goes_on_from_no_slot_that_went_on_from_the_end_of_another():
    """Rewritten, it is as short as what a ring keeps whole, but its beginning was gone before."""
    engine, sampling = build(MIXED, rings=True), Sampling(temperature=1.1, min_tokens=1)
    rng = np.random.default_rng(3)
    first = tuple(rng.integers(4, 32, 20).tolist())
    second, third = (*first[:12], 1), (*first[:8], 2, 2)
    reused, before = [], engine.prefill.reused_tokens
    for place, prompt in enumerate((first, second, third)):
        engine.generate([Request(place, prompt, max_tokens=1, keep=True)], sampling, seed=5)
        reused.append(engine.prefill.reused_tokens - before)
    engine.free()
    assert reused == [0, 12, 12], "the third is run whole"

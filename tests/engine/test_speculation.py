"""Responses with drafts are those without: whatever is drafted, however long, wherever a response ends."""

import functools
import math
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_models import SMALL, gaussian, same_responses, sharp

from jaxrlhf import models
from jaxrlhf.config import Sampling
from jaxrlhf.engine import Engine, Request
from jaxrlhf.engine.speculation import choice
from jaxrlhf.engine.speculation.drafts import Draft
from jaxrlhf.models.attention.attention import Segments
from jaxrlhf.models.config import Experts, FullHeads, LatentAttention, LinearAttention
from jaxrlhf.models.mtp.layer import mtp_rows
from jaxrlhf.models.rope import rotations
from jaxrlhf.planner.hardware import hardware
from jaxrlhf.planner.topology import topology
from jaxrlhf.sharding.described import described
from jaxrlhf.sharding.mesh import SLOT_AXES, mesh_of
from jaxrlhf.sharding.rules import GENERATE, shardings
from tests.engine.test_constraints import Alternating

pytestmark = pytest.mark.usefixtures("programs")

MODEL = replace(SMALL, vocab_size=24, tie_embeddings=True)
LATENT = replace(
    SMALL,
    family="deepseek_v3",
    head_dim=12,
    num_kv_heads=4,
    latent=LatentAttention(rank=8, query_rank=None, rope_dim=4, value_dim=6),
)
WINDOWED = replace(
    SMALL,
    family="gemma3_text",
    num_layers=3,
    sliding_window=12,
    sliding_layers=(True, False, True),
    full_heads=FullHeads(1, 16),
    attention_sinks=True,
)
EXPERTS = replace(SMALL, family="qwen3_moe", experts=Experts(6, 2, 8))
STATES = replace(
    SMALL,
    family="qwen3_next",
    attention_gate=True,
    linear=LinearAttention(key_heads=2, value_heads=4, key_dim=6, value_dim=8),
    linear_layers=(True, False),
)
SPACES = replace(
    SMALL,
    family="granitemoehybrid",
    linear=LinearAttention(key_heads=2, value_heads=4, key_dim=6, value_dim=8, groups=1),
    linear_layers=(True, False),
    rope_layers=(False, False),
)
LONGEST_PROMPT, LONGEST_RESPONSE, STOP = 24, 40, 3


@functools.cache
def build(model=MODEL, *, drafts=True, pages=False, window=8, slots=4, ahead=None, most_kept=0, routes=False, **sizes):
    """Few sizes of prompts and of the cache, so that little is compiled."""
    mesh = mesh_of(sizes, jax.devices()[: math.prod(sizes.values())])
    axes = {"mesh": mesh, "row_axes": SLOT_AXES, "head_axes": ("tensor",)}
    execution = models.Execution(pipeline=models.pipeline_over(mesh, ("stage",), row_axes=SLOT_AXES))
    if pages:
        execution = models.Execution(pages_kernel="xla", **axes)
    if "context" in sizes:
        execution = models.Execution(cache_axes=("context",), **axes)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("jaxrlhf.engine.buckets.SHORTEST_BUCKET", LONGEST_PROMPT)
        patch.setattr("jaxrlhf.engine.buckets.CAPACITY_STEP", LONGEST_PROMPT + LONGEST_RESPONSE)
        patch.setattr("jaxrlhf.engine.buckets.RING_STEP", 4)
        patch.setattr("jaxrlhf.engine.cache.contents.RING_STEP", 4)
        patch.setattr("jaxrlhf.engine.cache.kv_cache._SIXTEENTHS", (16,))
        patch.setitem(choice.MOST_TOKENS, "cpu", 10**6)
        engine = Engine(
            model,
            mesh,
            slots=slots,
            max_prompt_tokens=LONGEST_PROMPT,
            max_response_tokens=LONGEST_RESPONSE,
            stop_tokens=(STOP,),
            decode_tokens_per_dispatch=window,
            slot_axes=SLOT_AXES,
            kv_head_axis="tensor",
            execution=execution,
            records_routing=routes,
            most_kept=most_kept,
            dispatch_ahead=ahead,
            stop_texts=(),
            decode=lambda tokens: "".join(chr(97 + token) for token in tokens),
            speculation="auto" if drafts else None,
        )
    weights = sharp(model, deviation=0.35) if model is MODEL else gaussian(model)
    engine.load(jax.device_put(weights, shardings(mesh, models.param_dims(model, "lm"), GENERATE)), version=0)
    return engine


def requests(**options) -> list[Request]:
    """Groups of three responses to prompts of 1 to 24 tokens, more than there are slots."""
    rng = np.random.default_rng(1)
    prompts = [tuple(rng.integers(4, 24, length).tolist()) for length in (1, 9, 17, 24)]
    return [Request(3 * group + i, prompt, **options) for group, prompt in enumerate(prompts) for i in range(3)]


def verifying(engine: Engine, expected, monkeypatch, *, right=0.8, seed=0):
    """Always verify, drafts of random lengths that continue `expected` responses and are wrong here and there.

    Args:
      expected: Pairs of requests and completions.
      right: Share of the drafted tokens that are right.
    """
    rng, speculation = np.random.default_rng(seed), engine.speculation
    whole = [(*request.prompt_tokens, *completion.tokens) for request, completion in expected]

    def draft(number: int, most: int) -> Draft:
        text = tuple(speculation._index._running[number].text.tokens.tolist())
        known = [tokens[len(text) :] for tokens in whole if tokens[: len(text)] == text] or [(5,) * 8]
        tokens = known[rng.integers(len(known))][: rng.integers(0, max(most, 0) + 1)]
        return Draft(tuple(int(t if rng.random() < right else rng.integers(4, 24)) for t in tokens), 2)

    monkeypatch.setattr(speculation._index, "draft", draft)
    monkeypatch.setattr(speculation, "_width", lambda rows, active: int(rng.choice(speculation.widths)))
    speculation.take_counts()
    return speculation


def both(asked, sampling, monkeypatch, *, seed=7, plain=None, right=0.8, atol=1e-5, **how):
    """Completions without drafts and with them, which are equal; and what was counted."""
    expected = build(**(plain or how) | {"drafts": False}).generate(asked, sampling, seed=seed)
    engine = build(**how)
    speculation = verifying(engine, list(zip(asked, expected, strict=True)), monkeypatch, right=right)
    ours = engine.generate(asked, sampling, seed=seed)
    same_responses(ours, expected, atol=atol)
    counts = speculation.take_counts()
    assert counts.accepted > 0.3 * counts.drafted > 10
    assert "verify" in {sizes[0] for sizes in engine.compiled.programs}
    return expected, ours, counts


SAMPLINGS = {
    "greedy": Sampling(greedy=True),
    "sampled": Sampling(temperature=1.2),
    "narrowed": Sampling(temperature=0.9, top_k=8, top_p=0.9, min_p=0.02, min_tokens=12),
}


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
def test_tokens_are_those_without_drafts(sampling, monkeypatch):
    expected, _, counts = both(requests(), sampling, monkeypatch)
    assert counts.tokens > 1.5 * counts.rows
    assert len({len(completion.tokens) for completion in expected}) > 2


def test_right_drafts_take_few_passes_and_wrong_ones_no_more_than_one_a_token(monkeypatch):
    asked, engine = requests(stop_tokens=())[:4], build()
    expected = build(drafts=False).generate(asked, Sampling(), seed=3)
    for right, most in ((1.0, 0.6 * LONGEST_RESPONSE), (0.0, LONGEST_RESPONSE)):
        with monkeypatch.context() as patch:
            speculation = verifying(engine, list(zip(asked, expected, strict=True)), patch, right=right)
            same_responses(engine.generate(asked, Sampling(), seed=3), expected)
        counts = speculation.take_counts()
        assert counts.calls <= most
        assert abs(counts.accepted / counts.drafted - right) < 0.3


def test_limits_and_stop_tokens_within_a_draft(monkeypatch):
    asked = [
        replace(request, max_tokens=2 + 3 * number, stop_tokens=(number + 4,) if number % 2 else None)
        for number, request in enumerate(requests())
    ]
    both(asked, Sampling(temperature=1.3), monkeypatch, right=0.95)


def test_a_stop_text_within_a_draft(monkeypatch):
    asked = [replace(request, stop_texts=("gh", "eee", "m")) for request in requests(stop_tokens=())]
    expected, _, _ = both(asked, Sampling(), monkeypatch, right=0.95)
    assert sum(completion.stop_text is not None for completion in expected) > 3


@pytest.mark.slow
def test_sampling_masks_are_recorded(monkeypatch):
    sampling = Sampling(top_k=6, top_p=0.9)
    expected, ours, _ = both(requests(), sampling, monkeypatch, most_kept=8)
    for one, other in zip(ours, expected, strict=True):
        for ours_and_theirs in zip(one.recorded["kept"], other.recorded["kept"], strict=True):
            np.testing.assert_array_equal(*ours_and_theirs)


@pytest.mark.slow
def test_experts_are_recorded(monkeypatch):
    expected, ours, _ = both(requests(), Sampling(), monkeypatch, model=EXPERTS, routes=True)
    for one, other in zip(ours, expected, strict=True):
        np.testing.assert_array_equal(one.recorded["routing"][1], other.recorded["routing"][1])


@pytest.mark.slow
def test_a_response_continues_from_tokens_that_were_sampled_earlier(monkeypatch):
    whole = build(drafts=False).generate(requests(), Sampling(), seed=7)
    asked = [
        replace(request, prompt_tokens=(*request.prompt_tokens, *done.tokens[:6]), sampled=6)
        for request, done in zip(requests(), whole, strict=True)
        if len(request.prompt_tokens) < 18 and len(done.tokens) > 6
    ]
    assert len(asked) > 3
    expected, _, _ = both(asked, Sampling(), monkeypatch)
    assert [done.tokens for done in expected] == [
        done.tokens[6:]
        for request, done in zip(requests(), whole, strict=True)
        if len(request.prompt_tokens) < 18 and len(done.tokens) > 6
    ]


@pytest.mark.slow
def test_windows_may_be_dispatched_ahead(monkeypatch):
    both(requests(), Sampling(), monkeypatch, ahead=True, plain={})


KINDS = {
    "latents": {"model": LATENT},
    "rings and sinks": {"model": WINDOWED},
    "states": {"model": STATES},
    "states of spaces on eight devices": {"model": SPACES, "data": 4, "tensor": 2, "slots": 8},
    "pages": {"pages": True, "data": 2, "tensor": 2},
    "heads and replicas of eight devices": {"data": 4, "tensor": 2, "slots": 8},
    "stages": {"stage": 2, "data": 2},
    "positions over devices": {"context": 2, "tensor": 2, "data": 2},
}


@pytest.mark.slow
@pytest.mark.parametrize("how", KINDS.values(), ids=KINDS)
def test_in_every_cache_and_on_every_mesh(how, monkeypatch):
    plain = {name: how[name] for name in ("model",) if name in how}
    both(requests(), Sampling(temperature=1.1), monkeypatch, plain=plain, atol=2e-5, **how)


def conversations(engine: Engine, *, turns: int = 3):
    """Completions of turns that keep their cache, each told two tokens in between; greedy, so that texts repeat."""
    prompts = [(4, 5, 6, 7), (9, 8, 9, 8, 9)]
    found = []
    for turn in range(turns):
        asked = [Request(2 * turn + i, prompt, max_tokens=9, keep=True) for i, prompt in enumerate(prompts)]
        found += engine.generate(asked, Sampling(temperature=0.7), seed=5)
        prompts = [(*prompt, *done.tokens, 7, 8) for prompt, done in zip(prompts, found[-2:], strict=True)]
    engine.free()
    return found


KEPT = {
    "whole": {},
    "rings": {"model": WINDOWED},
    "pages of eight devices": {"pages": True, "data": 4, "tensor": 2, "slots": 8},
}


@pytest.mark.parametrize(
    "how", [pytest.param(how, marks=pytest.mark.slow if how else ()) for how in KEPT.values()], ids=KEPT
)
def test_later_turns_reuse_what_verifications_wrote(how, monkeypatch):
    expected = conversations(build(**{name: how[name] for name in how if name == "model"}, drafts=False))
    engine = build(**how)
    before = engine.prefill.reused_tokens
    verifying(engine, [], monkeypatch, right=0.5)
    same_responses(conversations(engine), expected, atol=2e-5)
    assert engine.prefill.reused_tokens > before
    assert engine.speculation.take_counts().calls > 10


@pytest.mark.slow
def test_while_a_response_is_constrained_nothing_is_drafted(monkeypatch):
    asked = [*requests(max_tokens=12)[:2], Request(50, (5, 6, 7), max_tokens=12, constraint=Alternating())]
    expected = build(drafts=False).generate(asked, Sampling(), seed=2)
    engine = build()
    verifying(engine, list(zip(asked, expected, strict=True)), monkeypatch)
    calls, run = [], engine.compiled.run
    monkeypatch.setattr(
        engine.compiled, "run", lambda name, *rest, **how: calls.append(name) or run(name, *rest, **how)
    )
    again = [*asked[:2], replace(asked[2], constraint=Alternating())]
    same_responses(engine.generate(again, Sampling(), seed=2), expected)
    decoded = [name for name in calls if name[0] in ("decode", "verify")]
    assert all("constrained" in name for name in decoded[:9])


def test_engines_that_cannot_verify_say_so_and_generate():
    states = replace(STATES, num_layers=4, linear_layers=(True, False) * 2)
    engine = build(states, stage=2, data=2)
    assert "linear attention" in engine.speculation.off
    ours = engine.generate(requests()[:2], Sampling(), seed=1)
    same_responses(ours, build(states, drafts=False).generate(requests()[:2], Sampling(), seed=1))
    assert "decode_tokens_per_dispatch=2" in build(window=2).speculation.off
    assert build(drafts=False).speculation.off == "rollout.speculation=None"
    assert build().speculation.off is None


def test_a_second_time_the_engine_drafts_what_it_said_before(monkeypatch):
    """With its own drafts, at a made-up price: nothing but the random numbers of the second time differs."""
    engine = build()
    engine.free()
    monkeypatch.setattr(engine.speculation, "_seconds", {(4, 1): 1.0, (4, 4): 1.1, (4, 8): 1.2})
    monkeypatch.setattr(engine.speculation, "_clock", lambda: 0.0)
    monkeypatch.setattr(engine.speculation, "_measure", lambda *_, **__: None)
    asked, sampling = requests(), Sampling(temperature=0.6)
    for seed in (1, 2):
        expected = build(drafts=False).generate(asked, sampling, seed=seed)
        same_responses(engine.generate(asked, sampling, seed=seed), expected)
    assert engine.speculation._index.tokens > 100


@pytest.mark.slow
def test_a_verification_on_a_tpu_holds_its_cache_once(monkeypatch):
    """The chip's own compiler says so, asked about a model that is hardly more than its cache."""
    model = replace(MODEL, num_kv_heads=4, head_dim=128, hidden_size=128)
    mesh = mesh_of({"data": 1}, topology(hardware("v5e-1")))
    layout = shardings(mesh, models.param_dims(model, "lm"), GENERATE)
    sizes = {"slots": 32, "max_prompt_tokens": 512, "max_response_tokens": 512, "decode_tokens_per_dispatch": 8}
    engine = Engine(model, mesh, **sizes, stop_tokens=(3,), slot_axes=SLOT_AXES, speculation="auto")
    engine.load(described(models.param_shapes(model, "lm", jnp.bfloat16), layout), version=0)
    monkeypatch.setattr(engine.speculation, "_chosen", lambda *_: np.full((32, 7), -1, np.int32))
    engine.compile_ahead([512])
    memory = engine.compiled.lowered["verify[32, 1024, 7]"].compile().memory_analysis()
    cache = 2 * model.num_layers * 32 * 4 * 128 * 1024 * 4
    assert cache < memory.argument_size_in_bytes < 1.1 * cache
    assert memory.temp_size_in_bytes < 0.5 * cache


GATED = replace(STATES, mtp="normed")
DENSE_MTP = replace(MODEL, family="glm4_moe", qkv_bias=False, experts=Experts(6, 2, 8), mtp="output")
LATENT_MTP = replace(LATENT, mtp="output")
MTP = {
    "experts": {"model": DENSE_MTP},
    "latents": {"model": LATENT_MTP},
    "states on eight devices": {"model": GATED, "data": 4, "tensor": 2, "slots": 8},
    "positions over devices": {"model": DENSE_MTP, "context": 2, "data": 2},
}


@pytest.mark.parametrize(
    "how", [pytest.param(how, marks=pytest.mark.slow if how != MTP["experts"] else ()) for how in MTP.values()], ids=MTP
)
def test_drafts_of_the_model_change_no_token(how, monkeypatch):
    """Drafts of its further layer, whose weights are random, so that few are right."""
    engine = build(**how)
    assert engine.execution.mtp_slots
    monkeypatch.setattr(engine.speculation, "_width", lambda rows, active: 4)
    monkeypatch.setattr(engine.speculation._index, "draft", lambda *_: Draft((), 0))
    engine.speculation.take_counts()
    for sampling in (Sampling(greedy=True), Sampling(temperature=1.2)):
        expected = build(how["model"], drafts=False).generate(requests(), sampling, seed=7)
        same_responses(engine.generate(requests(), sampling, seed=7), expected, atol=2e-5)
    counts = engine.speculation.take_counts()
    assert counts.calls > 10 and counts.drafted > 20


@pytest.mark.parametrize("reads", ["output", pytest.param("normed", marks=pytest.mark.slow)])
def test_drafts_are_the_likeliest_tokens_of_the_layer(reads, monkeypatch):
    """The layer's forward pass over the whole text decides; zeros stand for the token after the prompt."""
    model, found = replace(DENSE_MTP, mtp=reads), []
    engine, params = build(model), gaussian(model)
    read = engine.speculation.read

    def recorded(windows, **how):
        found.extend(
            (sequence.request, tuple(sequence.tokens), window.drafted) for sequence, window in windows if window.active
        )
        read(windows, **how)

    monkeypatch.setattr(engine.speculation, "read", recorded)
    engine.generate(requests(), Sampling(greedy=True), seed=1)
    assert len(found) > 30
    width = LONGEST_PROMPT + LONGEST_RESPONSE
    token_RW = np.zeros((len(found), width), np.int32)
    next_RW = np.full((len(found), width), -1, np.int32)
    for row, (request, tokens, _) in enumerate(found):
        text, prompt = (*request.prompt_tokens, *tokens), len(request.prompt_tokens)
        token_RW[row, : len(text)] = text
        next_RW[row, : len(text) - 1] = text[1:]
        next_RW[row, prompt - 1] = -1
    place_RW = np.broadcast_to(np.arange(width, dtype=np.int32), token_RW.shape)
    given = place_RW, np.ones_like(place_RW)
    hidden_RWD = np.array(models.hidden_states(params, model, token_RW, *given).hidden_RWD)
    turn = rotations(model, place_RW)
    for draft in range(2):
        how = turn, Segments(given[1]), models.ONE_DEVICE
        further_RWD, _ = mtp_rows(params, model, jnp.asarray(hidden_RWD), jnp.asarray(next_RW), *how)
        logit_RWV = np.asarray(models.logits(params, model, further_RWD))
        # The output before the norm, but for its length, which the norm that reads it takes away.
        read_RWD = np.asarray(further_RWD) / (np.asarray(params["mtp"]["norm"]) if reads == "output" else 1)
        for row, (request, tokens, drafted) in enumerate(found):
            place = len(request.prompt_tokens) + len(tokens) - 2 + draft
            assert logit_RWV[row, place].max() - logit_RWV[row, place, drafted[draft]] < 1e-4
            hidden_RWD[row, place + 1], next_RW[row, place + 1] = read_RWD[row, place], drafted[draft]

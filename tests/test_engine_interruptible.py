"""Responses that go on from the keys and values that they had: nothing is run again, and each token says by what."""

import functools
import pickle
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_engine_turns import MODEL, build
from test_workers_partial_rollouts import COPIES, PROMPTS, SEED, WIDTH, load, problems, sampler_of, unstarted, whole
from tiny_models import gaussian

from jaxrlhf import models
from jaxrlhf.batch import Problem
from jaxrlhf.batching.partial_rollouts import PartialRollout, Round, unstarted_groups
from jaxrlhf.config import Refusal, Sampling
from jaxrlhf.models.config import LinearAttention

pytestmark = pytest.mark.usefixtures("programs")

SCALES = (1.0, 0.8, 1.2)
"""Weights of each version, over those of the first: a policy that is less sure of itself, and one that is more."""

RINGS = replace(MODEL, sliding_window=8)


@functools.cache
def ringed():
    """An engine whose window's layer keeps 24 positions of up to 64."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("jaxrlhf.engine.buckets.ring_entries", lambda *_, **__: 24)
        return build(RINGS, slots=8, window=2)


def keeping(engine):
    return replace(sampler_of(engine), holds=True)


def in_rounds(engine, scales, *, model=MODEL, sampling=None, again=lambda under_way: under_way) -> list[PartialRollout]:
    """Groups under way after each round of which the last has all complete, and each before one more."""
    rounds, under_way = [], unstarted().holding(True)
    for version, scale in enumerate(scales):
        engine.load(jax.tree.map(lambda leaf, scale=scale: jnp.asarray(scale * leaf), gaussian(model)), version)
        complete = len(PROMPTS) if version == len(scales) - 1 else 1 + version
        until = Round(complete, len(PROMPTS), 0)
        under_way = again(keeping(engine).go_on(problems(), under_way, sampling or Sampling(), until))
        rounds.append(under_way)
    return rounds


def equal(one: PartialRollout, other: PartialRollout) -> None:
    """The same responses to the last bit, whatever waits beside them."""
    jax.tree.map(np.testing.assert_array_equal, replace(one, held_B=None), replace(other, held_B=None))


ENGINES = {
    "slots": (lambda: build(slots=8, window=2), MODEL),
    "few slots": (lambda: build(slots=4, window=2), MODEL),
    "a window ahead": (lambda: build(slots=8, window=2), MODEL),
    "rings": (ringed, RINGS),
    "pages": (lambda: build(pages=True, slots=8, window=2), MODEL),
    "pages of replicas and heads": (lambda: build(pages=True, slots=8, window=2, data=2, tensor=2), MODEL),
    "stages": (lambda: build(slots=8, window=2, stage=2), MODEL),
}
FURTHER = {"few slots": pytest.mark.seeds, "pages": pytest.mark.seeds}
"""Engines of the last tier."""


@pytest.mark.parametrize("name", [pytest.param(n, marks=FURTHER.get(n, pytest.mark.slow)) for n in ENGINES])
def test_rounds_of_one_policy_draw_what_it_draws_at_once_and_run_no_token_twice(monkeypatch, name):
    build_engine, model = ENGINES[name]
    engine = build_engine()
    if name == "a window ahead":  # dispatched before the one before it is read
        monkeypatch.setattr(engine, "_dispatch_ahead", True)
    engine.load(jax.device_put(gaussian(model), jax.tree.map(lambda leaf: leaf.sharding, engine.weights.params)), 0)
    expected, before, under_way = whole(engine, Sampling()), engine.prefill.prompt_tokens, unstarted().holding(True)
    rounds = []
    for complete in (1, 2, 3, 4):
        under_way = keeping(engine).go_on(problems(), under_way, Sampling(), Round(complete, 4, 0))
        rounds.append(under_way)
    assert sum(held is not None for held in rounds[0].held_B) > 2
    assert not under_way.held_B.any() and under_way.ended_B.all()
    np.testing.assert_array_equal(under_way.rollout.sequences.token_BT, expected.sequences.token_BT)
    np.testing.assert_array_equal(under_way.rollout.truncated_B, expected.truncated_B)
    np.testing.assert_allclose(under_way.rollout.sampler_logp_BT, expected.sampler_logp_BT, atol=1e-5)
    most = COPIES if name == "few slots" else 1  # copies whose turn comes later need their prompt again
    assert engine.prefill.prompt_tokens - before <= most * sum(map(len, PROMPTS))


def test_each_token_is_as_likely_as_its_policy_says_with_the_cache_that_earlier_ones_left():
    *others, last = in_rounds(build(slots=8, window=2), SCALES)
    version_BT, mask_BT = last.rollout.version_BT, np.asarray(last.rollout.sequences.mask_BT)
    assert max(len({*row[chosen].tolist()}) for row, chosen in zip(version_BT, mask_BT, strict=True)) == 3
    held = [[WIDTH if one is None else one.length for one in part.held_B] for part in others]  # None have ended
    logp_BT = replayed(last, held)
    np.testing.assert_allclose(last.rollout.sampler_logp_BT[mask_BT], logp_BT[mask_BT], atol=1e-5)
    fresh_BT = replayed(last, [[0] * len(version_BT)] * len(others))  # all by the newest: no policy of a round's
    assert np.abs(fresh_BT - logp_BT)[mask_BT & (version_BT < 2)].max() > 0.1


def replayed(last: PartialRollout, held: list[list[int]]) -> np.ndarray:
    """Log-probabilities of all tokens, each run once, one after another, by weights of its round.

    Args:
      held: Tokens of each response that were run by the end of each round but the last.
    """
    token_BT, length_B = last.rollout.sequences.token_BT, last.rollout.sequences.length_B
    scaled = [jax.tree.map(lambda leaf, s=scale: jnp.asarray(s * leaf), gaussian(MODEL)) for scale in SCALES]

    @jax.jit
    def run(params, token_B, position_B, cache):
        output = models.decode(models.unstack_layers(params, MODEL), params, MODEL, token_B, position_B, cache)
        return output.cache, jax.nn.log_softmax(output.hidden_BD @ params["head"].T)

    logp_BT = np.zeros(token_BT.shape, np.float32)
    for row, length in enumerate(length_B):
        cache = models.empty_cache(MODEL, slots=1, capacity=WIDTH)
        for at in range(length - 1):
            version = sum(at >= ends[row] for ends in held)
            cache, logp_1V = run(scaled[version], token_BT[row : row + 1, at], np.array([at]), cache)
            logp_BT[row, at + 1] = logp_1V[0, token_BT[row, at + 1]]
    return logp_BT


def test_what_waits_is_saved_and_goes_on_with_the_same_bits():
    engine = build(slots=8, window=2)
    kept = in_rounds(engine, SCALES)
    saved = in_rounds(engine, SCALES, again=lambda under_way: pickle.loads(pickle.dumps(under_way)))
    for one, other in zip(kept, saved, strict=True):
        equal(one, other)
    recomputed = in_rounds(engine, SCALES, again=lambda under_way: under_way.holding(False))[-1]
    assert (recomputed.rollout.sampler_logp_BT != kept[-1].rollout.sampler_logp_BT).any()


def test_no_program_is_compiled_once_responses_go_on():
    engine = load(build(slots=8, window=2, most_kept=3), 1.0, 0)
    keeping(engine).compile_ahead([3, 48])
    compiled = engine.compilations
    long = [Problem(prompt_id=n, prompt="", prompt_tokens=(5 + n,) * (48 - n)) for n in range(4)]
    under_way = unstarted_groups(long, copies=COPIES, seed=SEED, step=0, width=WIDTH, most_kept=3).holding(True)
    for complete in (1, 2, 3, 4):
        under_way = keeping(engine).go_on(long, under_way, Sampling(top_k=3), Round(complete, len(long), due=-1))
    assert under_way.ended_B.all() and engine.compilations == compiled


def test_responses_that_there_are_no_slots_for_any_more_are_computed_again():
    wide, narrow = (load(build(slots=slots, window=2), 1.0, 0) for slots in (8, 2))
    first = keeping(wide).go_on(problems(), unstarted().holding(True), Sampling(), Round(1, 4, 0))
    assert sum(held is not None for held in first.held_B) > 2
    last = keeping(narrow).go_on(problems(), first, Sampling(), Round(4, 4, 0))
    expected = whole(wide, Sampling())
    np.testing.assert_array_equal(last.rollout.sequences.token_BT, expected.sequences.token_BT)
    np.testing.assert_allclose(last.rollout.sampler_logp_BT, expected.sampler_logp_BT, atol=1e-5)
    assert narrow.prefill.prompt_tokens and not narrow.unfinished and not narrow.book.active


def test_a_model_with_states_is_refused_before_anything_is_compiled():
    linear = LinearAttention(key_heads=2, value_heads=4, key_dim=8, value_dim=6)
    engine = build(slots=8, window=2)
    shape = replace(engine._shape, config=replace(MODEL, linear=linear, linear_layers=(True, False)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine, "_shape", shape)
        with pytest.raises(Refusal, match="states of linear attention"):
            keeping(engine)

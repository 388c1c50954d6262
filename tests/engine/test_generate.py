"""The engine against the teacher-forced model, and against itself in other batches."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compiled import most_compilations
from jax.sharding import AxisType, Mesh
from tiny_models import same_responses, sharp

from jaxrlhf import models
from jaxrlhf.batch import Diverged
from jaxrlhf.config import Sampling
from jaxrlhf.engine import Engine, Request
from jaxrlhf.models.config import ModelConfig

pytestmark = pytest.mark.usefixtures("programs")

MODEL = ModelConfig(
    family="qwen2",
    vocab_size=48,
    hidden_size=16,
    intermediate_size=32,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    qkv_bias=True,
    tie_embeddings=True,
)
STOP = (2, 11)
LONGEST_PROMPT, LONGEST_RESPONSE = 20, 12


def weights(seed: int):
    return jax.tree.map(jnp.asarray, sharp(MODEL, seed))


def build(**changes) -> Engine:
    sizes = {
        "slots": 4,
        "max_prompt_tokens": LONGEST_PROMPT,
        "max_response_tokens": LONGEST_RESPONSE,
        "stop_tokens": STOP,
        "decode_tokens_per_dispatch": 4,
    }
    mesh = Mesh(np.asarray(jax.devices()[:1]), ("data",), axis_types=(AxisType.Auto,))
    return Engine(MODEL, mesh, **(sizes | changes))


def problems(count: int, *, responses: int = 1, seed: int = 0) -> list[Request]:
    """Prompts of 1 to 16 tokens, the shortest bucket of lengths."""
    rng = np.random.default_rng(seed)
    prompts = [tuple(rng.integers(0, 48, rng.integers(1, 17)).tolist()) for _ in range(count)]
    return [
        Request(100 + group * responses + index, prompt)
        for group, prompt in enumerate(prompts)
        for index in range(responses)
    ]


@jax.jit
def _teacher(params, token_RW):
    segment_RW = jnp.ones_like(token_RW)
    position_RW = jnp.broadcast_to(jnp.arange(token_RW.shape[1]), token_RW.shape)
    return models.hidden_states(params, MODEL, token_RW, position_RW, segment_RW).hidden_RWD @ params["embed"].T


def teacher_logp(params, request, completion, *, temperature=1.0) -> np.ndarray:
    """log-softmax in float64 of the full forward pass at each response token, `[tokens, V]`."""
    sequence = [*request.prompt_tokens, *completion.tokens]
    token_1W = np.zeros((1, LONGEST_PROMPT + LONGEST_RESPONSE), np.int32)
    token_1W[0, : len(sequence)] = sequence
    logits_WV = np.asarray(_teacher(params, token_1W), np.float64)[0] / temperature
    start = len(request.prompt_tokens) - 1
    logits_WV = logits_WV[start : start + len(completion.tokens)]
    peak_W1 = logits_WV.max(axis=-1, keepdims=True)
    return logits_WV - peak_W1 - np.log(np.exp(logits_WV - peak_W1).sum(axis=-1, keepdims=True))


@pytest.fixture(scope="module")
def params():
    return weights(0)


@pytest.fixture(scope="module")
def shared():
    """One engine for all tests that need no other sizes."""
    return build()


@pytest.fixture
def engine(shared, params):
    shared.free()
    shared.load(params, version=1)
    return shared


@pytest.fixture(scope="module")
def sampled(shared, params):
    """Twelve requests in four slots: refilled, truncated and stopped responses."""
    shared.load(params, version=1)
    requests = problems(4, responses=3)
    return requests, shared.generate(requests, Sampling(temperature=1.2), seed=7)


def test_greedy_is_the_argmax_of_the_teacher_forced_model(engine, params):
    requests = problems(9, seed=1)
    for request, completion in zip(requests, engine.generate(requests, Sampling(greedy=True), seed=0), strict=True):
        logp_TV = teacher_logp(params, request, completion)
        np.testing.assert_array_equal(completion.tokens, logp_TV.argmax(axis=-1))
        np.testing.assert_allclose(completion.logps, logp_TV.max(axis=-1), atol=1e-5)


def test_sampled_logp_is_the_trainers(sampled, params):
    for request, completion in zip(*sampled, strict=True):
        logp_TV = teacher_logp(params, request, completion, temperature=1.2)
        chosen_T = logp_TV[np.arange(len(completion.tokens)), list(completion.tokens)]
        np.testing.assert_allclose(completion.logps, chosen_T, atol=1e-5)


def test_responses_end_at_a_stop_token_or_at_the_limit(sampled):
    _, completions = sampled
    for completion in completions:
        assert not set(completion.tokens[:-1]) & set(STOP)
        stopped = completion.tokens[-1] in STOP
        assert completion.truncated == (not stopped)
        assert stopped or len(completion.tokens) == LONGEST_RESPONSE
        assert completion.version == 1
    assert {completion.truncated for completion in completions} == {True, False}, "the example shows one kind only"


def test_a_sample_is_the_same_alone_in_another_order_and_with_other_settings_around_it(engine, sampled):
    requests, expected = sampled
    sampling = Sampling(temperature=1.2)
    for index in (0, 5, 11):
        same_responses(engine.generate([requests[index]], sampling, seed=7), [expected[index]])
    backwards = engine.generate(requests[::-1], sampling, seed=7)
    same_responses(backwards[::-1], expected)


def test_a_sample_does_not_depend_on_slots_tokens_per_dispatch_or_rows_of_a_prefill(shared, params, sampled):
    requests, expected = sampled
    other = build(slots=13, decode_tokens_per_dispatch=1, prompts=2)
    other.load(params, version=1)
    assert (other.prefill.rows, shared.prefill.rows) == (2, 4), "no more than prompts come at a time"
    same_responses(other.generate(requests, Sampling(temperature=1.2), seed=7), expected)


def test_another_seed_or_request_id_gives_another_sample(engine, sampled):
    requests, expected = sampled
    other_seed = engine.generate(requests, Sampling(temperature=1.2), seed=8)
    assert [c.tokens for c in other_seed] != [c.tokens for c in expected]
    assert len({c.tokens for c in expected[:3]}) > 1, "responses of one group are all alike"


@pytest.mark.slow
def test_decoding_over_part_of_the_cache_and_compiling_ahead_change_nothing(params, sampled, monkeypatch):
    monkeypatch.setattr("jaxrlhf.engine.buckets.CAPACITY_STEP", 12)
    requests, expected = sampled
    engine = build()
    engine.load(params, version=1)
    engine.compile_ahead([20, *(len(request.prompt_tokens) for request in requests)])
    ahead = set(engine.compiled.programs)
    same_responses(engine.generate(requests, Sampling(temperature=1.2), seed=7), expected)
    engine.generate([Request(slot, (slot,) * 20) for slot in range(4)], Sampling(min_tokens=12), seed=0)  # the longest
    assert set(engine.compiled.programs) == ahead
    assert len(engine.compiled) <= most_compilations(engine)
    assert engine.cache.sizes == (12, 24, 32)


@pytest.mark.slow
def test_responses_that_go_on_in_fewer_slots_stay_the_same(engine, params, monkeypatch):
    monkeypatch.setattr("jaxrlhf.engine.buckets.FEWEST_SLOTS", 2)
    requests = [replace(request, stop_tokens=tuple(range(8))) for request in problems(4, responses=2)]
    wide = build(slots=8, decode_tokens_per_dispatch=1)
    wide.load(params, version=1)
    expected = engine.generate(requests, Sampling(), seed=7)
    same_responses(wide.generate(requests, Sampling(), seed=7), expected)
    decoded = {sizes[1] for sizes in wide.compiled.programs if sizes[0] == "decode"}
    assert max(decoded) == len(requests) and len(decoded) > 1
    assert len(wide.compiled) <= most_compilations(wide)
    # The next call starts with all slots again.
    same_responses(wide.generate(requests, Sampling(), seed=7), expected)


def test_a_group_is_prefilled_once(engine):
    before = engine.prefill.prompts
    engine.generate(problems(5, responses=6), Sampling(), seed=0)
    assert engine.prefill.prompts - before == 5


def test_callbacks_see_every_completion(engine):
    seen, steps = [], []
    requests = problems(7)
    completions = engine.generate(
        requests, Sampling(), seed=0, progress=lambda *counts: steps.append(counts), on_completion=seen.append
    )
    assert sorted(seen, key=lambda c: c.request_id) == completions
    assert steps[-1] == (7, 7) and steps == sorted(steps)


def test_min_tokens_hold_back_every_stop_token(engine):
    for greedy in (False, True):
        sampling = Sampling(temperature=2.0, min_tokens=5, greedy=greedy)
        for completion in engine.generate(problems(12), sampling, seed=3):
            assert not set(completion.tokens[:5]) & set(STOP)
            assert len(completion.tokens) > 5


def test_top_k_of_one_is_greedy(engine):
    requests = problems(6)
    narrow = engine.generate(requests, Sampling(top_k=1), seed=0)
    same_responses(narrow, engine.generate(requests, Sampling(greedy=True), seed=9))


def test_nothing_recompiles(engine):
    engine.generate(problems(10, responses=2), Sampling(), seed=0)
    engine.generate([Request(0, (1,) * 20)], Sampling(), seed=0)  # the other bucket of prompt lengths
    compilations = len(engine.compiled)
    assert compilations <= most_compilations(engine)
    for step, temperature in enumerate([0.3, 1.0, 2.0]):
        engine.load(weights(step), version=step + 2)
        sampling = Sampling(temperature=temperature, top_p=1 - step / 10, top_k=step, min_tokens=step, greedy=step == 1)
        engine.generate(problems(3 + step, responses=1 + step, seed=step), sampling, seed=step)
    assert len(engine.compiled) == compilations


def test_responses_of_one_token_need_no_decoding(engine):
    completions = engine.generate([replace(one, max_tokens=1) for one in problems(9)], Sampling(), seed=0)
    assert all(len(c.tokens) == len(c.logps) == 1 for c in completions)


def test_no_requests_no_completions(engine):
    assert engine.generate([], Sampling(), seed=0) == []


def test_versions_never_mix(engine, params):
    engine.load(weights(1), version=2)
    engine.add(Request(5, (1, 2, 3)), Sampling(min_tokens=12), seed=0)
    engine.step()
    with pytest.raises(RuntimeError, match="1 responses are being generated with version 2"):
        engine.load(params, version=3)
    engine.free()
    engine.load(params, version=3)
    assert engine.generate(problems(1), Sampling(), seed=0)[0].version == 3


def test_requests_join_while_others_are_under_way_with_seeds_and_settings_of_their_own(engine):
    requests = problems(7)
    expected = [engine.generate([request], Sampling(), seed=4)[0] for request in requests]
    expected += engine.generate([replace(requests[0], request_id=900)], Sampling(top_k=2), seed=5)
    found = []
    for turn, request in enumerate(requests):
        engine.add(request, Sampling(), seed=4)
        found += engine.step() if turn % 3 else []
    engine.add(replace(requests[0], request_id=900), Sampling(top_k=2), seed=5)
    while engine.unfinished:
        found += engine.step()
    assert engine.step() == []
    engine.free()
    same_responses(sorted(found, key=lambda one: one.request_id), expected)


def test_a_request_may_have_its_own_limit_and_stop_tokens(engine):
    plain, other = problems(2)
    whole = engine.generate([plain, replace(other, stop_tokens=())], Sampling(), seed=3)
    assert len(whole[0].tokens) > 2 and len(whole[1].tokens) == 12, "both go on for a while"
    stop = whole[1].tokens[6]
    first = whole[1].tokens.index(stop)
    requests = [replace(plain, max_tokens=2), replace(other, stop_tokens=(stop,)), replace(plain, request_id=77)]
    cut, stopped, _ = engine.generate(requests, Sampling(), seed=3)
    assert (cut.tokens, cut.truncated) == (whole[0].tokens[:2], True)
    assert (stopped.tokens, stopped.truncated) == (whole[1].tokens[: first + 1], False)
    _, late, _ = engine.generate(requests, Sampling(min_tokens=12), seed=3)
    assert len(late.tokens) == 12 and stop not in late.tokens[:-1], "min_tokens holds back the request's own"


def alive() -> int:
    """Bytes of all arrays that somebody refers to."""
    return sum(array.nbytes for array in jax.live_arrays())


@pytest.mark.usefixtures("no_leftovers")
def test_generate_leaves_no_cache_and_unload_no_weights(engine, params):
    engine.unload()
    before = alive()
    copy = jax.tree.map(jnp.copy, params)
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(copy))
    engine.load(copy, version=2)
    del copy
    assert alive() == before + size
    engine.generate(problems(2), Sampling(), seed=0)
    assert alive() == before + size
    engine.add(Request(5, (1, 2, 3)), Sampling(min_tokens=12), seed=0)
    engine.step()
    assert alive() > before + size  # the cache would be seen
    engine.free()
    assert alive() == before + size
    engine.unload()
    assert alive() == before
    with pytest.raises(RuntimeError, match="call load"):
        engine.generate(problems(2), Sampling(), seed=0)


def test_a_failing_callback_does_not_leave_slots_taken(engine):
    def fail(completion):
        raise KeyError("reward")

    with pytest.raises(KeyError, match="reward"):
        engine.generate(problems(6), Sampling(), seed=0, on_completion=fail)
    assert engine.book.active == 0 and not engine.unfinished
    assert len(engine.generate(problems(6), Sampling(), seed=0)) == 6


def test_diverged_weights_are_reported(engine, params):
    engine.load(jax.tree.map(lambda leaf: leaf * jnp.nan, params), version=1)
    with pytest.raises(Diverged, match=r"not finite.*; resume from the last checkpoint with .* look at samples\.jsonl"):
        engine.generate(problems(2), Sampling(), seed=0)


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (Request(0, (1,) * 21), "a prompt of 21 tokens and a response of up to 12; expected a prompt of 1 to 20"),
        (Request(0, ()), "a prompt of 0 tokens"),
        (Request(0, (1, 48)), "expected ids from 0 to 47"),
        (Request(2**32, (1,)), "request_id=4294967296 does not fit"),
        (
            Request(3, (1,), max_tokens=13),
            "max_tokens=13 of request 3; expected 1 to the engine's max_response_tokens=12",
        ),
        (Request(3, (1,), stop_tokens=(1, 48)), r"stop_tokens=\(1, 48\) of request 3; expected at most 8 ids"),
    ],
)
def test_requests_that_cannot_be_answered(engine, request_, message):
    with pytest.raises(ValueError, match=message):
        engine.generate([request_], Sampling(), seed=0)


def test_a_seed_out_of_range(engine):
    with pytest.raises(ValueError, match="seed=-1"):
        engine.generate(problems(1), Sampling(), seed=-1)


@pytest.mark.parametrize("name", ["slots", "max_prompt_tokens", "max_response_tokens", "decode_tokens_per_dispatch"])
def test_sizes_below_one(name):
    with pytest.raises(ValueError, match=f"{name}=0; expected 1 or more"):
        build(**{name: 0})


def test_sizes_that_do_not_fit_the_model():
    with pytest.raises(ValueError, match="exceeds the model's 32768 positions"):
        build(max_response_tokens=40_000)
    with pytest.raises(ValueError, match=r"stop_tokens \[48\]"):
        build(stop_tokens=(48,))


def test_weights_of_another_shape_are_refused(engine, params):
    with pytest.raises(ValueError, match="another shape, dtype or layout"):
        engine.load(jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), params), version=2)

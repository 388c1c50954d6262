"""The engine dispatches a window of tokens before it reads the one before, and draws what it draws otherwise."""

from collections import Counter
from dataclasses import replace
from unittest import mock

import jax
import numpy as np
import pytest
from tiny_models import sharp

from jaxrlhf import models
from jaxrlhf.batch import Diverged
from jaxrlhf.config import Sampling
from jaxrlhf.engine import Engine, Request
from jaxrlhf.engine.slot_book import SlotBook
from jaxrlhf.models.config import Experts, ModelConfig
from jaxrlhf.sharding.mesh import SLOT_AXES, mesh_of
from jaxrlhf.sharding.rules import GENERATE, shardings

pytestmark = pytest.mark.usefixtures("programs")

MODEL = ModelConfig(
    family="qwen3_moe",
    vocab_size=32,
    hidden_size=16,
    intermediate_size=32,
    num_layers=1,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    qk_norm=True,
    experts=Experts(4, 2, 8),
)
SLOTS, TOKENS = 16, 12
STOP = (3, 5, 7)


@pytest.fixture(scope="module")
def engine():
    """Two replicas of a mixture of experts that record its choices, and go down from 8 slots each to 4."""
    mesh = mesh_of({"data": 2}, jax.devices()[:2])
    layout = shardings(mesh, models.param_dims(MODEL, "lm"), GENERATE)
    with mock.patch("jaxrlhf.engine.buckets.FEWEST_SLOTS", 4):
        engine = Engine(
            MODEL,
            mesh,
            slots=SLOTS,
            max_prompt_tokens=6,
            max_response_tokens=TOKENS,
            stop_tokens=STOP,
            decode_tokens_per_dispatch=2,
            slot_axes=SLOT_AXES,
            records_routing=True,
            dispatch_ahead=True,
        )
    engine.load(jax.device_put(sharp(MODEL), layout), version=0)
    return engine


@pytest.fixture
def events(engine, monkeypatch):
    """Log of dispatches (`decode`, `insert`, ...) and reads, in order."""
    events: list[str] = []
    run, read = engine.compiled.run, SlotBook.read

    def recorded_run(sizes, *args, **kwargs):
        events.append(sizes[0])
        return run(sizes, *args, **kwargs)

    def recorded_read(book):
        events.append("read")
        return read(book)

    monkeypatch.setattr(engine.compiled, "run", recorded_run)
    monkeypatch.setattr(SlotBook, "read", recorded_read)
    return events


def requests_of(count: int) -> list[Request]:
    return [Request(index, tuple(range(8, 9 + index % 6))) for index in range(count)]


def unread(events: list[str]) -> list[tuple[str, int]]:
    """Each event, and how many windows were dispatched and not read before it."""
    count = Counter()
    seen = []
    for event in events:
        seen.append((event, count["decode"] - count["read"]))
        count[event] += 1
    return seen


def test_the_next_window_is_dispatched_before_the_last_is_read(engine, events):
    completions = engine.generate(requests_of(SLOTS), Sampling(), seed=1)
    longest = max(len(completion.tokens) for completion in completions)
    assert longest > 6, "a long tail is wanted"
    reads = [before for event, before in unread(events) if event == "read"]
    assert len(reads) == -(-(longest - 1) // 2), "every window is read once"
    # The last window of a response that reaches the limit has none after it.
    assert reads[:-1] == [2] * (len(reads) - 1)
    assert any(event == "keep" for event in events), "idle slots are left"


def test_windows_of_responses_that_reach_the_limit_together_are_as_many_as_they_need(engine, events):
    engine.generate(requests_of(SLOTS), Sampling(min_tokens=TOKENS), seed=0)
    assert Counter(events)["decode"] == Counter(events)["read"] == -(-(TOKENS - 1) // 2)


def test_while_requests_wait_every_window_is_read_at_once(engine, events):
    engine.generate(requests_of(3 * SLOTS), Sampling(), seed=0)
    last = max(place for place, event in enumerate(events) if event == "insert")
    counted = unread(events)
    assert {before for event, before in counted[:last] if event == "read"} == {1}
    assert {before for event, before in counted if event == "insert"} == {0}
    assert {before for event, before in counted[last:] if event == "read"} >= {2}


@pytest.mark.parametrize("count", [SLOTS - 5, 2 * SLOTS])
def test_what_is_sampled_is_what_is_sampled_one_window_after_another(engine, events, count, monkeypatch):
    for seed in range(3):
        ahead = engine.generate(requests_of(count), Sampling(temperature=0.9), seed=seed)
        with monkeypatch.context() as patched:
            patched.setattr(SlotBook, "outlasts", False)
            events.clear()
            in_turn = engine.generate(requests_of(count), Sampling(temperature=0.9), seed=seed)
            assert {before for event, before in unread(events) if event == "read"} == {1}
        # Slots are left a window earlier or later; on some processors programs of other widths round otherwise.
        assert [replace(one, logps=()) for one in ahead] == [replace(one, logps=()) for one in in_turn]
        for one, other in zip(ahead, in_turn, strict=True):
            np.testing.assert_allclose(one.logps, other.logps, rtol=0, atol=1e-6)
            np.testing.assert_array_equal(one.recorded["routing"][1], other.recorded["routing"][1])
            assert len(one.recorded["routing"][1]) == 1 + one.request_id % 6 + len(one.tokens) - 1


def test_requests_that_join_a_tail_have_its_slots_back_and_give_what_a_batch_gives(engine, events):
    """They come while windows are on their way, and when most slots were left."""
    requests = requests_of(2 * SLOTS)
    expected = engine.generate(requests, Sampling(), seed=1)
    events.clear()
    for request in requests[:SLOTS]:
        engine.add(request, Sampling(), seed=1)
    found = []
    while "keep" not in events:
        found += engine.step()
    assert engine.book.active, "responses go on in fewer slots"
    for request in requests[SLOTS:]:
        engine.add(request, Sampling(), seed=1)
    while engine.unfinished:
        found += engine.step()
    engine.free()
    assert Counter(events)["keep"] >= 2, "slots are left and taken back"
    assert {before for event, before in unread(events) if event == "insert"} == {0}
    for one, other in zip(sorted(found, key=lambda one: one.request_id), expected, strict=True):
        assert replace(one, logps=()) == replace(other, logps=())
        np.testing.assert_allclose(one.logps, other.logps, rtol=0, atol=1e-6)
        np.testing.assert_array_equal(one.recorded["routing"][1], other.recorded["routing"][1])


def test_weights_that_diverge_are_reported_however_many_windows_are_on_their_way(engine, events):
    params, version = engine.weights.params, engine.weights.version
    spoilt = jax.tree.map(lambda leaf: jax.device_put(np.full(leaf.shape, np.nan, leaf.dtype), leaf.sharding), params)
    engine.load(spoilt, version=1)
    with pytest.raises(Diverged, match="not finite"):
        engine.generate(requests_of(4), Sampling(min_tokens=TOKENS), seed=0)
    assert Counter(events)["decode"] == 2 and Counter(events)["read"] == 1
    engine.load(params, version)
    assert len(engine.generate(requests_of(4), Sampling(), seed=0)) == 4

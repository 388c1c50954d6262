"""The scheduler alone, driven by a slot machine that is nothing but Python."""

import random

import pytest

from jaxrlhf.engine.buckets import busy_buckets, fit, halving_buckets, length_buckets
from jaxrlhf.engine.scheduler import Request, Scheduler

STOP = 99


def requests_of(groups: int, *, responses: int) -> list[Request]:
    return [Request(group * responses + i, (group + 1, 7), group) for group in range(groups) for i in range(responses)]


def drive(requests, *, slots: int, rows: int, seed: int = 0):
    """Run to the end; every request draws `3 + request_id % 5` tokens, then stops or, if even, is cut."""
    scheduler = Scheduler(requests, slots=slots, stop_tokens=(STOP,), version=3)
    rng, taken, prefills, done = random.Random(seed), {}, [], []
    while not scheduler.finished:
        if scheduler.refill_due:
            while scheduler.placeable:
                if scheduler.prefill_due:
                    prefills.append(scheduler.take_prompts(rows))
                for row, slot, request_id in scheduler.place(rows):
                    assert slot not in taken, "a slot was given twice"
                    assert 0 <= slot < slots
                    request = next(r for r in requests if r.request_id == request_id)
                    assert prefills[-1][row] == request.prompt_tokens, "a request was given another prompt's row"
                    taken[slot] = [request_id, 3 + request_id % 5]
        assert taken, "nothing is under way and nothing is finished"
        for slot in list(taken):
            request_id, left = taken[slot]
            drawn = min(left, rng.randint(1, 4))
            last = drawn == left
            tokens = [request_id] * drawn
            if last and request_id % 2:
                tokens[-1] = STOP
            taken[slot][1] -= drawn
            completion = scheduler.record(slot, tokens, [-0.5] * drawn, active=not last)
            assert (completion is not None) == last
            if last:
                del taken[slot]
                done.append(completion)
    return done, prefills


@pytest.mark.parametrize("slots", [1, 3, 16, 64])
@pytest.mark.parametrize("rows", [1, 2, 8])
def test_every_request_is_answered_once_with_its_own_tokens(slots, rows):
    requests = requests_of(9, responses=3)
    done, _ = drive(requests, slots=slots, rows=rows)
    assert sorted(c.request_id for c in done) == sorted(r.request_id for r in requests)
    for completion in done:
        length = 3 + completion.request_id % 5
        stopped = bool(completion.request_id % 2)
        assert len(completion.tokens) == len(completion.logps) == length
        assert completion.tokens[:-1] == (completion.request_id,) * (length - 1)
        assert completion.tokens[-1] == (STOP if stopped else completion.request_id)
        assert completion.truncated == (not stopped)
        assert completion.version == 3


def test_a_prompt_is_prefilled_once_however_few_slots_its_group_finds():
    requests = requests_of(5, responses=8)
    random.Random(1).shuffle(requests)  # members of a group need not be neighbours
    _, prefills = drive(requests, slots=3, rows=2)
    prompts = [prompt for batch in prefills for prompt in batch]
    assert sorted(prompts) == sorted({r.prompt_tokens for r in requests})
    assert all(len(batch) <= 2 for batch in prefills)


def test_refilling_waits_for_an_eighth_of_the_slots():
    scheduler = Scheduler(requests_of(40, responses=1), slots=16, stop_tokens=(), version=0)
    scheduler.take_prompts(40)
    scheduler.place(40)
    assert not scheduler.refill_due
    scheduler.record(5, [1], [0.0], active=False)
    assert not scheduler.refill_due
    scheduler.record(6, [1], [0.0], active=False)
    assert scheduler.refill_due
    assert [p.slot for p in scheduler.place(40)] == [5, 6]


def test_the_last_requests_do_not_wait_for_more_slots_than_they_need():
    scheduler = Scheduler(requests_of(17, responses=1), slots=16, stop_tokens=(), version=0)
    scheduler.take_prompts(17)
    scheduler.place(17)
    scheduler.record(0, [1], [0.0], active=False)
    assert scheduler.refill_due


def test_no_requests_are_finished_at_once():
    assert Scheduler([], slots=4, stop_tokens=(), version=0).finished


def test_the_same_id_twice_is_refused():
    with pytest.raises(ValueError, match="same request_id"):
        Scheduler([Request(1, (1,), 0), Request(1, (1,), 0)], slots=1, stop_tokens=(), version=0)


def test_a_group_with_two_prompts_is_refused():
    with pytest.raises(ValueError, match="group 4 have different prompts"):
        Scheduler([Request(1, (1,), 4), Request(2, (2,), 4)], slots=1, stop_tokens=(), version=0)


def test_a_free_slot_cannot_draw():
    with pytest.raises(AssertionError, match="slot 0 is free"):
        Scheduler([], slots=1, stop_tokens=(), version=0).record(0, [1], [0.0], active=True)


def test_length_buckets_have_two_significant_bits():
    assert length_buckets(512) == (16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
    assert length_buckets(100) == (16, 24, 32, 48, 64, 96, 100)
    assert length_buckets(16) == (16,)
    assert length_buckets(5) == (5,)
    for longest in range(1, 300):
        buckets = length_buckets(longest)
        assert list(buckets) == sorted(set(buckets)) and buckets[-1] == longest


def test_fit_takes_the_smallest_bucket_that_holds():
    buckets = length_buckets(100)
    for length in range(1, 101):
        bucket = fit(length, buckets)
        assert bucket >= length
        assert all(other < length for other in buckets if other < bucket)


def test_halving_buckets():
    assert halving_buckets(80, shortest=128) == (80,)
    assert halving_buckets(1024, shortest=128) == (128, 256, 512, 1024)
    assert halving_buckets(1001, shortest=128) == (251, 501, 1001)


def test_busy_buckets():
    lengths = [10] * 50 + [20] * 49 + [40]
    assert busy_buckets((16, 24, 48, 64), lengths, together=1) == (16, 24, 48, 64)
    # Four prompts are all of the short kind once in sixteen times, eight hardly ever.
    assert busy_buckets((16, 24, 48, 64), lengths, together=4) == (16, 24, 48, 64)
    assert busy_buckets((16, 24, 48, 64), lengths, together=8) == (24, 48, 64)
    # The longest one stays, however rare.
    assert busy_buckets((16, 24, 48, 64), lengths, together=1000) == (48, 64)

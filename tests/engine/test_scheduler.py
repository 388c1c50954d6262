"""The scheduler alone, driven by a slot machine that is nothing but Python."""

import random

import pytest

from jaxrlhf.config import Sampling
from jaxrlhf.engine.buckets import busy_buckets, fit, halving_buckets, length_buckets
from jaxrlhf.engine.scheduler import Scheduler
from jaxrlhf.engine.sequence import Request, SequenceState

STOP = 99


def sequence(request_id: int, prompt: tuple[int, ...] = (1,)) -> SequenceState:
    return SequenceState(Request(request_id, prompt), Sampling(), seed=0, limit=9, stop_tokens=(STOP,))


def sequences_of(prompts: int, *, responses: int) -> list[SequenceState]:
    return [sequence(prompt * responses + i, (prompt + 1, 7)) for prompt in range(prompts) for i in range(responses)]


def scheduler_of(sequences, *, slots: int) -> Scheduler:
    scheduler = Scheduler(slots=slots)
    for one in sequences:
        scheduler.add(one)
    return scheduler


def drive(sequences, *, slots: int, rows: int, seed: int = 0, later=()):
    """Run to the end; every response draws `3 + request_id % 5` tokens, then stops or, if even, is cut."""
    scheduler, later = scheduler_of(sequences, slots=slots), list(later)
    rng, taken, prefills, done = random.Random(seed), {}, [], []
    while scheduler.unfinished or later:
        if later and rng.random() < 0.5:
            scheduler.add(later.pop(0))
        if scheduler.refill_due:
            while scheduler.placeable:
                if scheduler.prefill_due:
                    prefills.append(scheduler.take_prompts(lambda _: rows))
                for row, slot, placed in scheduler.place(rows):
                    assert slot not in taken, "a slot was given twice"
                    assert 0 <= slot < slots
                    assert prefills[-1][row] == placed.request.prompt_tokens, "it was given another prompt's row"
                    taken[slot] = 3 + placed.request.request_id % 5
        assert taken or not scheduler.unfinished, "nothing is under way and nothing is finished"
        for slot in list(taken):
            one, sampled = scheduler.placed(slot), min(taken[slot], rng.randint(1, 4))
            assert one.slot == slot
            one.tokens += [one.request.request_id] * sampled
            one.logps += [-0.5] * sampled
            taken[slot] -= sampled
            if not taken[slot]:
                if one.request.request_id % 2:
                    one.tokens[-1] = STOP
                scheduler.end(one)
                del taken[slot]
                done.append(one.complete(version=3))
    return done, prefills


@pytest.mark.parametrize("slots", [1, 3, 16, 64])
@pytest.mark.parametrize("rows", [1, 2, 8])
def test_every_request_is_answered_once_with_its_own_tokens(slots, rows):
    sequences = sequences_of(9, responses=3)
    done, _ = drive(sequences[:20], slots=slots, rows=rows, later=sequences[20:])
    assert sorted(c.request_id for c in done) == list(range(27))
    for completion in done:
        length = 3 + completion.request_id % 5
        stopped = bool(completion.request_id % 2)
        assert len(completion.tokens) == len(completion.logps) == length
        assert completion.tokens[:-1] == (completion.request_id,) * (length - 1)
        assert completion.tokens[-1] == (STOP if stopped else completion.request_id)
        assert completion.truncated == (not stopped)
        assert completion.version == 3


def test_a_prompt_is_prefilled_once_however_few_slots_its_responses_find():
    sequences = sequences_of(5, responses=8)
    random.Random(1).shuffle(sequences)  # those with one prompt need not be neighbours
    _, prefills = drive(sequences, slots=3, rows=2)
    prompts = [prompt for batch in prefills for prompt in batch]
    assert sorted(prompts) == sorted({one.request.prompt_tokens for one in sequences})
    assert all(len(batch) <= 2 for batch in prefills)


def test_refilling_waits_for_an_eighth_of_the_slots():
    scheduler = scheduler_of(sequences_of(40, responses=1), slots=16)
    scheduler.take_prompts(lambda _: 40)
    scheduler.place(40)
    assert not scheduler.refill_due
    scheduler.end(scheduler.placed(5))
    assert not scheduler.refill_due
    scheduler.end(scheduler.placed(6))
    assert scheduler.refill_due
    assert [p.slot for p in scheduler.place(40)] == [5, 6]


def test_the_last_requests_do_not_wait_for_more_slots_than_they_need():
    scheduler = scheduler_of(sequences_of(17, responses=1), slots=16)
    scheduler.take_prompts(lambda _: 17)
    scheduler.place(17)
    scheduler.end(scheduler.placed(0))
    assert scheduler.refill_due


def test_no_requests_are_finished_at_once():
    assert not Scheduler(slots=4).unfinished


def test_a_free_slot_cannot_draw():
    with pytest.raises(AssertionError, match="slot 0 is free"):
        Scheduler(slots=1).placed(0)


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

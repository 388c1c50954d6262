"""Rows of the device's arrays follow the requests, whatever the number of slots."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_models import SMALL, same_responses, sharp

from jaxrlhf.config import Sampling
from jaxrlhf.engine import Engine, Request
from jaxrlhf.engine.scheduler import Scheduler
from jaxrlhf.engine.sequence import SequenceState
from jaxrlhf.engine.slot_book import SlotBook, rows_of
from jaxrlhf.sharding.mesh import mesh_of

pytestmark = pytest.mark.usefixtures("programs")

SLOTS = 64


def build(slots: int, **sizes) -> Engine:
    engine = Engine(
        SMALL,
        mesh_of({}, jax.devices()[:1]),
        slots=slots,
        max_prompt_tokens=12,
        max_response_tokens=20,
        stop_tokens=(3,),
        decode_tokens_per_dispatch=4,
        **sizes,
    )
    engine.load(jax.tree.map(jnp.asarray, sharp(SMALL)), version=0)
    return engine


@pytest.fixture(scope="module")
def wide():
    return build(SLOTS)


def requests_of(count: int, *, first: int = 0, keep: bool = False) -> list[Request]:
    return [Request(first + index, (5, *range(8, 9 + index % 6)), keep=keep) for index in range(count)]


@pytest.fixture
def ran(wide, monkeypatch):
    """Programs that the engine ran, by name and sizes."""
    ran, run = [], wide.compiled.run

    def recorded(sizes, *arguments, **options):
        ran.append(sizes)
        return run(sizes, *arguments, **options)

    monkeypatch.setattr(wide.compiled, "run", recorded)
    yield ran
    wide.free()


def decoded(ran) -> list[int]:
    return [rows for name, rows, *_ in ran if name == "decode"]


@pytest.mark.parametrize(("count", "rows"), [(1, 8), (8, 8), (9, 16), (40, 64)])
def test_as_many_rows_are_decoded_as_there_are_requests(wide, ran, count, rows):
    found = wide.generate(requests_of(count), Sampling(), seed=1)
    assert max(decoded(ran)) == rows
    assert decoded(ran) == sorted(decoded(ran), reverse=True)
    if count == 9:
        same_responses(found, build(count).generate(requests_of(count), Sampling(), seed=1))


def test_one_prompt_is_prefilled_alone(wide, ran):
    wide.generate(requests_of(1), Sampling(), seed=1)
    assert [rows for name, _, rows in (sizes for sizes in ran if sizes[0] == "prefill")] == [1]
    ran.clear()
    wide.generate(requests_of(SLOTS), Sampling(), seed=1)  # six lengths, all in one bucket
    assert {rows for name, _, rows in (sizes for sizes in ran if sizes[0] == "prefill")} == {8}


def test_requests_that_come_later_get_further_rows(wide, ran):
    """Nothing that is under way or kept is disturbed: every response is the one of a batch."""
    requests = [*requests_of(5, keep=True), *requests_of(20, first=5)]
    expected = {one.request_id: one for one in build(25).generate(requests, Sampling(), seed=2)}
    found = []
    for request in requests[:5]:
        wide.add(request, Sampling(), seed=2)
    found += wide.step()
    assert decoded(ran) == [8]
    for request in requests[5:]:
        wide.add(request, Sampling(), seed=2)
    while wide.unfinished:
        found += wide.step()
    assert max(decoded(ran)) == 32
    same_responses(sorted(found, key=lambda one: one.request_id), list(expected.values()))
    ran.clear()
    again = Request(50, (*requests[4].prompt_tokens, *expected[4].tokens, 9), max_tokens=4)
    wide.add(again, Sampling(), seed=2)
    [answer] = until_done(wide)
    assert [sizes[0] for sizes in ran if sizes[0].startswith("prefill")] == ["prefill from"]
    assert set(decoded(ran)) == {8}, "rows of the five kept conversations and of one that goes on"
    same_responses([answer], build(1).generate([again], Sampling(), seed=2))


def until_done(engine: Engine) -> list:
    found = []
    while engine.unfinished:
        found += engine.step()
    return found


def test_an_idle_engine_starts_with_few_rows_again(wide, ran):
    for request in requests_of(40):
        wide.add(request, Sampling(min_tokens=20), seed=1)  # all end in the same window
    until_done(wide)
    assert set(decoded(ran)) == {64}
    ran.clear()
    wide.add(Request(99, (5, 8)), Sampling(), seed=1)
    until_done(wide)
    assert set(decoded(ran)) == {8}


def test_slots_in_use_keep_their_rows(seed=0):
    rng, counts = np.random.default_rng(seed), (2, 4, 8)
    for replicas in (1, 2, 4):
        book, own = SlotBook(8 * replicas, 2, replicas=replicas), 8
        contents = {}  # of each row of the device's arrays: the slot whose values are there
        for _ in range(300):
            kept_B = np.isin(np.arange(8 * replicas), [slot for slot in contents.values() if rng.random() < 0.4])
            free = np.flatnonzero(~kept_B)
            new = rng.choice(free, int(rng.integers(0, min(len(free), 5) + 1)), replace=False).tolist()
            before = book.slot_B
            arrangement = book.seat(new, kept_B, counts)
            if arrangement is None:
                there = {row: contents.get(row) for row in range(len(before))}
            else:
                rows, old = arrangement.row_GB.shape[1], len(before) // replicas
                assert rows in counts and rows > old
                there = {
                    replica * rows + row: contents.get(int(replica * old + arrangement.row_GB[replica, row]))
                    for replica in range(replicas)
                    for row in range(rows)
                    if arrangement.continues_GB[replica, row]
                }
                book.slot_B = arrangement.slot_B
            in_use = np.flatnonzero(kept_B).tolist() + new
            seated = rows_of(in_use, book.slot_B)
            assert (seated < len(book.slot_B)).all() and len(set(book.slot_B.tolist())) == len(book.slot_B)
            by_replica = book.slot_B.reshape(replicas, -1)
            assert (by_replica // own == np.arange(replicas)[:, None]).all(), "a slot never leaves its replica"
            for slot in np.flatnonzero(kept_B).tolist():
                [row] = rows_of([slot], book.slot_B)
                assert there[int(row)] == slot, "the row of a slot in use has its values"
            contents = dict(zip(seated.tolist(), in_use, strict=True))
        assert len(book.slot_B) <= 8 * replicas


def test_replicas_get_equal_numbers_and_groups_stay_together():
    scheduler = Scheduler(slots=16, replicas=2)
    for index in range(8):
        prompt = (1 + index // 4, 7)
        scheduler.add(SequenceState(Request(index, prompt), Sampling(), seed=0, limit=9, stop_tokens=(3,)))
    scheduler.take_prompts(lambda _: 8)
    seats = [one for _ in range(4) for one in scheduler.place(2)]
    assert [one.slot // 8 for one in seats] == [0] * 4 + [1] * 4
    assert [one.row for one in seats] == [0] * 4 + [1] * 4


def test_a_slot_without_content_is_taken_first():
    scheduler = Scheduler(slots=8, replicas=2)
    for index in range(3):
        scheduler.add(SequenceState(Request(index, (1,)), Sampling(), seed=0, limit=9, stop_tokens=(3,)))
    used = {0: 4, 1: 3, 2: 2, 3: 1, 4: 5}  # replica 0 is full of kept conversations, replica 1 has one
    assert scheduler.next_slots(lambda slot: used.get(slot, 0)) == [5, 6, 7]
    used |= {5: 6, 6: 7}
    assert scheduler.next_slots(lambda slot: used.get(slot, 0)) == [7, 3, 2]

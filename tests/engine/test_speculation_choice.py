"""Drafts are verified where they pay, by made-up clocks, and nowhere else."""

import itertools

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxrlhf.config import Sampling
from jaxrlhf.engine.buckets import Shape
from jaxrlhf.engine.compiled import Compiled
from jaxrlhf.engine.programs import NO_TOKEN
from jaxrlhf.engine.sequence import Request, SequenceState, WindowTokens
from jaxrlhf.engine.slot_book import SlotBook
from jaxrlhf.engine.speculation.choice import SHORT_WINDOW, WIDTHS, Speculation
from tests.engine.test_generate import MODEL

WINDOW = 16


def book_of(active: int, rows: int) -> SlotBook:
    """Slot book with one slot for each row; the first `active` slots have a response in progress."""
    book = SlotBook(rows, WINDOW, replicas=1)
    book.slot_B, book._active_B[:active] = np.arange(rows), True
    return book


CAPACITY = 64


class Device:
    """Device that samples given tokens in every row, and a clock that each call advances by its cost.

    A program is compiled at its first call, in `compilation` seconds.
    """

    def __init__(self, texts, prices, *, rows=None, compilation=0.0, **how):
        self.now, self.calls, self._prices, self._texts = 0.0, [], prices, texts
        self.compilation = compilation
        shape = Shape(config=MODEL, replicas=1, most_stop_tokens=1, tokens_per_dispatch=WINDOW)
        whole = NamedSharding(Mesh(jax.devices()[:1], ("data",)), PartitionSpec())
        self.compiled = Compiled(shape, whole)
        self.speculation = Speculation("auto", self.compiled, platform="cpu", clock=lambda: self.now, **how)
        self.sequences = [
            SequenceState(Request(number, (1, 2, 3)), Sampling(), 0, 10**6, ()) for number in range(len(texts))
        ]
        self.book = book_of(len(texts), rows or len(texts))

    def run(self, calls: int) -> float:
        """Tokens of a row per second over some calls."""
        before, since = sum(len(sequence.tokens) for sequence in self.sequences), self.now
        for _ in range(calls):
            self.step()
        return (sum(len(sequence.tokens) for sequence in self.sequences) - before) / (self.now - since)

    def step(self):
        call = self.speculation.next_call(self.book, None, capacity=CAPACITY)
        self.calls.append((call.name, call.sizes or int(call.arguments[1])))
        name = call.name, len(self.book.slot_B), CAPACITY, *call.sizes
        if name not in self.compiled.programs:
            self.compiled.programs[name], self.compiled.seconds[name] = None, self.compilation
            self.now += self.compilation
        read = []
        for slot, (text, sequence) in enumerate(zip(self._texts, self.sequences, strict=True)):
            if call.name == "verify":
                tokens, [draft_BD] = [next(text)], call.arguments
                for drafted in draft_BD[slot].tolist():
                    if drafted != tokens[-1]:
                        break
                    tokens.append(next(text))
            else:
                tokens = [next(text) for _ in range(int(call.arguments[1]))]
            window = WindowTokens(slot, tokens, [0.0] * len(tokens), True, None, None)
            sequence.extend(window, None)
            read.append((sequence, window))
        width = call.sizes[0] + 1 if call.name == "verify" else 1
        self.now += self._prices[width] * (1 if width > 1 else int(call.arguments[1]))
        self.speculation.read(read, rows=len(self.book.slot_B))


def repeated():
    return itertools.cycle(range(10, 33))


def never_the_same():
    return itertools.count(100)


CHEAP, DEAR = {1: 1.0, 4: 1.1, 8: 1.2}, {1: 1.0, 4: 10.0, 8: 20.0}


def test_texts_that_repeat_are_verified_where_passes_cost_little():
    device = Device([repeated(), repeated()], CHEAP)
    device.run(10)
    assert device.run(100) > 2 * 6
    assert {name for name, _ in device.calls[-100:]} == {"verify"}
    counts = device.speculation.take_counts()
    assert counts.accepted == counts.drafted > 0 and counts.tokens > 7 * counts.rows
    assert device.speculation.take_counts().calls == 0


def test_where_a_pass_costs_more_than_it_gives_there_are_few_tries():
    device = Device([repeated()], DEAR)
    assert device.run(1000) > 0.98
    tried = [name for name, _ in device.calls].count("verify")
    assert 1 <= tried < 30
    assert device.calls[-1] == ("decode", WINDOW) or device.calls[-2] == ("decode", WINDOW)


def test_texts_that_do_not_repeat_keep_whole_windows():
    device = Device([never_the_same()], CHEAP)
    assert device.run(200) == pytest.approx(1.0)
    assert device.calls == [("decode", WINDOW)] * 200


def test_drafts_that_the_policy_does_not_follow_are_given_up_and_noticed_when_it_does():
    def fickle(dice):
        """Pairs that were there before, each with another token after them."""
        while True:
            yield from (7, 8, int(dice.integers(1000, 10**6)))

    text = [fickle(np.random.default_rng(0))]
    device = Device([itertools.chain.from_iterable(iter(lambda: itertools.islice(text[0], 1), None))], {**CHEAP, 4: 2})
    device.run(400)
    assert [name for name, _ in device.calls[-100:]].count("verify") < 5
    text[0] = repeated()
    device.run(100)
    assert [name for name, _ in device.calls[-30:]].count("verify") > 25


def test_while_drafts_pay_windows_are_short_and_nothing_is_dispatched_ahead():
    device = Device([repeated()], CHEAP)
    assert not device.speculation.pays
    device.run(30)
    assert device.speculation.pays
    device._texts[0] = never_the_same()
    device.run(3)
    assert device.calls[-1] == ("decode", SHORT_WINDOW)
    device.run(100)
    assert not device.speculation.pays and device.calls[-1] == ("decode", WINDOW)


def test_many_rows_draft_nothing():
    device = Device([repeated()] * 2, CHEAP, rows=16)
    device.run(50)
    assert {name for name, _ in device.calls} == {"decode"}


def test_few_tokens_that_are_left_bound_a_draft():
    device = Device([repeated()], CHEAP)
    device.run(20)
    [sequence] = device.sequences
    sequence.limit = len(sequence.tokens) + 30
    seen = []
    while sequence.limit - len(sequence.tokens) > WIDTHS[-1]:
        device.step()
        [draft_BD] = device.speculation.next_call(device.book, None, capacity=CAPACITY).arguments[:1]
        if draft_BD is not None:
            seen.append((sequence.limit - len(sequence.tokens), int((draft_BD != NO_TOKEN).sum())))
    assert seen and all(drafted < left for left, drafted in seen)


def test_masks_of_constraints_and_a_program_that_compiles_are_not_measured():
    device = Device([repeated()], CHEAP)
    bits_BU = np.ones((1, 2), np.uint32)
    call = device.speculation.next_call(device.book, bits_BU, capacity=CAPACITY)
    assert (call.name, call.sizes) == ("decode", ("constrained",))
    device.run(3)
    before = dict(device.speculation._seconds)
    device.speculation.next_call(device.book, None, capacity=CAPACITY)
    device.compiled.programs["another",] = None
    device.now += 100
    window = WindowTokens(0, [10], [0.0], True, None, None)
    device.speculation.read([(device.sequences[0], window)], rows=1)
    assert device.speculation._seconds == before


def test_a_program_is_compiled_when_it_would_have_saved_its_compilation():
    """A row samples 22 tokens in 22 passes of 1 s, or in 3 of 1.1 s and a half: 16 tokens save at most 13 s."""
    dear = Device([repeated()], CHEAP, compilation=1000.0)
    dear.run(60)
    assert {name for name, _ in dear.calls} == {"decode"}
    assert dear.calls[-1] == ("decode", WINDOW) and not dear.speculation.pays
    dear.run(60)
    assert [name for name, _ in dear.calls].count("verify") > 30
    assert [name for name, *_ in dear.compiled.programs].count("verify") == 1


def test_compiled_programs_and_texts_that_end_soon_cost_nothing():
    """Without a program, seconds are those of single tokens; with drafts, at most one program more."""
    for calls in (10, 100, 1000):
        device = Device([repeated()], CHEAP, compilation=300.0)
        device.run(calls)
        tokens = sum(len(sequence.tokens) for sequence in device.sequences)
        assert device.now <= tokens * CHEAP[1] + 2 * 300.0


def test_a_measured_program_tells_the_seconds_of_the_others():
    """A pass of 8 tokens takes as long as 8 passes, so one of 4 tokens is not compiled to be tried."""
    device = Device([repeated()], {1: 1.0, 4: 4.0, 8: 8.0}, compilation=20.0)
    device.run(300)
    assert [sizes for name, *sizes in device.compiled.programs if name == "verify"] == [[1, CAPACITY, 7]]

"""The engine as a service: requests of any thread, in any company, sampled as if they were alone."""

import threading
import time
from concurrent.futures import CancelledError
from dataclasses import replace

import numpy as np
import pytest

from jaxrlhf.batch import Diverged
from jaxrlhf.config import Refusal, Sampling
from jaxrlhf.engine import Request
from jaxrlhf.engine.service import EngineService
from tests.engine.test_turns import SEED, build, equal, prompts

pytestmark = pytest.mark.usefixtures("programs")

SAMPLING = Sampling(temperature=1.1)
ASKED = [Request(number, prompt, max_tokens=12) for number, prompt in enumerate(prompts() * 3)]


def letters(tokens) -> str:
    """Token 4 is `a`, 5 is `b` and so on, and those below are nothing."""
    return "".join(chr(ord("a") + token - 4) for token in tokens if token >= 4)


@pytest.fixture(scope="module")
def engine():
    return build(decode=letters)


@pytest.fixture(scope="module")
def alone(engine):
    """Completions of the requests, each run alone."""
    return [engine.generate([request], SAMPLING, seed=SEED)[0] for request in ASKED]


@pytest.fixture
def service(engine):
    engine.free()
    with EngineService(engine) as service:
        yield service


def test_requests_of_several_threads_are_sampled_as_if_alone(service, alone):
    done, heard = {}, {request.request_id: [] for request in ASKED}

    def ask(requests):
        futures = [
            service.submit(
                request, SAMPLING, seed=SEED, on_tokens=lambda tokens, _, n=request.request_id: heard[n].extend(tokens)
            )
            for request in requests
        ]
        done.update({future.result(300).request_id: future.result() for future in futures})

    threads = [threading.Thread(target=ask, args=(ASKED[first::3],)) for first in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    equal([done[request.request_id] for request in ASKED], alone)
    assert [tuple(heard[completion.request_id]) for completion in alone] == [each.tokens for each in alone]
    counts = service.counts
    assert (counts.requests, counts.completed, counts.failed) == (12, 12, 0)
    assert counts.sampled_tokens == sum(len(completion.tokens) for completion in alone)
    assert 0 < counts.busy_slots <= counts.slots
    assert counts.queue_s > 0


def test_one_request_twice_at_once_is_sampled_alike(service, alone):
    futures = [service.submit(ASKED[0], SAMPLING, seed=SEED) for _ in range(3)]
    equal([future.result(300) for future in futures], alone[:1] * 3)


def test_cancelled_requests_free_their_slots_and_change_no_other(service, alone):
    started = threading.Event()
    cut = [service.submit(request, SAMPLING, seed=7, on_tokens=lambda *_: started.set()) for request in ASKED[:8]]
    left = service.submit(ASKED[8], SAMPLING, seed=SEED)
    started.wait(60)
    for future in cut:
        future.cancel()
    equal([left.result(300)], alone[8:9])
    assert all(future.cancelled() or future.result() for future in cut)
    service.hold()  # until what was asked for before is done
    assert not service.engine.unfinished
    assert not service.waiting
    service.resume()
    with pytest.raises(CancelledError):
        next(future for future in cut if future.cancelled()).result()


def test_a_stop_text_of_several_tokens_ends_a_response_with_the_token_that_completes_it(service, alone):
    whole = next(completion for completion in alone if len(completion.tokens) == 12)
    request = ASKED[whole.request_id]
    stop = letters(whole.tokens)[5:8]
    end = next(n for n in range(1, 13) if stop in letters(whole.tokens[:n]))
    asked = Request(request.request_id, request.prompt_tokens, max_tokens=12, stop_texts=("zzzz", stop), keep=True)
    heard = []
    future = service.submit(asked, SAMPLING, seed=SEED, on_tokens=lambda tokens, _: heard.extend(tokens))
    completion = future.result(300)
    assert (completion.tokens, completion.stop_text) == (whole.tokens[:end], stop)
    assert tuple(heard) == completion.tokens
    assert not completion.truncated
    np.testing.assert_allclose(completion.logps, whole.logps[:end], atol=2e-5)
    # Its keys and values are those of what is left of it.
    then = Request(99, (*asked.prompt_tokens, *completion.tokens, 9), max_tokens=6)
    reused = service.counts.cached_tokens
    next_turn = service.submit(then, SAMPLING, seed=SEED).result(300)
    assert service.counts.cached_tokens - reused == len(asked.prompt_tokens) + end - 1
    service.hold()
    service.engine.free()
    service.resume()
    equal([next_turn], [service.submit(then, SAMPLING, seed=SEED).result(300)])


def test_errors_reach_those_who_wait_and_the_next_are_served(service, alone, monkeypatch):
    def diverges():
        raise Diverged("logits are not finite")

    monkeypatch.setattr(service.engine, "step", diverges)
    failing = [service.submit(request, SAMPLING, seed=SEED) for request in ASKED[:2]]
    for future in failing:
        with pytest.raises(Diverged, match="not finite"):
            future.result(300)
    monkeypatch.undo()

    def fails(tokens, logps):
        raise KeyError("a listener")

    with pytest.raises(KeyError, match="a listener"):
        service.submit(ASKED[1], SAMPLING, seed=SEED, on_tokens=fails).result(300)
    equal([service.submit(ASKED[0], SAMPLING, seed=SEED).result(300)], alone[:1])
    for request, sampling, words in (
        (Request(0, ()), SAMPLING, "a prompt of 0 tokens"),
        (ASKED[0], Sampling(top_k=2**31), "top_k=2147483648 does not fit"),
        (ASKED[0], Sampling(min_tokens=2**31), "min_tokens=2147483648 does not fit"),
        (replace(ASKED[0], stop_texts=("\ud83d",)), SAMPLING, "half of a surrogate pair"),
    ):
        with pytest.raises(Refusal, match=words):
            service.submit(request, sampling, seed=SEED)


def test_a_closed_service_cancels_and_refuses(engine):
    with EngineService(engine) as service:
        future = service.submit(ASKED[0], SAMPLING, seed=SEED)
    assert future.done()
    assert not engine.unfinished
    with pytest.raises(RuntimeError, match="closed"):
        service.submit(ASKED[0], SAMPLING, seed=SEED)


def test_parked_slots_go_last_and_the_least_recently_used_of_them_first(engine):
    engine.free()
    kept = [Request(number, (5, 6 + number, 7, 8), max_tokens=2, keep=True) for number in range(3)]
    for request in kept:
        engine.generate([request], SAMPLING, seed=SEED)

    def knows(number) -> bool:
        return engine._contents.longest((*kept[number].prompt_tokens, 9)).tokens == 4

    assert all(map(knows, range(3)))

    def answer(*prompts):
        for number, prompt in enumerate(prompts):
            engine.add(Request(10 + number, prompt, max_tokens=2), SAMPLING, seed=SEED)
        while engine.unfinished:
            engine.step()

    answer((*kept[0].prompt_tokens, 9))  # in the empty slot, and the first is used again
    assert all(map(knows, range(3)))
    answer((20, 21), (20, 22))  # one more than there are empty ones
    assert [knows(number) for number in range(3)] == [True, False, True]
    answer((20, 21), (20, 22), (20, 23))
    assert [knows(number) for number in range(3)] == [True, False, False]


def test_a_service_that_is_held_ends_what_is_under_way_and_answers_the_rest_later(service, alone):
    started, now, later = threading.Event(), ASKED[:4], ASKED[4:8]
    first = [service.submit(request, SAMPLING, seed=SEED, on_tokens=lambda *_: started.set()) for request in now]
    started.wait(60)
    service.hold()
    assert all(future.done() for future in first) and not service.engine.unfinished
    second = [service.submit(request, SAMPLING, seed=SEED) for request in later]
    second[0].cancel()
    equal(service.engine.generate(ASKED[8:9], SAMPLING, seed=SEED), alone[8:9])  # the engine is ours meanwhile
    assert not any(future.done() for future in second[1:])
    service.resume()
    equal([future.result(300) for future in [*first, *second[1:]]], [*alone[:4], *alone[5:8]])
    assert second[0].cancelled() and service.held_s > 0


def test_a_service_that_is_held_can_be_closed(engine):
    engine.free()
    service = EngineService(engine)
    service.hold()
    waits = service.submit(ASKED[0], SAMPLING, seed=SEED)
    service.close()
    assert waits.cancelled() and not engine.unfinished


def test_who_holds_a_service_that_closes_meanwhile_waits_no_longer(engine, monkeypatch):
    engine.free()
    service, stepping, steps = EngineService(engine), threading.Event(), threading.Event()

    def step():
        stepping.set()
        steps.wait(60)
        return []

    monkeypatch.setattr(engine, "step", step)
    asked = service.submit(ASKED[0], SAMPLING, seed=SEED)
    assert stepping.wait(60)
    holder, closer = (threading.Thread(target=act, daemon=True) for act in (service.hold, service.close))
    holder.start()
    while service._inbox.empty():
        time.sleep(0.001)
    closer.start()
    while not service._closing:
        time.sleep(0.001)
    steps.set()
    for thread in (holder, closer):
        thread.join(20)
        assert not thread.is_alive()
    assert asked.cancelled() and not engine.unfinished

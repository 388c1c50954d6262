"""Calls of reward functions that are started before their outcomes are asked for."""

import gc
import time
from pathlib import Path

import pytest
from reward_calls import run, start

from jaxrlhf.rewards.pool import RewardPool
from jaxrlhf.rewards.protocol import Example, Function

FUNCTIONS = """
import time
from jaxrlhf.rewards import batched


def single(prompt, response, answer, record):
    kind, _, detail = response.partition(" ")
    if kind == "value":
        return float(detail)
    if kind == "sleep":
        time.sleep(float(detail))
        return 2.0
    if kind == "note":
        open(detail, "w").close()
        return 3.0


@batched
def size(prompts, responses, answers, records):
    time.sleep(float(responses[0]))
    return [float(len(responses))] * len(responses)
"""


@pytest.fixture(scope="module")
def functions(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("rewards") / "functions.py"
    path.write_text(FUNCTIONS)
    return path


def examples(*responses: str) -> list[Example]:
    return [Example("p", response, None, {}) for response in responses]


def until_started(calls) -> None:
    while not calls[0][0].started:
        time.sleep(0.01)


def test_other_calls_run_while_a_slow_call_is_running(functions):
    with RewardPool([Function("single", f"{functions}:single")], workers=2, timeout_s=5.0) as pool:
        slow = start(pool, examples("sleep 1"))
        until_started(slow)
        quick = list(run(pool, examples(*(f"value {n}" for n in range(20)))))
        assert not slow[0][0].answer.done()
        assert sorted(outcome.value for outcome in quick) == list(range(20))
        assert [outcome.value for outcome in pool.outcomes(slow)] == [2.0]


def test_started_calls_run_before_their_outcomes_are_asked_for(functions, tmp_path):
    note = tmp_path / "note"
    with RewardPool([Function("single", f"{functions}:single")], workers=1, timeout_s=5.0) as pool:
        calls = start(pool, [*examples(f"note {note}"), Example("p", "", None, {"n": lambda: 0})])
        while not note.exists():
            time.sleep(0.01)
        outcomes = {outcome.index: outcome for outcome in pool.outcomes(calls)}
    assert outcomes[0].value == 3.0
    assert outcomes[1].failure.cause == "unpicklable"


def test_a_call_that_is_dropped_in_the_queue_never_runs(functions, tmp_path):
    note = tmp_path / "note"
    with RewardPool([Function("single", f"{functions}:single")], workers=1, timeout_s=5.0) as pool:
        first = start(pool, examples("sleep 0.3"))
        pool.drop(start(pool, examples(f"note {note}")))
        last = start(pool, examples("value 4"))
        assert [outcome.value for outcome in pool.outcomes(first + last)] == [2.0, 4.0]
    assert not note.exists()


def test_a_batched_function_gets_all_examples_that_were_queued_while_it_was_busy(functions):
    with RewardPool([Function("size", f"{functions}:size")], workers=1, timeout_s=5.0) as pool:
        first = start(pool, examples("0.5"))
        until_started(first)
        rest = [calls for _ in range(70) for calls in start(pool, examples("0"))]
        sizes = [outcome.value for outcome in pool.outcomes(first + rest)]
    assert sorted(sizes) == [1.0] + [6.0] * 6 + [64.0] * 64


def test_open_calls_fail_when_the_pool_closes(functions):
    pool = RewardPool([Function("single", f"{functions}:single")], workers=1, timeout_s=5.0)
    calls = start(pool, examples("sleep 1000", "value 1"))
    pool.close()
    with pytest.raises(RuntimeError, match="this pool of reward functions is closed"):
        list(pool.outcomes(calls))


def test_garbage_collection_of_a_pool_ends_its_processes_and_its_thread(functions):
    pool = RewardPool([Function("single", f"{functions}:single")], workers=1, timeout_s=5.0)
    thread, server = pool._executor._thread, pool._executor.groups[0]._server._process
    del pool
    gc.collect()
    assert not thread.is_alive() and server.returncode is not None

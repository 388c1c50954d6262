"""Reward functions that are begun before anybody waits for what they say."""

import gc
import time
from pathlib import Path

import pytest

from jaxrlhf.rewards.pool import RewardPool, pack
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


def test_runs_share_the_processes(functions):
    with RewardPool([Function("single", f"{functions}:single")], workers=2, timeout_s=5.0) as pool:
        slow = pool.begin([pack(Example("p", "sleep 1", None, {}))])
        until_started(slow)
        quick = list(pool.run([Example("p", f"value {n}", None, {}) for n in range(20)]))
        assert not slow[0][0].answer.done()
        assert sorted(outcome.value for outcome in quick) == list(range(20))
        assert [outcome.value for outcome in pool.finish(slow)] == [2.0]


def until_started(begun) -> None:
    while not begun[0][0].started:
        time.sleep(0.01)


def test_what_was_begun_is_run_and_waits_to_be_asked_for(functions, tmp_path):
    note = tmp_path / "note"
    with RewardPool([Function("single", f"{functions}:single")], workers=1, timeout_s=5.0) as pool:
        begun = pool.begin(
            [pack(Example("p", f"note {note}", None, {})), pack(Example("p", "", None, {"n": lambda: 0}))]
        )
        while not note.exists():
            time.sleep(0.01)
        outcomes = {outcome.index: outcome for outcome in pool.finish(begun)}
    assert outcomes[0].value == 3.0
    assert outcomes[1].failure.cause == "unpicklable"


def test_what_is_dropped_before_its_turn_is_never_run(functions, tmp_path):
    note = tmp_path / "note"
    with RewardPool([Function("single", f"{functions}:single")], workers=1, timeout_s=5.0) as pool:
        kept = pool.begin([pack(Example("p", "sleep 0.3", None, {}))])
        dropped = pool.begin([pack(Example("p", f"note {note}", None, {}))])
        pool.drop(dropped)
        after = pool.begin([pack(Example("p", "value 4", None, {}))])
        assert [outcome.value for outcome in pool.finish(kept + after)] == [2.0, 4.0]
    assert not note.exists()


def test_a_batched_function_takes_what_came_together_while_it_was_busy(functions):
    with RewardPool([Function("size", f"{functions}:size")], workers=1, timeout_s=5.0) as pool:
        first = pool.begin([pack(Example("p", "0.5", None, {}))])
        until_started(first)
        rest = [begun for _ in range(70) for begun in pool.begin([pack(Example("p", "0", None, {}))])]
        sizes = [outcome.value for outcome in pool.finish(first + rest)]
    assert sorted(sizes) == [1.0] + [6.0] * 6 + [64.0] * 64


def test_whoever_waits_is_told_when_the_pool_closes(functions):
    pool = RewardPool([Function("single", f"{functions}:single")], workers=1, timeout_s=5.0)
    begun = pool.begin([pack(Example("p", "sleep 1000", None, {})), pack(Example("p", "value 1", None, {}))])
    pool.close()
    with pytest.raises(RuntimeError, match="this pool of reward functions is closed"):
        list(pool.finish(begun))


def test_a_pool_that_is_forgotten_ends_its_processes_and_its_thread(functions):
    pool = RewardPool([Function("single", f"{functions}:single")], workers=1, timeout_s=5.0)
    thread, server = pool._executor._thread, pool._executor.groups[0]._server._process
    del pool
    gc.collect()
    assert not thread.is_alive() and server.returncode is not None

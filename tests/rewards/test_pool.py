"""Reward functions that misbehave: their examples fail with a cause, and other examples do not."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hostile_functions import HOSTILE
from reward_calls import run as calls_of

from jaxrlhf.config import Refusal
from jaxrlhf.processes import executor
from jaxrlhf.processes.output import MOST_BYTES
from jaxrlhf.rewards.pool import Outcome, RewardPool, pack
from jaxrlhf.rewards.protocol import Example, Function
from jaxrlhf.rewards.worker import resolve

FUNCTIONS = ("single", "many", "waits", "waits_for_many", "short", "one_for_all", "a_number", "a_set", "out_of_memory")


@pytest.fixture(scope="module")
def pools() -> Iterator[dict[tuple[int, float], RewardPool]]:
    """Pools of all functions by workers and limit; later tests use the processes that earlier tests left."""
    made: dict[tuple[int, float], RewardPool] = {}
    yield made
    for pool in made.values():
        pool.close()


@pytest.fixture(scope="module")
def hostile(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("rewards") / "hostile.py"
    path.write_text(HOSTILE)
    return path


@pytest.fixture
def run(hostile, pools):
    """Function that returns values by index, failures by index, and seconds; the log is `output.txt`."""
    output = hostile.parent / "output.txt"
    output.write_text("")

    def run(name: str, responses: list[str], *, workers: int = 2, timeout_s: float = 1.0):
        if (workers, timeout_s) not in pools:
            functions = [Function(each, f"{hostile}:{each}") for each in FUNCTIONS]
            pools[workers, timeout_s] = RewardPool(functions, workers=workers, timeout_s=timeout_s, output=output)
        pool = pools[workers, timeout_s]
        examples = [Example("p", response, None, {}) for response in responses]
        start = time.monotonic()
        outcomes = list(pool.outcomes(pool.start((pack(example), [FUNCTIONS.index(name)]) for example in examples)))
        return *read(outcomes, responses), time.monotonic() - start

    return run


def pids(pool: RewardPool) -> list[int]:
    [group] = pool._executor.groups
    return list(group.processes)


def read(outcomes: list[Outcome], responses: list[str]) -> tuple[dict, dict]:
    """Return values by index and failures by index; each response has one of them."""
    assert sorted(outcome.index for outcome in outcomes) == list(range(len(responses)))
    failures = {outcome.index: outcome.failure for outcome in outcomes if outcome.failure}
    return {outcome.index: outcome.value for outcome in outcomes if not outcome.failure}, failures


CAUSES = {
    "hang": "timeout",
    "exit": "crash",
    "segfault": "crash",
    "sysexit": "exception",
    "raise": "exception",
    "nan": "not-finite",
    "inf": "not-finite",
    "huge": "not-finite",
    "none": "none",
    "text": "not-a-number",
}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["single", "many", "waits"])
def test_only_the_misbehaving_examples_are_lost(run, name):
    responses = [f"value {index}" for index in range(50)]
    for position, kind in enumerate(CAUSES):
        responses[5 * position] = kind
    values, failures, seconds = run(name, responses)
    assert {responses[index]: failure.cause for index, failure in failures.items()} == CAUSES
    assert all(failure.part == name and failure.index == index for index, failure in failures.items())
    assert values == {index: float(index) for index in range(50) if index % 5}
    # One call hangs, for 1.5 s; in a batch the whole batch hangs first, then the example.
    assert seconds < 10


@pytest.mark.skipif(sys.platform != "linux", reason="asks Linux")
def test_a_reward_process_is_the_first_to_be_killed_if_memory_runs_out(run):
    values, _, _ = run("out_of_memory", ["any"])
    assert values == {0: 1000.0}  # the highest score that Linux's killer knows


def test_failures_describe_their_cause(run, hostile):
    _, failures, _ = run("single", ["hang", "exit", "segfault", "raise", "nan", "text"])
    details = [failures[index].detail for index in range(6)]
    assert "1 s" in details[0]
    assert "status 3" in details[1]
    assert "signal 11" in details[2]
    assert "KeyError" in details[3] and "hostile.py:" in details[3] and "\n" not in details[3]
    assert "nan" in details[4]
    assert "str" in details[5]
    printed = (hostile.parent / "output.txt").read_text(errors="replace")
    assert printed.count("in misbehave") == 2  # the stack of the hang, and of the crash


@pytest.mark.slow
@pytest.mark.parametrize("name", ["single", "many"])
def test_changes_that_a_function_makes_to_its_process_do_not_reach_later_calls(run, hostile, name):
    values, failures, _ = run(name, ["builtins", "length abc", "sysexit", "length ab"], workers=1)
    assert values == {0: 1.0, 1: 3.0, 3: 2.0}
    assert failures[2].cause == "exception"
    printed = (hostile.parent / "output.txt").read_text(errors="replace")
    assert "this reward process ends, and another one replaces it: the builtin len was changed in it" in printed


def gone_within(pid: int, limit_s: float) -> bool:
    """Return whether a process is gone or waits to be reaped, at the latest after the limit."""
    end = time.monotonic() + limit_s
    while time.monotonic() < end:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except (FileNotFoundError, ProcessLookupError):
            return True
        time.sleep(0.05)
    return False


@pytest.mark.slow
def test_hanging_calls_run_in_parallel(run):
    _, failures, seconds = run("single", ["hang"] * 6, workers=6, timeout_s=0.5)
    assert len(failures) == 6
    assert seconds < 2.9  # six in a row would take 3 s or more


def test_async_calls_overlap(run):
    values, failures, seconds = run("waits", ["value 9"] * 40 + ["await"])
    assert len(values) == 40  # 0.3 s each
    assert failures[40].cause == "timeout"
    assert seconds < 3


def test_async_batches(run):
    values, failures, _ = run("waits_for_many", ["value 1", "none", "raise", "value 4"])
    assert values == {0: 1.0, 3: 4.0}
    assert {index: failure.cause for index, failure in failures.items()} == {1: "none", 2: "exception"}


def test_a_batch_of_the_wrong_length(run):
    values, failures, _ = run("short", ["value 1"] * 3, workers=1)
    assert not values
    assert {failure.cause for failure in failures.values()} == {"exception"}
    assert "returned 2 scores for 3 responses; a batched function gives a list" in failures[0].detail


@pytest.mark.parametrize(
    ("name", "given"), [("one_for_all", "1 scores"), ("a_number", "a float: 1.0"), ("a_set", "a set: {0.5}")]
)
def test_one_score_for_a_whole_batch_is_a_failure(run, name, given):
    # If the examples were tried one by one, the value would look like the score of each.
    values, failures, _ = run(name, ["value 1"] * 3, workers=1)
    assert not values
    assert {failure.detail.partition(" for ")[0] for failure in failures.values()} == {f"returned {given}"}


def test_arrays_are_not_numbers(run):
    values, failures, _ = run("single", ["array 0", "array 1", "array 2"])
    assert values == {0: 1.0}
    assert [failures[index].cause for index in (1, 2)] == ["not-a-number"] * 2
    assert failures[2].detail == "returned a ndarray: array([[1.]]), not a number"


@pytest.mark.parametrize("name", ["single", "many", "waits"])
@pytest.mark.parametrize("forged", ["pickle", "answer", "idle", "split", "type"])
def test_a_forged_answer_loses_its_example_and_is_never_executed(run, tmp_path, name, forged):
    note = tmp_path / "executed"
    values, failures, _ = run(name, ["value 0", f"forge {forged} {note}", "value 2"])
    assert not note.exists()
    assert values == {0: 0.0, 2: 2.0}
    assert (failures[1].cause, failures[1].detail.partition(" (")[0]) == (
        "crash",
        "code wrote into the connection of its process",
    )


@pytest.mark.parametrize(
    "extent", ["", " for good", " streams", " files"], ids=["restored", "limit", "streams", "files"]
)
def test_changed_process_state_is_restored_for_the_next_call(run, extent):
    spoilt = f"spoilt {Path.cwd()}"
    values, _, _ = run("single", ["pid", spoilt, f"spoil{extent}", spoilt, "pid"], workers=1)
    assert values[1] == values[3] == 0.0
    assert extent or values[0] == values[4]  # it is the same process


def test_the_logged_output_of_a_process_is_bounded(hostile, tmp_path):
    """Output of all calls together, and of programs that a function starts."""
    output, function = tmp_path / "output.txt", Function("single", f"{hostile}:single")
    with RewardPool([function], workers=1, timeout_s=10.0, output=output) as pool:
        responses = ["print", "print much", "print much", "program", "value 1"]
        values, _ = read(list(calls_of(pool, [Example("p", one, None, {}) for one in responses])), responses)
    assert values == {0: 5.0, 1: 1.0, 2: 1.0, 3: 1.0, 4: 1.0}
    printed = output.read_text(errors="replace")
    assert printed.startswith("garbage ") and len(printed) < MOST_BYTES + 1000
    total = sum(map(int, re.findall(r"process \d+: (\d+) bytes of its output, after 262144, were not logged", printed)))
    assert total + MOST_BYTES == 801 + 256 + 2 * 10 * 1_000_001 + 1_000_000


@pytest.mark.parametrize("name", ["single", "many", "waits"])
def test_only_the_parent_of_a_fork_answers(run, name):
    responses = [f"value {index}" for index in range(20)]
    responses[3], responses[8] = "fork", "fork raise"
    values, failures, _ = run(name, responses, workers=1)
    assert values == {**{index: float(index) for index in range(20)}, 3: 6.0, 8: 6.0} and not failures


def test_an_abandoned_run_leaves_a_usable_pool(hostile):
    with RewardPool([Function("single", f"{hostile}:single")], workers=2, timeout_s=2.0) as pool:
        list(calls_of(pool, [Example("p", "value 0", None, {})] * 8))
        processes = set(pids(pool))
        outcomes = calls_of(pool, [Example("p", r, None, {}) for r in ["hang", "value 1"]])
        next(outcomes)
        outcomes.close()
        again = list(calls_of(pool, [Example("p", f"value {n}", None, {}) for n in range(50)]))
        assert len(processes - set(pids(pool))) == 1  # the process that hung
    assert sorted(outcome.value for outcome in again) == list(range(50))
    with pytest.raises(RuntimeError, match="closed"):
        next(calls_of(pool, [Example("p", "value 1", None, {})]))


def test_an_unpicklable_record_fails_alone(hostile):
    examples = [Example("ab", "c", "def", {"n": n}) for n in range(4)]
    examples[2] = Example("ab", "c", "def", {"n": lambda: 0})
    with RewardPool([Function("f", f"{hostile}:all_arguments")], workers=1, timeout_s=5.0) as pool:
        outcomes = {outcome.index: outcome for outcome in calls_of(pool, examples)}
        assert list(calls_of(pool, [])) == []
    assert outcomes[2].failure.cause == "unpicklable"
    assert [outcomes[n].value for n in (0, 1, 3)] == [312.0, 1312.0, 3312.0]


def test_workers_that_die_idle_are_replaced(hostile):
    with RewardPool([Function("single", f"{hostile}:single")], workers=2, timeout_s=5.0) as pool:
        list(calls_of(pool, [Example("p", "value 0", None, {})] * 8))
        for pid in pids(pool):
            os.kill(pid, signal.SIGKILL)
            assert gone_within(pid, 2.0)
        outcomes = list(calls_of(pool, [Example("p", "value 7", None, {})] * 10))
    assert [outcome.value for outcome in outcomes] == [7.0] * 10


@pytest.mark.slow
def test_functions_that_do_not_load(refused, hostile, tmp_path):
    with refused():
        RewardPool([Function("f", f"{hostile}:nothing")], workers=1, timeout_s=1.0)
    deadly = tmp_path / "deadly.py"
    deadly.write_text("import os\nos._exit(7)\n")
    with pytest.raises(Refusal, match=r"deadly.py:f: the process that loads it exited with status 7"):
        RewardPool([Function("f", f"{deadly}:f")], workers=1, timeout_s=1.0)


def test_a_function_that_takes_too_long_to_load(tmp_path, monkeypatch):
    monkeypatch.setattr(executor, "START_LIMIT_S", 0.2)
    slow = tmp_path / "slow.py"
    slow.write_text("import time\ntime.sleep(1000)\n")
    with pytest.raises(Refusal, match=r"slow.py:f: loading takes longer than 0.2 s"):
        RewardPool([Function("f", f"{slow}:f")], workers=1, timeout_s=1.0)


@pytest.mark.skipif(sys.platform != "linux", reason="counts threads")
def test_functions_whose_modules_start_threads_are_not_forked(tmp_path):
    file = tmp_path / "threaded.py"
    file.write_text(
        "import os\nimport pyarrow\n"
        "def f(prompt, response, answer, record): return len(os.listdir('/proc/self/task'))\n"
    )
    with RewardPool([Function("f", f"{file}:f")], workers=1, timeout_s=30.0) as pool:
        assert next(calls_of(pool, [Example("p", "", None, {})])).value > 1  # a fork has one thread


def test_workers_load_nothing_heavy_and_start_fast(hostile):
    start = time.monotonic()
    with RewardPool([Function("heavy", f"{hostile}:heavy")], workers=1, timeout_s=5.0) as pool:
        seconds = time.monotonic() - start
        assert next(iter(calls_of(pool, [Example("", "", None, {})]))).value == 0.0
    assert seconds < 1.5
    light = "import sys, jaxrlhf.rewards.pool; assert not {'jax', 'numpy', 'flax'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", light], check=True)


def test_a_thousand_fast_calls(run):
    _, _, seconds = run("single", ["value 1"] * 1000)
    assert seconds < 2.0


@pytest.mark.parametrize(
    ("reference", "message"),
    [
        ("nowhere", "not of the form"),
        ("no_such_module:f", "importing no_such_module failed with ModuleNotFoundError"),
        ("no/such/file.py:f", "there is no file"),
        ("math:nothing", "has no 'nothing'"),
        ("math:pi", "is a float, which cannot be called"),
        ("jaxrlhf.rewards.formats:check_pattern", "but is called with .prompt, response, answer, record."),
        ("{broken}:f", "failed with SyntaxError"),
    ],
)
def test_bad_references_are_one_line(reference, message, tmp_path):
    broken = tmp_path / "broken.py"
    broken.write_text("def f(:\n")
    with pytest.raises(ValueError, match=message) as caught:
        resolve(reference.format(broken=broken))
    assert "\n" not in str(caught.value)


def test_reward_files_may_import_their_neighbours(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "neighbour_of_reward.py").write_text("VALUE = 4.0\n")
    file = tmp_path / "reward_with_neighbour.py"
    file.write_text("from neighbour_of_reward import VALUE\ndef f(p, r, a, record): return VALUE\n")
    assert resolve(f"{file}:f")("", "", None, {}) == 4.0

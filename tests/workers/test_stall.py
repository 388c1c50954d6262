"""A run in which nothing moves says which call waits for what, and ends if it is told to."""

import subprocess
import sys
import textwrap
import threading
import time
from concurrent.futures import Future

import pytest

from jaxrlhf.config import Refusal, Stall
from jaxrlhf.single_controller.group import DeviceQueue, Group, Timeline
from jaxrlhf.single_controller.stall import StallWatch

PATIENCE_S = 30.0


class Calls:
    """Roles whose reward hangs until the test releases it."""

    def __init__(self):
        self.timeline, self.go = Timeline(), threading.Event()
        self.policy, self.beside = (DeviceQueue(name, self.timeline) for name in ("policy", "(host)"))
        self.reward = Group("reward", ["compute_reward"], self.hang, self.beside)
        self.actor = Group("actor", ["update_actor", "compute_log_prob"], lambda *_: 1, self.policy)

    def hang(self, *_):
        assert self.go.wait(PATIENCE_S)
        return 0

    def close(self):
        self.go.set()
        for queue in (self.policy, self.beside):
            queue.close()


@pytest.fixture
def calls():
    made = Calls()
    yield made
    made.close()


def until(reached):
    end = time.monotonic() + PATIENCE_S
    while not reached():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_who_waits_for_whom_is_said_once_in_each_period(calls):
    said = []
    scores = calls.reward.compute_reward()
    update = calls.actor.update_actor(scores)
    calls.actor.compute_log_prob()
    with StallWatch(Stall(after_s=0.4), calls.timeline, lambda: "in step 3 of made, while waiting", report=said.append):
        until(lambda: said)
        first, *_ = said
        lines = first.splitlines()
        assert lines[0].startswith("no progress for ") and lines[0].endswith("in step 3 of made, while waiting")
        assert lines[1].startswith("  reward.compute_reward on (host): runs, since ")
        assert lines[2].startswith("  actor.update_actor on policy: waits for reward.compute_reward, since ")
        assert lines[3].startswith("  actor.compute_log_prob on policy: queued, since ")
        assert any(line.endswith(" hang") for line in lines), "the stack of the call that hangs"
        until(lambda: len(said) == 2)
        calls.go.set()
        assert update.result(PATIENCE_S) == 1
        until(lambda: not calls.timeline.open_calls())
    assert len(said) == 2


def test_progress_within_a_call_a_new_task_and_new_calls_are_movement(calls):
    said, task = [], ["a"]
    calls.reward.compute_reward()
    with StallWatch(Stall(after_s=0.5), calls.timeline, lambda: task[0], report=said.append) as watch:
        for move in (
            watch.beat,
            lambda: task.append(task.pop() + "a"),
            lambda: calls.actor.compute_log_prob().result(),
        ):
            for _ in range(6):
                time.sleep(0.15)
                move()
    assert not said


def test_a_call_that_is_cancelled_or_fails_is_under_way_no_more(calls):
    missing: Future = Future()
    failing = calls.actor.update_actor(missing)
    waiting = calls.actor.compute_log_prob()
    until(lambda: [call.state for call in calls.timeline.open_calls()] == ["waits", "queued"])
    [first, _] = calls.timeline.open_calls()
    assert first.waits_for == "a value of the controller"
    calls.policy.close(wait=False)
    missing.set_exception(ValueError("no scores"))
    with pytest.raises(ValueError, match="no scores"):
        failing.result(PATIENCE_S)
    until(lambda: not calls.timeline.open_calls())
    assert waiting.cancelled()


def test_nothing_is_watched_where_that_is_off():
    before = threading.active_count()
    with StallWatch(Stall(after_s=None), Timeline(), lambda: "x"):
        assert threading.active_count() == before
    with pytest.raises(Refusal, match="after_s must be above 0"):
        Stall(after_s=0.0)


def test_a_run_that_is_to_end_takes_its_processes_with_it(tmp_path):
    program = """
    import subprocess, sys, time
    from jaxrlhf.config import Stall
    from jaxrlhf.single_controller.group import Timeline
    from jaxrlhf.single_controller.stall import StallWatch

    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    print(child.pid, flush=True)
    with StallWatch(Stall(after_s=0.3, then="end"), Timeline(), lambda: "in step 1 of made, while loading data"):
        time.sleep(60)
    """
    start = time.monotonic()
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and time.monotonic() - start < 50
    assert "in step 1 of made, while loading data\n  no call of a role is running" in done.stderr
    assert f"process {done.stdout.strip()}: state S, " in done.stderr

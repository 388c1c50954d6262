"""Groups: order on one lane, overlap on two, errors with their place."""

import threading
import time
import traceback
from concurrent.futures import Future

import pytest

from jaxrlhf.workers.group import Group, Lane, Timeline, resolve
from jaxrlhf.workers.protocol import DP_PROTO, ONE_TO_ALL, verb

PATIENCE_S = 30.0


class Recorder:
    """Notes its calls; `meet` returns only when the other party is there too."""

    def __init__(self, calls=None, barrier=None):
        self.calls = [] if calls is None else calls
        self.barrier = barrier

    @verb(DP_PROTO)
    def add(self, left, right=0):
        self.calls.append((left, right))
        return left + right

    @verb(ONE_TO_ALL)
    def meet(self):
        return self.barrier.wait(PATIENCE_S)

    @verb(ONE_TO_ALL)
    def fail(self, value):
        raise ValueError(f"no {value}")

    def private(self):
        """Not a verb."""


@pytest.fixture
def timeline():
    return Timeline()


@pytest.fixture
def lanes(timeline):
    """Two lanes."""
    lanes = Lane("first", timeline), Lane("second", timeline)
    yield lanes
    for lane in lanes:
        lane.close()


def test_calls_of_one_lane_run_in_order(lanes):
    calls = []
    actor, critic = (Group(role, Recorder(calls), lanes[0]) for role in ("actor", "critic"))
    futures = [group.add(number) for number in range(20) for group in (actor, critic)]
    assert [future.result(PATIENCE_S) for future in futures] == [n for n in range(20) for _ in range(2)]
    assert calls == [(n, 0) for n in range(20) for _ in range(2)]


def test_a_call_returns_before_it_ran(lanes):
    gate: Future = Future()
    answer = Group("actor", Recorder(), lanes[0]).add(gate, right=2)
    assert not answer.done()
    gate.set_result(1)
    assert answer.result(PATIENCE_S) == 3


def test_lanes_run_side_by_side(lanes):
    barrier = threading.Barrier(2)
    futures = [Group("role", Recorder(barrier=barrier), lane).meet() for lane in lanes]
    # One after the other would never meet.
    assert sorted(future.result(PATIENCE_S) for future in futures) == [0, 1]


def test_a_call_waits_for_the_results_it_is_given(lanes):
    first, second = (Group("role", Recorder(), lane) for lane in lanes)
    total = first.add(second.add(first.add(1, 2), right=second.add(3, 4)), right=10)
    assert total.result(PATIENCE_S) == 20


def test_waiting_for_arguments_is_not_counted_as_running(lanes, timeline):
    gate: Future = Future()
    answer = Group("critic", Recorder(), lanes[0]).add(gate)
    time.sleep(0.1)
    opened = time.perf_counter()
    gate.set_result(1)
    answer.result(PATIENCE_S)
    lanes[0].close()
    [span] = timeline.take()
    assert (span.role, span.verb) == ("critic", "add")
    assert opened <= span.start_s <= span.end_s <= time.perf_counter()
    assert timeline.take() == []


def test_an_error_comes_out_of_the_future_with_its_place(lanes, timeline):
    group = Group("reward", Recorder(), lanes[0])
    future = group.fail("answer")
    with pytest.raises(ValueError, match="no answer") as caught:
        future.result(PATIENCE_S)
    assert caught.value.__notes__ == ["raised in reward.fail"]
    assert "in fail" in "".join(traceback.format_exception(caught.value))
    assert group.add(1, 2).result(PATIENCE_S) == 3, "the lane goes on"
    assert [span.verb for span in timeline.take()] == ["fail", "add"]


def test_an_error_reaches_what_depends_on_it_with_the_place_it_came_from(lanes):
    first, second = (Group(role, Recorder(), lane) for role, lane in zip(("reward", "actor"), lanes, strict=True))
    with pytest.raises(ValueError, match="no answer") as caught:
        second.add(first.fail("answer")).result(PATIENCE_S)
    assert caught.value.__notes__ == ["raised in reward.fail"]


@pytest.mark.parametrize("name", ["private", "calls", "generate"])
def test_only_verbs_can_be_called(lanes, name):
    with pytest.raises(AttributeError, match=rf"actor has no verb '{name}'; it has \['add', 'fail', 'meet'\]"):
        getattr(Group("actor", Recorder(), lanes[0]), name)


def test_closing_waits_for_what_runs(timeline):
    lane, calls = Lane("pool", timeline), []
    gate: Future = Future()
    Group("actor", Recorder(calls), lane).add(gate)
    threading.Timer(0.1, gate.set_result, args=[5]).start()
    lane.close()
    assert calls == [(5, 0)]


def test_resolve():
    done: Future = Future()
    done.set_result(4)
    assert (resolve(done), resolve(4), resolve(None)) == (4, 4, None)

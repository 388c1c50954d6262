"""Groups: order on one lane, overlap on two, errors with their place."""

import threading
import time
import traceback
from concurrent.futures import CancelledError, Future

import pytest

from jaxrlhf.batching.transfer_protocol import DP_PROTO, ONE_TO_ALL, verb, verbs_of
from jaxrlhf.single_controller.group import ActorApart, Group, Lane, Remote, Timeline

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


def group_of(role, worker, lane):
    """A group whose only rank is here."""

    def call(_, name, args, kwargs):
        return getattr(worker, name)(*args, **kwargs)

    return Group(role, verbs_of(type(worker)), call, lane)


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
    actor, critic = (group_of(role, Recorder(calls), lanes[0]) for role in ("actor", "critic"))
    futures = [group.add(number) for number in range(20) for group in (actor, critic)]
    assert [future.result(PATIENCE_S) for future in futures] == [n for n in range(20) for _ in range(2)]
    assert calls == [(n, 0) for n in range(20) for _ in range(2)]


def test_a_call_returns_before_it_ran(lanes):
    gate: Future = Future()
    answer = group_of("actor", Recorder(), lanes[0]).add(gate, right=2)
    assert not answer.done()
    gate.set_result(1)
    assert answer.result(PATIENCE_S) == 3


def test_lanes_run_side_by_side(lanes):
    barrier = threading.Barrier(2)
    futures = [group_of("role", Recorder(barrier=barrier), lane).meet() for lane in lanes]
    # One after the other would never meet.
    assert sorted(future.result(PATIENCE_S) for future in futures) == [0, 1]


def test_a_call_waits_for_the_results_it_is_given(lanes):
    first, second = (group_of("role", Recorder(), lane) for lane in lanes)
    total = first.add(second.add(first.add(1, 2), right=second.add(3, 4)), right=10)
    assert total.result(PATIENCE_S) == 20


def test_waiting_for_arguments_is_not_counted_as_running(lanes, timeline):
    gate: Future = Future()
    answer = group_of("critic", Recorder(), lanes[0]).add(gate)
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
    group = group_of("reward", Recorder(), lanes[0])
    future = group.fail("answer")
    with pytest.raises(ValueError, match="no answer") as caught:
        future.result(PATIENCE_S)
    assert caught.value.__notes__ == ["raised in reward.fail"]
    assert "in fail" in "".join(traceback.format_exception(caught.value))
    assert group.add(1, 2).result(PATIENCE_S) == 3, "the lane goes on"
    assert [span.verb for span in timeline.take()] == ["fail", "add"]


def test_an_error_reaches_what_depends_on_it_with_the_place_it_came_from(lanes):
    first, second = (group_of(role, Recorder(), lane) for role, lane in zip(("reward", "actor"), lanes, strict=True))
    with pytest.raises(ValueError, match="no answer") as caught:
        second.add(first.fail("answer")).result(PATIENCE_S)
    assert caught.value.__notes__ == ["raised in reward.fail"]


@pytest.mark.parametrize("name", ["private", "calls", "generate"])
def test_only_verbs_can_be_called(lanes, name):
    with pytest.raises(AttributeError, match=rf"actor has no verb '{name}'; it has \['add', 'fail', 'meet'\]"):
        getattr(group_of("actor", Recorder(), lanes[0]), name)


def test_closing_waits_for_what_runs(timeline):
    lane, calls = Lane("pool", timeline), []
    gate: Future = Future()
    group_of("actor", Recorder(calls), lane).add(gate)
    threading.Timer(0.1, gate.set_result, args=[5]).start()
    lane.close()
    assert calls == [(5, 0)]


class Elsewhere(Remote):
    """A value of which it is known whether it was brought here."""

    def __init__(self, value):
        self.value, self.loaded = value, 0

    def load(self):
        self.loaded += 1
        return self.value


def test_what_is_passed_on_stays_where_it_is(lanes):
    far = Elsewhere(5)
    seen = []

    def call(role, name, args, kwargs):
        seen.append((role, name, args, kwargs))
        return far

    first, second = (Group(role, ["give", "take"], call, lane) for role, lane in zip("ab", lanes, strict=True))
    given = first.give()
    taken = second.take(given, by_name=given)
    assert taken.where() is far
    assert seen[1] == ("b", "take", (far,), {"by_name": far})
    assert far.loaded == 0, "the controller fetched what it only passes on"
    assert taken.result(PATIENCE_S) == 5
    assert far.loaded == 1


def test_calls_that_a_closed_lane_never_ran_are_cancelled(timeline):
    lane = Lane("pool", timeline)
    gate: Future = Future()
    group = group_of("actor", Recorder(), lane)
    running, waiting = group.add(gate), group.add(1)
    threading.Timer(0.1, gate.set_result, args=[5]).start()
    lane.close()
    assert running.result(PATIENCE_S) == 5
    with pytest.raises(CancelledError):
        waiting.result(PATIENCE_S)


class Trainer:
    """An actor that trains only; counts its versions."""

    def __init__(self):
        self.version = 0

    @verb(ONE_TO_ALL)
    def update_actor(self):
        self.version += 1

    @verb(ONE_TO_ALL)
    def compute_log_prob(self, rollout):
        return ("logp", rollout)

    @verb(ONE_TO_ALL)
    def offer_weights(self, wanted):
        return self.version, wanted


class Writer:
    """A rollout group that notes which weights it was sent."""

    def __init__(self):
        self.received = []

    @verb(ONE_TO_ALL)
    def wanted_weights(self):
        return "splits"

    @verb(ONE_TO_ALL)
    def load_weights(self, offer):
        version, wanted = offer
        assert wanted == "splits"
        self.received.append(version)
        return version

    @verb(ONE_TO_ALL)
    def generate_sequences(self, *, versions):
        return f"rollout of version {versions}"


def test_weights_are_sent_to_a_rollout_apart_once_for_each_version(lanes):
    trainer, writer = Trainer(), Writer()
    actor = ActorApart(group_of("actor", trainer, lanes[0]), group_of("rollout", writer, lanes[1]))
    rollouts = [actor.generate_sequences(), actor.generate_sequences()]
    actor.update_actor()
    rollouts.append(actor.generate_sequences())
    assert [rollout.result(PATIENCE_S)[-1] for rollout in rollouts] == ["0", "0", "1"]
    assert writer.received == [0, 1]
    assert actor.compute_log_prob(rollouts[0]).result(PATIENCE_S) == ("logp", "rollout of version 0")


def test_a_failed_transfer_is_the_error_of_the_generation_that_needed_it(lanes):
    writer = Writer()
    writer.load_weights = None  # not callable, so sending raises

    actor = ActorApart(group_of("actor", Trainer(), lanes[0]), group_of("rollout", writer, lanes[1]))
    with pytest.raises(TypeError, match="NoneType") as caught:
        actor.generate_sequences().result(PATIENCE_S)
    assert caught.value.__notes__ == ["raised in rollout.load_weights"]

"""Groups: order on one device queue, overlap on two, errors with their place."""

import threading
import time
import traceback
from concurrent.futures import CancelledError, Future

import pytest

from jaxrlhf.batching.transfer_protocol import DP_PROTO, ONE_TO_ALL, worker_method, worker_methods
from jaxrlhf.single_controller.group import ActorWithRolloutPool, DeviceQueue, Group, RemoteValue, Timeline

PATIENCE_S = 30.0


class Recorder:
    """Notes its calls; `meet` returns only when the other party is there too."""

    def __init__(self, calls=None, barrier=None):
        self.calls = [] if calls is None else calls
        self.barrier = barrier

    @worker_method(DP_PROTO)
    def add(self, left, right=0):
        self.calls.append((left, right))
        return left + right

    @worker_method(ONE_TO_ALL)
    def meet(self):
        return self.barrier.wait(PATIENCE_S)

    @worker_method(ONE_TO_ALL)
    def fail(self, value):
        raise ValueError(f"no {value}")

    def private(self):
        """Not a worker method."""


def group_of(role, worker, queue):
    """A group whose only rank is here."""

    def call(_, name, args, kwargs):
        return getattr(worker, name)(*args, **kwargs)

    return Group(role, worker_methods(type(worker)), call, queue)


@pytest.fixture
def timeline():
    return Timeline()


@pytest.fixture
def queues(timeline):
    """Two queues."""
    queues = DeviceQueue("first", timeline), DeviceQueue("second", timeline)
    yield queues
    for queue in queues:
        queue.close()


@pytest.fixture
def beside(timeline):
    """A queue for what runs beside the calls of the second."""
    queue = DeviceQueue("beside", timeline)
    yield queue
    queue.close()


def test_calls_of_one_queue_run_in_order(queues):
    calls = []
    actor, critic = (group_of(role, Recorder(calls), queues[0]) for role in ("actor", "critic"))
    futures = [group.add(number) for number in range(20) for group in (actor, critic)]
    assert [future.result(PATIENCE_S) for future in futures] == [n for n in range(20) for _ in range(2)]
    assert calls == [(n, 0) for n in range(20) for _ in range(2)]


def test_a_call_returns_before_it_ran(queues):
    gate: Future = Future()
    answer = group_of("actor", Recorder(), queues[0]).add(gate, right=2)
    assert not answer.done()
    gate.set_result(1)
    assert answer.result(PATIENCE_S) == 3


def test_queues_run_side_by_side(queues):
    barrier = threading.Barrier(2)
    futures = [group_of("role", Recorder(barrier=barrier), queue).meet() for queue in queues]
    # One after the other would never meet.
    assert sorted(future.result(PATIENCE_S) for future in futures) == [0, 1]


def test_a_call_waits_for_the_results_it_is_given(queues):
    first, second = (group_of("role", Recorder(), queue) for queue in queues)
    total = first.add(second.add(first.add(1, 2), right=second.add(3, 4)), right=10)
    assert total.result(PATIENCE_S) == 20


def test_waiting_for_arguments_is_not_counted_as_running(queues, timeline):
    gate: Future = Future()
    answer = group_of("critic", Recorder(), queues[0]).add(gate)
    time.sleep(0.1)
    opened = time.perf_counter()
    gate.set_result(1)
    answer.result(PATIENCE_S)
    queues[0].close()
    [span] = timeline.take()
    assert (span.role, span.verb) == ("critic", "add")
    assert opened <= span.start_s <= span.end_s <= time.perf_counter()
    assert timeline.take() == []


def test_an_error_comes_out_of_the_future_with_its_place(queues, timeline):
    group = group_of("reward", Recorder(), queues[0])
    future = group.fail("answer")
    with pytest.raises(ValueError, match="no answer") as caught:
        future.result(PATIENCE_S)
    assert caught.value.__notes__ == ["raised in reward.fail"]
    assert "in fail" in "".join(traceback.format_exception(caught.value))
    assert group.add(1, 2).result(PATIENCE_S) == 3, "the queue goes on"
    assert [span.verb for span in timeline.take()] == ["fail", "add"]


def test_an_error_reaches_what_depends_on_it_with_the_place_it_came_from(queues):
    first, second = (group_of(role, Recorder(), queue) for role, queue in zip(("reward", "actor"), queues, strict=True))
    with pytest.raises(ValueError, match="no answer") as caught:
        second.add(first.fail("answer")).result(PATIENCE_S)
    assert caught.value.__notes__ == ["raised in reward.fail"]


@pytest.mark.parametrize("name", ["private", "calls", "generate"])
def test_only_worker_methods_can_be_called(queues, name):
    with pytest.raises(AttributeError, match=rf"actor has no worker method '{name}'; it has \['add', 'fail', 'meet'\]"):
        getattr(group_of("actor", Recorder(), queues[0]), name)


def test_closing_waits_for_what_runs(timeline):
    queue, calls = DeviceQueue("pool", timeline), []
    gate: Future = Future()
    group_of("actor", Recorder(calls), queue).add(gate)
    threading.Timer(0.1, gate.set_result, args=[5]).start()
    queue.close()
    assert calls == [(5, 0)]


class Elsewhere(RemoteValue):
    """A value that records whether it was brought here."""

    def __init__(self, value):
        self.value, self.loaded = value, 0

    def load(self):
        self.loaded += 1
        return self.value


def test_what_is_passed_on_stays_where_it_is(queues):
    far = Elsewhere(5)
    seen = []

    def call(role, name, args, kwargs):
        seen.append((role, name, args, kwargs))
        return far

    first, second = (Group(role, ["give", "take"], call, queue) for role, queue in zip("ab", queues, strict=True))
    given = first.give()
    taken = second.take(given, by_name=given)
    assert taken.value_or_handle() is far
    assert seen[1] == ("b", "take", (far,), {"by_name": far})
    assert far.loaded == 0, "the controller fetched what it only passes on"
    assert taken.result(PATIENCE_S) == 5
    assert far.loaded == 1
    assert taken.value_or_handle() == 5, "a loaded value outlives its host"


def test_calls_that_a_closed_queue_never_ran_are_cancelled(timeline):
    queue = DeviceQueue("pool", timeline)
    gate: Future = Future()
    group = group_of("actor", Recorder(), queue)
    running, waiting = group.add(gate), group.add(1)
    threading.Timer(0.1, gate.set_result, args=[5]).start()
    queue.close()
    assert running.result(PATIENCE_S) == 5
    with pytest.raises(CancelledError):
        waiting.result(PATIENCE_S)


class Trainer:
    """An actor that trains only; counts its versions."""

    def __init__(self):
        self.version, self.withdrawn = 0, []

    @worker_method(ONE_TO_ALL)
    def update_actor(self):
        self.version += 1

    @worker_method(ONE_TO_ALL)
    def compute_log_prob(self, rollout):
        return ("logp", rollout)

    @worker_method(ONE_TO_ALL)
    def offer_weights(self, wanted, *, waiting=0):
        return self.version, wanted

    @worker_method(ONE_TO_ALL)
    def withdraw_weights(self, wanted):
        self.withdrawn.append(wanted)


class Writer:
    """A rollout group that notes which weights it was sent, all in the splits that it asked for.

    `started` tells that it generates, which ends as `end` is set.
    """

    def __init__(self):
        self.received, self.splits, self.fetched = [], "splits", {}
        self.started, self.end = threading.Event(), threading.Event()
        self.end.set()

    @worker_method(ONE_TO_ALL)
    def wanted_weights(self):
        return self.splits

    @worker_method(ONE_TO_ALL)
    def load_weights(self, offer):
        version, wanted = offer
        assert wanted == self.splits
        self.received.append(version)
        return version

    @worker_method(ONE_TO_ALL)
    def fetch_weights(self, offer, *, number):
        version, wanted = offer
        assert wanted == self.splits
        self.fetched[number] = version
        return number

    @worker_method(ONE_TO_ALL)
    def load_fetched(self, number):
        self.received.append(self.fetched.pop(number))
        return self.received[-1]

    @worker_method(ONE_TO_ALL)
    def generate_sequences(self, *, versions):
        self.started.set()
        assert self.end.wait(PATIENCE_S)
        return f"rollout of version {versions}"


def apart(trainer, writer, queues, beside):
    """An actor whose responses a group on other devices generates."""
    rollout, fetching = (group_of("rollout", writer, queue) for queue in (queues[1], beside))
    return ActorWithRolloutPool(group_of("actor", trainer, queues[0]), rollout, lambda: fetching)


def test_weights_are_sent_to_a_rollout_apart_once_for_each_version(queues, beside):
    trainer, writer = Trainer(), Writer()
    actor = apart(trainer, writer, queues, beside)
    rollouts = [actor.generate_sequences(), actor.generate_sequences()]
    actor.update_actor()
    rollouts.append(actor.generate_sequences())
    assert [rollout.result(PATIENCE_S)[-1] for rollout in rollouts] == ["0", "0", "1"]
    assert writer.received == [0, 1]
    assert actor.compute_log_prob(rollouts[0]).result(PATIENCE_S) == ("logp", "rollout of version 0")


def test_an_actor_as_of_a_moment_generates_with_the_weights_of_then_and_others_in_between_with_the_newest(
    queues, beside
):
    trainer, writer = Trainer(), Writer()
    actor = apart(trainer, writer, queues, beside)
    first, second = actor.snapshot(waiting=2), actor.snapshot(waiting=2)
    actor.update_actor()
    third = actor.snapshot(waiting=2)
    actor.update_actor()
    asked = (first, first, actor, second, third, actor)
    rollouts = [one.generate_sequences().result(PATIENCE_S) for one in asked]
    assert [rollout[-1] for rollout in rollouts] == ["0", "0", "2", "0", "1", "2"]
    assert writer.received == [0, 0, 2, 0, 1, 2], "the first was sent as the splits were asked for"
    assert third.compute_log_prob(rollouts[0]).result(PATIENCE_S) == ("logp", "rollout of version 0")


def test_weights_come_while_others_draw_and_are_loaded_after_them(queues, beside):
    trainer, writer = Trainer(), Writer()
    actor = apart(trainer, writer, queues, beside)
    actor.generate_sequences().result(PATIENCE_S)
    writer.started.clear()
    writer.end.clear()
    drawing = actor.snapshot(waiting=2).generate_sequences()
    assert writer.started.wait(PATIENCE_S)
    actor.update_actor()
    later = actor.snapshot(waiting=2)
    beside.submit(lambda *_: None, "nobody", "wait").result(PATIENCE_S)  # behind the fetch
    assert [*writer.fetched.values()] == [1] and not drawing.done() and writer.received[-1] == 0
    writer.end.set()
    assert drawing.result(PATIENCE_S)[-1] == "0"
    assert later.generate_sequences().result(PATIENCE_S)[-1] == "1" and not writer.fetched


def test_a_rollout_group_that_came_back_with_other_splits_has_the_newest_weights_in_place_of_those_offered(
    queues, beside
):
    trainer, writer = Trainer(), Writer()
    actor = apart(trainer, writer, queues, beside)
    started, waiting = actor.snapshot(waiting=2), actor.snapshot(waiting=2)
    assert started.generate_sequences().result(PATIENCE_S)[-1] == "0"
    actor.update_actor()
    writer.splits = "fewer"
    actor.send_again()
    after = actor.snapshot(waiting=2)
    actor.update_actor()
    rollouts = [one.generate_sequences().result(PATIENCE_S)[-1] for one in (waiting, waiting, after, actor)]
    assert rollouts == ["2", "2", "1", "2"] and trainer.withdrawn == ["splits"]


def test_a_failed_transfer_is_the_error_of_the_generation_that_needed_it(queues, beside):
    writer = Writer()
    writer.load_weights = None  # not callable, so sending raises

    actor = apart(Trainer(), writer, queues, beside)
    with pytest.raises(TypeError, match="NoneType") as caught:
        actor.generate_sequences().result(PATIENCE_S)
    assert caught.value.__notes__ == ["raised in rollout.load_weights"]

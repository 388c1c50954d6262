"""Failures of host processes, after which no process is left."""

import os
import signal
import subprocess
import sys
import threading
import time
import uuid
from dataclasses import replace
from pathlib import Path

import pytest
import ray_world
from jax.errors import JaxRuntimeError

from jaxrlhf.config import RayCluster, Refusal
from jaxrlhf.single_controller.ray.cluster import connect, disconnect
from jaxrlhf.single_controller.ray.failure import HostDied, HostHung, HostNotStarted, HostRaised
from jaxrlhf.single_controller.ray.processes import HostProcesses

CLUSTER = RayCluster(devices_per_host=2, platform="cpu", call_timeout_s=20.0)


@pytest.fixture(scope="module", autouse=True)
def connection():
    connection = connect(CLUSTER)
    yield connection
    disconnect(connection)


@pytest.fixture
def pool(tmp_path):
    """Function that starts pools; no process of a pool may be left at the end."""
    pools = []

    def start(name="models", factory=ray_world.World, *, hosts=2, cluster=CLUSTER):
        pools.append(HostProcesses(name, factory, hosts=hosts, cluster=cluster, log_directory=tmp_path))
        return pools[-1]

    yield start
    for started in pools:
        started.close()
        assert not any(ray_world.exists(host.pid) for host in started.hosts)


def caught(kind, world, *args, **kwargs):
    """Return the error of a call, and its seconds."""
    start = time.monotonic()
    with pytest.raises(kind) as info:
        world.call(*args, label="actor.update_actor", **kwargs)
    return info.value, time.monotonic() - start


@pytest.mark.parametrize(
    ("error_s", "answer_s", "death_s"),
    [
        pytest.param(0.0, 1000.0, 3.5, marks=pytest.mark.slow, id="the error is first"),
        pytest.param(1.0, 0.0, 0.8, marks=pytest.mark.seeds, id="it had answered"),
    ],
)
def test_death_is_reported_instead_of_its_consequences(pool, error_s, answer_s, death_s):
    world = pool()
    error, seconds = caught(HostDied, world, "lose_peer", error_s, answer_s, death_s)
    assert seconds < 15
    assert (error.host, error.label) == (world.hosts[1], "actor.update_actor")
    assert f"host 1 of pool 'models' ({world.hosts[1].node_ip}, pid {world.hosts[1].pid}) died" in str(error)
    later, seconds = caught(HostDied, world, "total")
    assert seconds < 0.5 and "(in actor.update_actor, which ended the pool)" in str(later)


@pytest.mark.slow
def test_living_peer_is_not_reported_dead(pool):
    error, seconds = caught(JaxRuntimeError, pool(), "lose_peer", 0.0, 0.0, 1000.0)
    assert seconds < 5
    assert "Connection closed by peer" in str(error)


@pytest.mark.seeds
def test_crash_is_reported_with_its_stack(pool):
    world = pool(hosts=1)
    error, seconds = caught(HostDied, world, "strike", 0, "crash")
    assert seconds < 15
    assert "Segmentation fault" in str(error)
    assert "in crash" in str(error)


@pytest.mark.slow
def test_sleeping_host_is_distinguished_from_waiting_hosts(pool):
    world = pool(cluster=replace(CLUSTER, call_timeout_s=4.0))
    error, seconds = caught(HostHung, world, "strike", 1, "sleep_for_ever")
    assert 4 <= seconds < 12
    assert error.host == world.hosts[1]
    sleeper, waiter = str(error).split(f"\n{world.hosts[0]}\n")
    assert "in sleep_for_ever" in sleeper
    assert "waiting for JAX" not in sleeper
    assert "waiting for JAX" in waiter
    assert "return self.total()" in waiter
    error, seconds = caught(HostHung, world, "total")
    assert seconds < 0.5
    assert error.host == world.hosts[1]


@pytest.mark.slow
def test_exception_keeps_its_type_and_reaches_other_threads(pool):
    world = pool()
    heard = []

    def wait():
        with pytest.raises(HostRaised) as info:
            world.call("sleep", 1000.0, label="reward.compute", timeout_s=60.0)
        heard.append(info.value)

    thread = threading.Thread(target=wait)
    thread.start()
    error, seconds = caught(KeyError, world, "strike", 1, "miss")
    assert seconds < 6  # the other host waits in a collective, and is not waited for
    assert error.args == ("no such prompt",)
    [note] = error.__notes__
    assert note.startswith(f"raised in actor.update_actor on {world.hosts[1]}")
    assert 'raise KeyError("no such prompt")' in note
    later, _ = caught(HostRaised, world, "total")
    thread.join(20)
    for failure in [later, *heard]:
        assert "raised KeyError: 'no such prompt' (in actor.update_actor" in str(failure)
        assert failure.__cause__ is error
    assert [failure.label for failure in heard] == ["reward.compute"]


@pytest.mark.parametrize(
    ("what", "text"),
    [
        pytest.param("miss_unpicklably", "Unpicklable: holds a generator", marks=pytest.mark.slow),
        pytest.param("leave", "SystemExit: goodbye", marks=pytest.mark.seeds),
    ],
)
def test_unpicklable_exception_is_reported(pool, what, text):
    error, _ = caught(RuntimeError, pool(hosts=1), "strike", 0, what)
    assert type(error) is RuntimeError
    assert str(error) == text
    assert f"in {what}" in error.__notes__[0]


@pytest.mark.parametrize(
    ("what", "refusal"),
    [
        pytest.param("reshape_wrongly", False, marks=pytest.mark.seeds),
        pytest.param("refuse", True, marks=pytest.mark.slow),
    ],
)
def test_refusal_on_a_host_is_a_refusal_here(pool, what, refusal):
    error, _ = caught(ValueError, pool(hosts=1), "strike", 0, what)
    assert isinstance(error, Refusal) == refusal


@pytest.mark.seeds
def test_unpicklable_result_is_an_exception(pool):
    error, _ = caught(TypeError, pool(factory=lambda rank, hosts: threading, hosts=1), "Lock")
    assert "pickle" in str(error)


@pytest.mark.seeds
def test_exception_of_the_factory_is_raised(pool):
    def factory(rank, hosts):
        raise ValueError(f"no weights for {rank} of {hosts}")

    with pytest.raises(ValueError, match=r"no weights for [01] of 2") as info:
        pool(factory=factory)
    assert "raised in models.start on host" in info.value.__notes__[0]


@pytest.mark.slow
def test_host_dies_while_starting(pool):
    def factory(rank, hosts):
        print("about to go")
        os.kill(os.getpid(), signal.SIGKILL)

    with pytest.raises(HostDied, match=r"(?s)models\.start: host 0 of pool 'models' .* died: .*about to go"):
        pool(factory=factory, hosts=1)


@pytest.mark.seeds
def test_host_start_times_out(pool):
    def factory(rank, hosts):
        time.sleep(1000)

    cluster = RayCluster(devices_per_host=2, platform="cpu", start_timeout_s=7.0)
    with pytest.raises(HostNotStarted, match=r"(?s)models\.start: host 0 .*time\.sleep\(1000\)"):
        pool(factory=factory, hosts=1, cluster=cluster)


@pytest.mark.slow
def test_pool_is_relaunched_next_to_another(pool, tmp_path):
    other = pool("rewards", hosts=1)
    first = pool()
    os.kill(first.hosts[0].pid, signal.SIGKILL)  # it is idle, and the next call finds it
    error, seconds = caught(HostDied, first, "total")
    assert seconds < 15
    assert error.host == first.hosts[0]  # the other one aborts when JAX's service is gone with it
    second = pool()
    assert [stored.load() for stored in second.call("total", label="actor.total")] == [10.0, 10.0]
    assert [stored.load() for stored in other.call("total", label="reward.total")] == [3.0]
    log = (tmp_path / "models-0.log").read_text()
    assert str(first.hosts[0]) in log
    assert str(second.hosts[0]) in log


@pytest.mark.slow
def test_result_is_lost_with_its_host(pool):
    world, other = pool(hosts=1), pool("rewards", hosts=1)
    [stored] = world.call("ramp", 1 << 20, label="actor.ramp")
    world.close()
    limit = time.monotonic() + 20
    with pytest.raises(HostDied, match=r"actor\.ramp: .* ended before its result was loaded"):
        while time.monotonic() < limit:  # the object store hears of it within seconds
            stored.load()
            time.sleep(0.5)
    with pytest.raises(HostDied, match=r"actor\.ramp"):
        other.call("echo", stored, label="reward.echo", timeout_s=20.0)


ENDS = {
    "forgets": "pass",
    "is killed": "os.kill(os.getpid(), 9)",
    "is terminated": "os.kill(os.getpid(), 15); time.sleep(60)",
}
CONTROLLER = """
import os, sys, time
from pathlib import Path
import ray_world
from jaxrlhf.config import RayCluster
from jaxrlhf.single_controller.ray.cluster import connect, disconnect
from jaxrlhf.single_controller.ray.processes import HostProcesses

cluster = RayCluster(devices_per_host=1, platform="cpu")
connection = connect(cluster)
world = HostProcesses("models", ray_world.World, hosts=1, cluster=cluster, log_directory=Path(sys.argv[1]))
world.call("total", label="x")
print(len(ray_world.marked(os.environ["RAY_TEST_MARK"])), flush=True)
"""


@pytest.mark.slow
def test_no_process_outlives_the_controller(tmp_path):
    # Of a cluster that is killed, agents look for the rest as long as this says; a minute, if nothing does.
    environment = os.environ | {
        "PYTHONPATH": str(Path(__file__).parents[1] / "support"),
        "RAY_gcs_rpc_server_reconnect_timeout_s": "5",
    }
    started = []
    for end, code in ENDS.items():
        mark = uuid.uuid4().hex
        command = [sys.executable, "-c", CONTROLLER + code, str(tmp_path / end)]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        started.append((mark, subprocess.Popen(command, env=environment | {"RAY_TEST_MARK": mark}, **pipes)))
    for mark, process in started:
        shown, complaints = process.communicate(timeout=120)
        assert int(shown) > 5, complaints  # Ray's own and the host: they can be seen by their mark
        limit = time.monotonic() + 90  # of a controller that was killed, agents end last, on a busy machine late
        while ray_world.marked(mark) and time.monotonic() < limit:
            time.sleep(0.2)
        assert ray_world.marked(mark) == []
        assert "ray" not in complaints.lower()

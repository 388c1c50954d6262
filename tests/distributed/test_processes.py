"""Host processes started by Ray: one JAX world, transfers from host to host, messages of failures."""

import os
import pickle
import subprocess
import sys
import threading
import time
from contextlib import closing

import numpy as np
import pytest
import ray
import ray_world
from jax.errors import JaxRuntimeError
from tiny_runs import get_config

from jaxrlhf.config import RayCluster
from jaxrlhf.single_controller.ray import processes
from jaxrlhf.single_controller.ray.cluster import connect, disconnect, environment
from jaxrlhf.single_controller.ray.failure import (
    HostClosed,
    HostDied,
    HostFailure,
    HostHung,
    HostId,
    HostNotStarted,
    may_have_lost_peer,
)
from jaxrlhf.single_controller.ray.processes import HostProcesses
from jaxrlhf.single_controller.ray_backend import launch_on_ray

pytestmark = pytest.mark.slow

CLUSTER = RayCluster(devices_per_host=2, platform="cpu", call_timeout_s=60.0)


@pytest.fixture(scope="module")
def connection():
    connection = connect(CLUSTER)
    yield connection
    disconnect(connection)


@pytest.fixture(scope="module")
def logs(tmp_path_factory):
    return tmp_path_factory.mktemp("logs")


@pytest.fixture(scope="module")
def world(connection, logs):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JAX_NUMPY_RANK_PROMOTION", "raise")  # JAX reads it when it is imported
        patch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=8")  # for the controller only
        world = HostProcesses("models", ray_world.World, hosts=2, cluster=CLUSTER, log_directory=logs)
    yield world
    world.close()


def results(world, method, *args, **kwargs):
    return [stored.load() for stored in world.call(method, *args, label=f"world.{method}", **kwargs)]


def test_connection_describes_the_cluster(connection):
    assert connection.nodes == 1
    assert connection.owned
    assert connection.dashboard.startswith("http://") or "pip install 'ray[default]'" in connection.dashboard
    again = connect(CLUSTER)
    assert (again.address, again.owned) == (connection.address, False)
    disconnect(again)  # not its own: the cluster stays up for the tests below


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({}, "requires a token; set RAY_AUTH_MODE=token"),
        ({"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "0" * 64}, "requires a token"),
        ({"RAY_AUTH_MODE": "token"}, "connected"),
    ],
)
def test_local_cluster_requires_a_token(connection, changes, says):
    program = f"""
from jaxrlhf.config import RayCluster, Refusal
from jaxrlhf.single_controller.ray.cluster import connect
try:
    connect(RayCluster(address={connection.address!r}))
    print("connected")
except Refusal as refusal:
    print(refusal)
"""
    unset = {name: value for name, value in os.environ.items() if not name.startswith("RAY_AUTH")}
    ran = subprocess.run(
        [sys.executable, "-c", program], env=unset | changes, capture_output=True, text=True, timeout=60
    )
    assert says in ran.stdout, ran.stderr


def test_without_ray_its_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ValueError, match=r"Ray, which is not installed: pip install 'jaxrlhf\[ray\]'"):
        launch_on_ray(get_config(), CLUSTER, progress=lambda *_: None, workdir=None)


def test_call_after_disconnect_starts_no_cluster():
    code = "from jaxrlhf.single_controller.ray.cluster import _ray; _ray().put(1)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode and "Ray has not been started yet" in done.stderr


def test_hosts_are_one_jax_world(world):
    assert results(world, "total") == [1 + 2 + 3 + 4] * 2
    facts = results(world, "facts")
    assert [fact["rank"] for fact in facts] == [(0, 0), (1, 1)]
    assert [fact["hosts"] for fact in facts] == [(2, 2)] * 2
    assert [host.rank for host in world.hosts] == [0, 1]


def test_ranks_of_hosts_are_jaxs(connection, tmp_path, monkeypatch):
    monkeypatch.setattr(processes, "HostProcess", ray_world.Reversed)
    with closing(HostProcesses("slice", ray_world.World, hosts=2, cluster=CLUSTER, log_directory=tmp_path)) as slice_:
        facts = results(slice_, "facts")
        assert [fact["rank"] for fact in facts] == [(0, 0), (1, 1)]
        for rank, (host, fact) in enumerate(zip(slice_.hosts, facts, strict=True)):
            assert (host.rank, host.pid) == (rank, fact["pid"])
            results(slice_, "write", "this")
            log = (tmp_path / f"slice-{rank}.log").read_text()
            own = log.rpartition(f"== host {rank} of pool 'slice' ({host.node_ip}, pid {host.pid})")[2]
            assert "printed this" in own.splitlines()


def test_environment_is_set_before_jax_starts(world):
    for fact in results(world, "facts"):
        assert fact["devices"] == (4, 2, "cpu")
        assert fact["rank_promotion"] == "raise"
        assert fact["threads"] == "32"
        assert fact["directory"] == os.getcwd()


def test_hosts_have_normal_priority(world):
    assert [fact["niceness"] for fact in results(world, "facts")] == [os.nice(0)] * 2


def test_recorded_environment_has_no_secrets(connection, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    monkeypatch.setenv("HF_HOME", "/models")
    variables = environment(CLUSTER)
    assert variables["HF_HOME"] == "/models"
    assert "hf_secret" not in str(variables)


def test_printed_output_of_hosts_is_logged(world, logs):
    results(world, "write", "this")
    for rank, host in enumerate(world.hosts):
        log = (logs / f"models-{rank}.log").read_text()
        assert log.startswith(f"== host {rank} of pool 'models' ({host.node_ip}, pid {host.pid})")
        assert {"printed this", "complained this", "written this"} <= set(log.splitlines())


@pytest.fixture
def passing(monkeypatch):
    """Array bytes that this process receives from Ray and sends to Ray."""
    return ray_world.traffic(monkeypatch.setattr)


def test_results_are_sent_from_host_to_host(world, passing):
    count = 16 << 20
    memory = ray_world.resident_bytes()
    ramps = world.call("ramp", count, label="world.ramp")
    sums = world.call("sums", ramps[0], ramps, label="world.sums")
    # Both arrays have reached both hosts, and neither has reached this process.
    assert passing == {"get": 0, "put": 0}
    assert ray_world.resident_bytes() - memory < count
    expected = [float((np.arange(count, dtype=np.float32) + rank).sum()) for rank in (0, 1)]
    for stored in sums:
        result = stored.load()
        assert (result["one"], result["many"]) == (expected[0], expected)
        assert not result["writeable"]


def test_arguments_are_sent_once_and_loaded_by_each_host(world, passing):
    array = np.ones(1 << 20, np.uint8)
    [(first, nested), _] = results(world, "echo", array, {"deep": [array, (array,)]})
    assert first.sum() == nested["deep"][1][0].sum() == 1 << 20
    assert passing["put"] == 1 << 20  # once, not for each host
    assert passing["get"] == 2 << 20  # from each host


def test_calls_of_several_threads_overlap(world):
    stored = []
    thread = threading.Thread(target=lambda: stored.extend(world.call("sleep", 1.5, label="reward.compute")))
    thread.start()
    time.sleep(0.5)
    world.call("echo", 1, label="world.echo")
    statuses = world._activities()
    assert thread.is_alive(), "the calls came one after the other"
    thread.join()
    for [activity] in statuses:
        assert activity.label == "reward.compute"
        assert activity.running_s > 0.2
        assert "time.sleep(seconds)" in activity.stack
        assert not activity.in_jax


def test_close_ends_calls_of_other_threads(connection, tmp_path):
    world = HostProcesses("closed", ray_world.World, hosts=1, cluster=CLUSTER, log_directory=tmp_path)
    heard = []

    def wait():
        with pytest.raises(HostClosed, match=r"reward\.compute: pool 'closed' was closed by its owner") as info:
            world.call("sleep", 1000.0, label="reward.compute")
        heard.append((info.value, time.monotonic()))

    threads = [threading.Thread(target=wait), threading.Thread(target=wait)]
    for thread in threads:
        thread.start()
    time.sleep(0.5)  # until they wait
    threads += [threading.Thread(target=world.close) for _ in range(2)]
    start = time.monotonic()
    for thread in threads[2:]:
        thread.start()
    world.close()
    assert not ray_world.exists(world.hosts[0].pid)  # whichever of the three did it
    for thread in threads:
        thread.join(10)
    assert [ended_s - start < 1.5 for _, ended_s in heard] == [True, True]
    start = time.monotonic()
    world.close()
    with pytest.raises(HostClosed, match="was closed by its owner"):
        world.call("total", label="reward.total")
    assert time.monotonic() - start < 0.1


@pytest.mark.parametrize(
    ("platform", "hosts", "message"),
    [
        ("cpu", 100_000, "requires 100000 host processes with CPU 1 each; the cluster has CPU 256"),
        ("tpu", 1, "requires 1 host processes with CPU 1, TPU 2 each; the cluster has CPU 256, TPU 0"),
    ],
)
def test_missing_resources_are_refused_immediately(connection, tmp_path, platform, hosts, message):
    cluster = RayCluster(devices_per_host=2, platform=platform)
    ray.cluster_resources()  # the first question to a new cluster waits for the cluster, not for what is refused
    start = time.monotonic()
    with pytest.raises(HostNotStarted, match=message):
        HostProcesses("large", ray_world.World, hosts=hosts, cluster=cluster, log_directory=tmp_path)
    assert time.monotonic() - start < 5


@pytest.mark.parametrize("kind", [HostFailure, HostDied, HostHung, HostNotStarted])
def test_failures_pickle(kind):
    failure = kind(HostId("models", 1, "10.0.0.1", 7), "actor.update_actor", "died")
    copy = pickle.loads(pickle.dumps(failure))
    assert (type(copy), str(copy), copy.host) == (kind, str(failure), failure.host)
    assert isinstance(copy, HostFailure)


@pytest.mark.parametrize(
    ("error", "lost"),
    [
        (JaxRuntimeError("UNAVAILABLE: heartbeat timeout of task 1"), True),
        (JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory"), False),
        (ValueError("UNAVAILABLE: no"), False),
    ],
)
def test_lost_peer_is_distinguished_from_own_error(error, lost):
    wrapped = RuntimeError("could not save")
    wrapped.__cause__ = error
    assert may_have_lost_peer(error) == may_have_lost_peer(wrapped) == lost


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"address": "ray://head:10001"}, "Ray Client"),
        ({"address": "head"}, "host:port"),
        ({"devices_per_host": 0}, "above 0"),
        ({"call_timeout_s": float("inf")}, "finite"),
        ({"restarts": -1}, "0 or more"),
    ],
)
def test_invalid_settings_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        RayCluster(**settings)


@pytest.mark.parametrize("address", [None, "auto", "10.0.0.1:6379", "[fd00::1]:6379", "head.example.org:6379"])
def test_valid_addresses_are_accepted(address):
    assert RayCluster(address=address).address == address

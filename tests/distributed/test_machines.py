"""Host processes on a cluster of several machines, simulated by several Ray nodes on one machine."""

import os
import time
from contextlib import closing
from functools import partial

import pytest
import ray
import ray_world
from ray.cluster_utils import Cluster

from jaxrlhf.config import RayCluster
from jaxrlhf.single_controller.ray import processes
from jaxrlhf.single_controller.ray.cluster import connect, disconnect, platform
from jaxrlhf.single_controller.ray.failure import HostDied, HostHung, HostId, HostNotStarted
from jaxrlhf.single_controller.ray.processes import HostProcesses

NODES = 3


class Placed(ray_world.World):
    """Host that also returns its machine."""

    def node(self) -> str:
        return ray.get_runtime_context().get_node_id()

    def variables(self) -> dict:
        return dict(os.environ)


@pytest.fixture(scope="module")
def machines():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        machines = Cluster(initialize_head=True, head_node_args={"num_cpus": 0})
        nodes = [
            machines.add_node(num_cpus=4, num_gpus=4, env_vars={"TPU_WORKER_ID": str(NODES - 1 - index)})
            for index in range(NODES)
        ]
        yield machines, nodes
        machines.shutdown()


@pytest.fixture(scope="module")
def cluster(machines):
    cluster = RayCluster(address=machines[0].address, platform="cpu", start_timeout_s=60.0, call_timeout_s=60.0)
    connection = connect(cluster)
    assert connection.nodes == NODES + 1
    yield cluster
    disconnect(connection)


def results(pool, method):
    return [stored.load() for stored in pool.call(method, label=f"placed.{method}")]


@pytest.mark.slow
def test_hosts_are_spread_over_machines(cluster, tmp_path):
    start = partial(HostProcesses, factory=Placed, cluster=cluster, log_directory=tmp_path)
    with closing(start("one", hosts=1)) as one, closing(start("two", hosts=2)) as two:
        assert len({*results(one, "node"), *results(two, "node")}) == NODES
        assert results(two, "total") == [3.0, 3.0]
        # A TPU slice has its own idea of who is first, and JAX follows it.
        environments = results(two, "variables")
        workers = [int(variables["TPU_WORKER_ID"]) for variables in environments]
        assert workers == sorted(workers)
        assert {variables["JAX_PLATFORMS"] for variables in environments} == {"cpu"}


@pytest.mark.seeds
def test_more_hosts_than_machines(cluster, tmp_path):
    with closing(HostProcesses("many", Placed, hosts=NODES + 1, cluster=cluster, log_directory=tmp_path)) as pool:
        assert len(set(results(pool, "node"))) == NODES


@pytest.mark.slow
def test_accelerators_are_ray_resources(cluster, tmp_path):
    gpus = RayCluster(address=cluster.address, devices_per_host=2)
    assert platform(gpus) == "cuda"
    with closing(HostProcesses("gpus", Placed, hosts=1, cluster=gpus, log_directory=tmp_path)) as pool:
        [variables] = results(pool, "variables")
    assert len(variables["CUDA_VISIBLE_DEVICES"].split(",")) == 2
    assert variables["JAX_PLATFORMS"] == "cuda,cpu"


@pytest.mark.seeds
def test_stopped_host_is_found_and_ended(cluster, tmp_path, monkeypatch):
    pool = HostProcesses("far", Placed, hosts=2, cluster=cluster, log_directory=tmp_path)
    pids = [host.pid for host in pool.hosts]
    # As if they were on machines whose processes cannot be seen from here.
    monkeypatch.setattr(pool, "_hosts", [HostId("far", rank, "203.0.113.1", pid) for rank, pid in enumerate(pids)])
    start = time.monotonic()
    with pytest.raises(HostHung, match="does not report its calls") as info:
        pool.call("strike", 1, "be_stopped", label="placed.strike", timeout_s=1.0)
    assert info.value.host == pool.hosts[1]
    assert 8 < time.monotonic() - start < 20  # 1 s for the call, 3 s for a word, and Ray takes 5 s to kill it
    limit = time.monotonic() + 10  # a process that let go of everything is listed until its end is awaited
    while any(map(ray_world.exists, pids)) and time.monotonic() < limit:
        time.sleep(0.1)
    assert not any(map(ray_world.exists, pids))


@pytest.mark.seeds
def test_missing_resources_of_a_growing_cluster_are_awaited(cluster, tmp_path):
    large = RayCluster(address=cluster.address, devices_per_host=8, platform="cuda", start_timeout_s=1.0)
    message = (
        r"requires 1 host processes with CPU 1, GPU 8 each; the cluster has CPU 12, GPU 12, .* became free within 1 s"
    )
    with pytest.raises(HostNotStarted, match=message):
        HostProcesses("large", Placed, hosts=1, cluster=large, log_directory=tmp_path)


@pytest.mark.slow
def test_lost_machine_ends_the_pool(machines, cluster, tmp_path, monkeypatch):
    monkeypatch.setattr(processes, "END_S", 1.0)  # Ray gives up the room on it only when several heartbeats are missing
    pool = HostProcesses("doomed", Placed, hosts=2, cluster=cluster, log_directory=tmp_path)
    lost = results(pool, "node")[1]
    machines[0].remove_node(next(node for node in machines[1] if node.node_id == lost), allow_graceful=False)
    start = time.monotonic()
    with pytest.raises(HostDied) as info:
        pool.call("total", label="placed.total")
    assert time.monotonic() - start < 45
    assert info.value.host == pool.hosts[1]

"""Pools on the hosts of a Ray cluster: one process per host, one JAX distributed world per pool.

Ray launches the processes, carries control messages and object references, and reports dead hosts. The result of a
worker method stays in the object store of the host that made it. A group that takes the result as an argument fetches
it from there, not through the controller.
"""

import math
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax

from jaxrlhf.batching.transfer_protocol import PROTOCOLS, RemoteValue, join
from jaxrlhf.config import ROLLOUT, Config, Pool, RayCluster, Refusal
from jaxrlhf.config.cli.load import loaded
from jaxrlhf.config.roles import REWARD
from jaxrlhf.models import tokenizer_of
from jaxrlhf.runtime import compilation_cache
from jaxrlhf.sharding.pool import ResourcePool
from jaxrlhf.single_controller.group import RunOnRanks
from jaxrlhf.single_controller.host import Host
from jaxrlhf.single_controller.pools import REWARD_OUTPUT, Pools, Ranks, placed
from jaxrlhf.single_controller.ray.cluster import Connection, connect, disconnect
from jaxrlhf.single_controller.ray.failure import HostDied, HostFailure, HostHung, HostNotStarted
from jaxrlhf.single_controller.ray.processes import HostProcesses
from jaxrlhf.single_controller.ray.stored import Stored, keep_images_in_store, register_image_handles
from jaxrlhf.tracking import say
from jaxrlhf.workers.build import Builder, Phase
from jaxrlhf.workers.model import Progress
from jaxrlhf.workers.summary import SummaryRow

LOGS = "hosts"
"""Folder of the workdir with the printed output of each host and its reward functions."""

PROGRESS_S = 1.0
"""Seconds between two polls of a host's progress."""


@dataclass(frozen=True)
class Gathered(RemoteValue):
    """Remote result of a call: handles of the leading ranks' results, in the hosts' object stores.

    Attributes:
      parts: Results in the order of the ranks.
      protocol: Name of the protocol that collects them.
    """

    parts: tuple[Stored, ...]
    protocol: str

    @property
    def rows(self) -> int | None:
        counts = [part.rows for part in self.parts]
        known = [count for count in counts if count is not None]
        return sum(known) if len(known) == len(counts) and PROTOCOLS[self.protocol].collect is join else None

    def load(self) -> Any:
        return PROTOCOLS[self.protocol].collect([part.load() for part in self.parts])

    def load_rows(self, start: int, stop: int) -> Any:
        """Load a range of rows; only parts with such rows are transferred."""
        rows, first = [], 0
        for part in self.parts:
            assert part.rows is not None, "the number of rows must be known for every part"
            last = first + part.rows
            if first < stop and start < last:
                cut = slice(max(start - first, 0), min(stop, last) - first)
                rows.append(jax.tree.map(lambda leaf, cut=cut: leaf[cut], part.load()))
            first = last
        return join(rows)


STATELESS = {ROLLOUT, REWARD.name}
"""Roles without state in a checkpoint; a pool with only these roles can be relaunched by itself."""


class RayRanks(Ranks):
    """Processes of one pool on a Ray cluster.

    Args:
      launch: Function of `hosts` that starts that number of processes.
      hosts: Number of processes; a relaunch starts fewer if the cluster lacks resources for all.
      multiple: Factor of the number of processes if there are fewer than `hosts`.
      relaunches: Number of times that the pool may be started again while other pools continue.
    """

    def __init__(
        self,
        name: str,
        launch: Callable[..., HostProcesses],
        progress: Progress,
        *,
        hosts: int,
        multiple: int = 1,
        relaunches: int = 0,
    ) -> None:
        super().__init__(name)
        self._launch, self._progress, self._relaunches = launch, progress, relaunches
        self._hosts, self._multiple = hosts, multiple
        self._processes, self._relaunching = launch(hosts=hosts), threading.RLock()
        self._phase: Phase | None = None
        self._closed = False

    def build(self, phase: Phase) -> None:
        self._phase = phase
        try:
            super().build(phase)
        except (HostDied, HostHung) as failed:
            if not self.relaunch(failed):
                raise

    def on_all(self, method: str, *args: Any) -> list[Any]:
        label = ".".join(args[:2]) if method == "item" else f"{self.name}.{method}"  # such as critic_optimizer.save
        return [result.load() for result in self._processes.call(method, *args, label=label)]

    def relaunch(self, failed: HostFailure) -> bool:
        with self._relaunching:
            if failed.host not in self._processes.hosts:
                return True  # another thread has relaunched the pool
            if not self._relaunches:
                return False
            self._relaunches -= 1
            say(f"{failed}\nrelaunching pool {self.name!r}; {self._relaunches} more relaunches are allowed")
            self._processes.close()
            self._processes = self._relaunched()
            if self._closed:  # another thread closed the pool meanwhile
                self._processes.close()
                return False
            if self._phase is not None:
                super().build(self._phase)
            return True

    def _relaunched(self) -> HostProcesses:
        """Launch as many processes as at the start, or fewer if the cluster lacks resources for all."""
        hosts = self._hosts
        while True:
            try:
                return self._launch(hosts=hosts)
            except HostNotStarted as failed:
                fewer = (hosts - 1) // self._multiple * self._multiple
                if self._closed or not fewer:
                    raise
                say(f"{failed}\nrelaunching pool {self.name!r} with {fewer} of {self._hosts} hosts")
                hosts = fewer

    def call(self, role: str, method: str, args: tuple[object, ...], kwargs: Mapping[str, object]) -> object:
        return self.as_launched()(role, method, args, kwargs)

    def as_launched(self) -> RunOnRanks:
        with self._relaunching:  # wait until a relaunch has built its workers
            return partial(self._call, self._processes)

    def _call(
        self,
        processes: HostProcesses,
        role: str,
        method: str,
        args: tuple[object, ...],
        kwargs: Mapping[str, object],
    ) -> Gathered:
        protocol = self.protocols[role][method]
        with self._polled_progress():
            results = processes.call("call", role, method, args, kwargs, label=f"{role}.{method}")
        places = [built.places[role] for built in self.built]
        leading = [result for result, place in zip(results, places, strict=True) if protocol.leads(place)]
        return Gathered(tuple(leading), protocol.name)

    @contextmanager
    def _polled_progress(self) -> Iterator[None]:
        """Report the first host's progress within the block."""
        done = threading.Event()

        def poll() -> None:
            shown = None
            while not done.wait(PROGRESS_S):
                progress = self._processes.peek("progress")
                if progress is not None and progress.latest != shown:
                    shown = progress.latest
                    self._progress(*shown)

        polling = threading.Thread(target=poll, name=f"progress of {self.name}", daemon=True)
        polling.start()
        try:
            yield
        finally:
            done.set()
            polling.join()

    def close(self) -> None:
        self._closed = True
        self._processes.close()


class LatestProgress:
    """Latest progress of a host's calls, polled by the controller."""

    def __init__(self) -> None:
        self.latest: tuple[str, int, int] | None = None

    def __call__(self, phase: str, done: int, total: int) -> None:
        self.latest = (phase, done, total)


def make_host(rank: int, hosts: int, *, config: Config, pool: Pool, output: Path | None) -> Host:
    """Make the `Host` of one process; runs in that process after it has joined the pool's other processes."""
    import ray

    compilation_cache.turn_on()
    register_image_handles()
    keep_images_in_store()
    reward_output = None if output is None else output.with_name(f"{pool.name}-{rank}-{output.name}")
    builder = Builder(
        config,
        tokenizer_of(config),
        ResourcePool(pool.name, tuple(sorted(jax.devices(), key=lambda device: device.process_index))),
        pool.roles,
        rank=(rank, hosts),
        progress=LatestProgress(),
        reward_output=reward_output,
        address=ray.util.get_node_ip_address(),
    )
    return Host(builder)


class RayPools(Pools):
    """Pools of a run on a cluster; `close` also closes `after`, which holds the connection and a temporary folder."""

    def __init__(self, pools: Sequence[Ranks], connection: Connection, after: ExitStack) -> None:
        super().__init__(pools)
        self._connection, self._after = connection, after

    def rows(self) -> list[SummaryRow]:
        machines = f"{self._connection.nodes} machine{'s' * (self._connection.nodes > 1)}"
        where = f"{machines}; dashboard: {self._connection.dashboard}"
        return [("cluster", "Ray", self._connection.address, where), *super().rows()]

    def close(self) -> None:
        with self._after:
            super().close()


def carry_configuration_files() -> None:
    """Make Ray send classes of configuration files, such as algorithms, by value: hosts cannot import these files."""
    from ray import cloudpickle

    for module in loaded():
        cloudpickle.register_pickle_by_value(module)


def launch_on_ray(config: Config, cluster: RayCluster, *, progress: Progress, workdir: Path | None) -> Pools:
    """Connect to the cluster and start the host processes of every pool.

    Raises:
      Refusal: A pool's devices are not a whole number of hosts, or no cluster answers.
      HostFailure: A host did not start.
    """
    # The controller computes almost nothing, and must not take an accelerator from a host.
    jax.config.update("jax_platforms", "cpu")
    connection = connect(cluster)
    after = ExitStack()
    after.callback(disconnect, connection)
    ranks: list[Ranks] = []
    try:
        carry_configuration_files()
        register_image_handles()
        folder = workdir or Path(after.enter_context(tempfile.TemporaryDirectory(prefix="jaxrlhf-")))
        output = None if workdir is None else workdir.absolute() / LOGS / REWARD_OUTPUT
        for pool in _pools_of_hosts(config, cluster, machines=connection.nodes):
            start = partial(
                HostProcesses,
                pool.name,
                partial(make_host, config=config, pool=pool, output=output),
                cluster=cluster,
                log_directory=folder / LOGS,
            )
            relaunches = cluster.restarts if STATELESS.issuperset(pool.roles) else 0
            replica = config.actor.layout.replica_devices  # the hosts of a rollout pool hold whole replicas
            sizes = {
                "hosts": pool.devices // cluster.devices_per_host,
                "multiple": replica // math.gcd(replica, cluster.devices_per_host),
            }
            ranks.append(RayRanks(pool.name, start, progress, relaunches=relaunches, **sizes))
    except BaseException:
        RayPools(ranks, connection, after).close()
        raise
    return RayPools(ranks, connection, after)


def _pools_of_hosts(config: Config, cluster: RayCluster, *, machines: int) -> list[Pool]:
    """Return the pools, each with a whole number of hosts; a single pool of all devices has a host on each machine."""
    pools = placed(config, devices=cluster.devices_per_host * machines)
    for pool in pools:
        if pool.devices % cluster.devices_per_host:
            raise Refusal(
                f"pool {pool.name!r} has {pool.devices} devices, not a multiple of "
                f"cluster.devices_per_host={cluster.devices_per_host}; change one of them"
            )
    return pools

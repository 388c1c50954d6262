"""Pools of a run on the hosts of a Ray cluster: one process a host, one JAX world a pool.

Ray launches the processes, carries control messages and object references, and tells when a
host is gone. A worker method's result stays in the object store of the host that made it; a group
that takes it as an argument fetches it from there, not through the controller.
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
from jaxrlhf.single_controller.ray.stored import Stored, hand_on_images, store_images
from jaxrlhf.tracking import default_console
from jaxrlhf.workers.build import Builder, Phase
from jaxrlhf.workers.model import Progress
from jaxrlhf.workers.summary import SummaryRow

LOGS = "hosts"
"""Folder of the workdir with what each host and its reward functions print."""

PROGRESS_S = 1.0
"""Seconds between two looks at a host's progress."""


@dataclass(frozen=True)
class Gathered(RemoteValue):
    """Results of a call's leading ranks, where they left them.

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
        """The rows, of which only those parts travel that have some."""
        found, first = [], 0
        for part in self.parts:
            assert part.rows is not None, "only where the rows of every part are known"
            last = first + part.rows
            if first < stop and start < last:
                cut = slice(max(start - first, 0), min(stop, last) - first)
                found.append(jax.tree.map(lambda leaf, cut=cut: leaf[cut], part.load()))
            first = last
        return join(found)


STATELESS = {ROLLOUT, REWARD.name}
"""Roles that have nothing that a checkpoint keeps: a pool of these is launched anew by itself."""


class RayRanks(Ranks):
    """A pool of host processes.

    Args:
      launch: Starts as many processes as its `hosts` says.
      hosts: Number of the processes; after a relaunch fewer, where there is no room for all.
      multiple: Fewer than all are a multiple of this.
      relaunches: Times that they may be started again while other pools go on.
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
        self._most, self._multiple = hosts, multiple
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
        label = ".".join(args[:2]) if method == "item" else f"{self.name}.{method}"  # as in critic_optimizer.save
        return [result.load() for result in self._processes.call(method, *args, label=label)]

    def relaunch(self, failed: HostFailure) -> bool:
        with self._relaunching:
            if failed.host not in self._processes.hosts:
                return True  # another thread has done it
            if not self._relaunches:
                return False
            self._relaunches -= 1
            text = f"{failed}\nlaunching pool {self.name!r} anew; {self._relaunches} more would be allowed"
            default_console().print(text, markup=False, highlight=False, soft_wrap=True)
            self._processes.close()
            self._processes = self._launched_again()
            if self._closed:  # meanwhile, by another thread
                self._processes.close()
                return False
            if self._phase is not None:
                super().build(self._phase)
            return True

    def _launched_again(self) -> HostProcesses:
        """Processes as at the start, or fewer where there is no room for those in time."""
        hosts = self._most
        while True:
            try:
                return self._launch(hosts=hosts)
            except HostNotStarted as failed:
                fewer = (hosts - 1) // self._multiple * self._multiple
                if self._closed or not fewer:
                    raise
                text = f"{failed}\nlaunching pool {self.name!r} with {fewer} hosts of {self._most}"
                default_console().print(text, markup=False, highlight=False, soft_wrap=True)
                hosts = fewer

    def call(self, role: str, method: str, args: tuple[object, ...], kwargs: Mapping[str, object]) -> object:
        return self.as_launched()(role, method, args, kwargs)

    def as_launched(self) -> RunOnRanks:
        with self._relaunching:  # the workers of a launch are there when it ends
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
        with self._showing_progress():
            results = processes.call("call", role, method, args, kwargs, label=f"{role}.{method}")
        places = [built.places[role] for built in self.built]
        leading = [result for result, place in zip(results, places, strict=True) if protocol.leads(place)]
        return Gathered(tuple(leading), protocol.name)

    @contextmanager
    def _showing_progress(self) -> Iterator[None]:
        """Pass on the first host's progress within the block."""
        done = threading.Event()

        def ask() -> None:
            shown = None
            while not done.wait(PROGRESS_S):
                latest = self._processes.peek("progress")
                if latest is not None and latest.latest != shown:
                    shown = latest.latest
                    self._progress(*shown)

        asking = threading.Thread(target=ask, name=f"progress of {self.name}", daemon=True)
        asking.start()
        try:
            yield
        finally:
            done.set()
            asking.join()

    def close(self) -> None:
        self._closed = True
        self._processes.close()


class LatestProgress:
    """Progress of a host's calls, for the controller to ask."""

    def __init__(self) -> None:
        self.latest: tuple[str, int, int] | None = None

    def __call__(self, phase: str, done: int, total: int) -> None:
        self.latest = (phase, done, total)


def make_host(rank: int, hosts: int, *, config: Config, pool: Pool, output: Path | None) -> Host:
    """The host object of one process; runs there, after it has joined the others."""
    import ray

    compilation_cache.turn_on()
    hand_on_images()
    store_images()
    own = None if output is None else output.with_name(f"{pool.name}-{rank}-{output.name}")
    builder = Builder(
        config,
        tokenizer_of(config),
        ResourcePool(pool.name, tuple(sorted(jax.devices(), key=lambda device: device.process_index))),
        pool.roles,
        rank=(rank, hosts),
        progress=LatestProgress(),
        reward_output=own,
        address=ray.util.get_node_ip_address(),
    )
    return Host(builder)


class RayPools(Pools):
    """The pools of a run on a cluster; the connection to it ends with them, and what `after` holds."""

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
    """Have classes of configuration files, such as algorithms, sent to hosts whole: they cannot import them."""
    from ray import cloudpickle

    for module in loaded():
        cloudpickle.register_pickle_by_value(module)


def launch_on_ray(config: Config, cluster: RayCluster, *, progress: Progress, workdir: Path | None) -> Pools:
    """Start the host processes of every pool.

    Raises:
      Refusal: A pool's devices are no whole number of hosts, or no cluster answers.
      HostFailure: A host did not start.
    """
    # The controller computes next to nothing, and must not take an accelerator from a host.
    jax.config.update("jax_platforms", "cpu")
    connection = connect(cluster)
    after = ExitStack()
    after.callback(disconnect, connection)
    ranks: list[Ranks] = []
    try:
        carry_configuration_files()
        hand_on_images()
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
            replica = config.actor.layout.replica_devices  # hosts of those that generate hold whole ones
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
    """The pools, each of a whole number of hosts; one that takes all devices has a host on each machine."""
    pools = placed(config, devices=cluster.devices_per_host * machines)
    for pool in pools:
        if pool.devices % cluster.devices_per_host:
            raise Refusal(
                f"pool {pool.name!r} has {pool.devices} devices and a host {cluster.devices_per_host}; "
                f"give it a multiple, or change cluster.devices_per_host"
            )
    return pools

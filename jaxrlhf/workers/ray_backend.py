"""The pools of a run on the hosts of a Ray cluster: one process a host, one JAX world a pool.

Ray launches the processes, carries control messages and object references, and tells when a
host is gone. What a verb returns stays in the object store of the host that made it; a group
that takes it as an argument fetches it from there, not through the controller.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from jaxrlhf.config import Config, Pool, RayCluster
from jaxrlhf.data import load_tokenizer
from jaxrlhf.parallel import ResourcePool
from jaxrlhf.workers.build import tokenizer_path
from jaxrlhf.workers.group import Remote
from jaxrlhf.workers.host import Host
from jaxrlhf.workers.launch import placed
from jaxrlhf.workers.model import Progress
from jaxrlhf.workers.pools import Pools, Ranks
from jaxrlhf.workers.protocol import PROTOCOLS, Place, verbs_of
from jaxrlhf.workers.ray_processes import HostProcesses, Stored, connect
from jaxrlhf.workers.roles import WORKERS


@dataclass(frozen=True)
class Gathered(Remote):
    """What the leading ranks of a call returned, where they left it.

    Attributes:
      parts: One of each leading rank, in their order.
      protocol: Name of the protocol that collects them.
    """

    parts: tuple[Stored, ...]
    protocol: str

    def load(self) -> Any:
        return PROTOCOLS[self.protocol].collect([part.load() for part in self.parts])


class RayRanks(Ranks):
    """A pool of host processes."""

    def __init__(self, name: str, roles: Sequence[str], processes: HostProcesses) -> None:
        super().__init__(name, roles)
        self._processes = processes

    def on_all(self, method: str, *args: Any) -> list[Any]:
        stored = self._processes.call(method, *args, label=f"{self.name}.{method}")
        return [result.load() for result in stored]

    def call(self, role: str, verb: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Gathered:
        protocol = verbs_of(WORKERS[role])[verb]
        results = self._processes.call("call", role, verb, args, kwargs, label=f"{role}.{verb}")
        places: list[Place] = [built.places[role] for built in self.built]
        leading = [result for result, place in zip(results, places, strict=True) if protocol.leads(place)]
        return Gathered(tuple(leading), protocol.name)

    def close(self) -> None:
        self._processes.close()


class HostProgress:
    """The latest progress of a host's calls, for whoever asks."""

    def __init__(self) -> None:
        self.latest: tuple[str, int, int] | None = None

    def __call__(self, phase: str, done: int, total: int) -> None:
        self.latest = (phase, done, total)


def make_host(rank: int, hosts: int, *, config: Config, pool: Pool, output: Path | None) -> Host:
    """The host object of one process; runs there, after it has joined the others."""
    tokenizer = load_tokenizer(tokenizer_path(config))
    own = None if output is None else output.with_name(f"{output.stem}-{pool.name}-{rank}{output.suffix}")
    return Host(
        config,
        tokenizer,
        ResourcePool(pool.name, tuple(jax.devices())),
        pool.roles,
        rank=(rank, hosts),
        progress=HostProgress(),
        reward_output=own,
    )


def launch_on_ray(config: Config, cluster: RayCluster, *, progress: Progress, workdir: Path | None) -> Pools:
    """Start the host processes of every pool.

    Raises:
      ValueError: A pool's devices are no whole number of hosts.
      HostFailure: A host did not start.
    """
    pools = placed(config, devices=cluster.devices_per_host)
    for pool in pools:
        if pool.devices % cluster.devices_per_host:
            raise ValueError(
                f"pool {pool.name!r} has {pool.devices} devices and a host {cluster.devices_per_host}; "
                f"give it a multiple, or change cluster.devices_per_host"
            )
    # The controller holds no arrays worth an accelerator, and must not take one from the hosts.
    jax.config.update("jax_platforms", "cpu")
    connection = connect(cluster)
    ...

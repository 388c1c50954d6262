"""Pools of devices, the processes on them, and the roles that a dataflow calls.

`Ranks` are the processes of one pool: `LocalRanks` in this process, `RayRanks` of `ray_backend` on a cluster.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from copy import copy
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import jax

from jaxrlhf.batching.transfer_protocol import TransferProtocol, worker_methods
from jaxrlhf.checkpoint import Item
from jaxrlhf.config import ROLLOUT, Config, Pool
from jaxrlhf.single_controller.group import ActorWithRolloutPool, DeviceQueue, Group, RunOnRanks, Timeline
from jaxrlhf.single_controller.host import Built, Host
from jaxrlhf.single_controller.ray.failure import HostDied, HostFailure, HostHung
from jaxrlhf.tracking import ON_HOST
from jaxrlhf.workers.actor import Actor
from jaxrlhf.workers.build import Phase
from jaxrlhf.workers.critic import Critic
from jaxrlhf.workers.model import Metrics
from jaxrlhf.workers.process_reward import ProcessReward
from jaxrlhf.workers.reference import Reference
from jaxrlhf.workers.reward import Reward
from jaxrlhf.workers.summary import SummaryRow

REWARD_OUTPUT = "reward_output.log"
"""File of the workdir with the printed output of reward functions."""


class Ranks(ABC):
    """Processes of one pool.

    Attributes:
      built: Workers of each rank in the current phase.
      protocols: Transfer protocol of each worker method, by role and method.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.built: list[Built] = []
        self.protocols: dict[str, dict[str, TransferProtocol]] = {}

    @abstractmethod
    def on_all(self, method: str, *args: Any) -> list[Any]:
        """Run a method of `Host` on every rank; return one result per rank."""

    @abstractmethod
    def call(self, role: str, method: str, args: tuple[object, ...], kwargs: Mapping[str, object]) -> object:
        """Run a worker method on all ranks and collect the results, in this process or as a `RemoteValue`."""

    @abstractmethod
    def close(self) -> None:
        """End the processes."""

    def relaunch(self, failed: HostFailure) -> bool:
        """Relaunch failed processes with their workers; return False if that is not allowed."""
        return False

    def as_launched(self) -> RunOnRanks:
        """Return `call` bound to the current processes, not to processes of a later relaunch."""
        return self.call

    def build(self, phase: Phase) -> None:
        """Build the workers of a phase on every rank."""
        self.built = self.on_all("build", phase)
        declared = phase.config.all_roles
        self.protocols = {role: worker_methods(declared[role].worker_class) for role in self.built[0].places}


class LocalRanks(Ranks):
    """Pool in this process: a single rank, whose results are passed on without copies."""

    def __init__(self, host: Host) -> None:
        super().__init__(host.builder.on.pool.name)
        self._host = host

    def on_all(self, method: str, *args: Any) -> list[Any]:
        return [getattr(self._host, method)(*args)]

    def call(self, role: str, method: str, args: tuple[object, ...], kwargs: Mapping[str, object]) -> object:
        return self.protocols[role][method].collect([self._host.call(role, method, args, kwargs)])

    def close(self) -> None:
        self._host.close()


class PoolItem:
    """Checkpoint item whose arrays are on the ranks of a pool."""

    def __init__(self, ranks: Ranks, name: str) -> None:
        self._on_all = partial(ranks.on_all, "item", name)

    def describe(self) -> dict[str, str]:
        return self._on_all("describe")[0]

    def save(self, directory: Path) -> None:
        self._on_all("save", directory)

    def finish(self) -> None:
        self._on_all("finish")

    def merge(self) -> None:
        self._on_all("merge")

    def restore(self, directory: Path) -> None:
        self._on_all("restore", directory)


class Roles:
    """Roles that a dataflow calls, as attributes.

    For type checkers a role is its worker class, whose worker methods take and return futures. At run time a role is
    the `Group` of the workers on their pool. A role that the algorithm does not have is no attribute.

    Args:
      pools: Pools with the workers of the phase already built.
    """

    actor: Actor
    critic: Critic
    cost_critic: Critic
    reference: Reference
    process_reward: ProcessReward
    reward: Reward

    def __init__(self, pools: Sequence[Ranks], phase: Phase) -> None:
        self.timeline = Timeline()
        self._pools, self._on_hosts = pools, phase.config.cluster is not None
        self._queues: list[DeviceQueue] = []
        groups: dict[str, Group] = {}
        for ranks in pools:
            queue, host_queue = DeviceQueue(ranks.name, self.timeline), DeviceQueue(ON_HOST, self.timeline)
            self._queues += [queue, host_queue]
            for role in ranks.built[0].places:
                # Reward functions run concurrently with the models; a reward model runs on the devices.
                chosen = host_queue if role == "reward" and not phase.config.rewards.by_model else queue
                groups[role] = Group(role, ranks.protocols[role], ranks.call, chosen)
                if role == ROLLOUT:  # its next weights are fetched while it generates
                    fetches = DeviceQueue(ON_HOST, self.timeline)
                    self._queues.append(fetches)
                    fetch_group = partial(_group_as_launched, role, ranks, fetches)
        self._groups = sorted(groups)
        vars(self).update(groups)
        if ROLLOUT in groups:
            vars(self)["actor"] = ActorWithRolloutPool(groups["actor"], groups[ROLLOUT], fetch_group)

    if not TYPE_CHECKING:  # otherwise every misspelled role would have a type

        def __getattr__(self, role: str) -> NoReturn:
            groups = vars(self).get("_groups", [])
            raise AttributeError(
                f"this stage has no role {role!r}, as declared by the algorithm's roles; it has {groups}"
            )

    @property
    def generates_apart(self) -> bool:
        """True if a separate pool generates, on other devices than the actor's."""
        return isinstance(vars(self).get("actor"), ActorWithRolloutPool)

    def snapshot(self, *, waiting: int) -> "Roles":
        """Return these roles with an actor that generates with the current weights.

        See `ActorWithRolloutPool.snapshot`.
        """
        if not self.generates_apart:
            return self
        roles = copy(self)
        vars(roles)["actor"] = vars(self)["actor"].snapshot(waiting=waiting)
        return roles

    def relaunch(self, failed: HostFailure) -> bool:
        """Relaunch the failed host's pool if it only generates and scores, and send it the newest weights.

        Returns:
          False if the pool has state that only a checkpoint could restore, or has no relaunches left.
        """
        pool = next((ranks for ranks in self._pools if ranks.name == failed.host.pool), None)
        if pool is None or not pool.relaunch(failed):
            return False
        actor = vars(self).get("actor")
        if isinstance(actor, ActorWithRolloutPool):
            actor.send_again()
        return True

    def _on_all(self, ranks: Ranks, method: str, *args: Any) -> list[Any]:
        """Run a method of `Host` on every rank of a pool; after a failure, relaunch the pool if allowed and retry."""
        try:
            return ranks.on_all(method, *args)
        except (HostDied, HostHung) as failed:
            if not self.relaunch(failed):
                raise
            return ranks.on_all(method, *args)

    def items(self) -> dict[str, Item]:
        """Return the checkpoint items of all roles, by name."""
        return {name: PoolItem(ranks, name) for ranks in self._pools for name in ranks.built[0].items}

    def lowered(self) -> dict[str, jax.stages.Lowered]:
        """Return the programs that were lowered instead of run, for described devices; names are `role.program`."""
        return {name: program for ranks in self._pools for name, program in ranks.on_all("lowered")[0].items()}

    def counters(self) -> dict[str, int]:
        """Return the counters for a checkpoint: updates by role, the policy's version, and padded sizes for images."""
        return {name: count for ranks in self._pools for name, count in self._on_all(ranks, "counters")[0].items()}

    def set_counters(self, counters: Mapping[str, int]) -> None:
        """Continue from a checkpoint's counters."""
        for ranks in self._pools:
            self._on_all(ranks, "set_counters", dict(counters))

    def take_metrics(self) -> tuple[Metrics, dict[str, int]]:
        """Return the hosts' metrics since the last call, and peak device bytes by method; each is the largest value."""
        metrics: Metrics = {}
        peaks: dict[str, int] = {}
        for measured, bytes_by_method in (
            pair for ranks in self._pools for pair in self._on_all(ranks, "take_metrics")
        ):
            metrics |= {name: max(value, metrics.get(name, value)) for name, value in measured.items()}
            peaks |= {method: max(count, peaks.get(method, 0)) for method, count in bytes_by_method.items()}
        return metrics, peaks

    @contextmanager
    def profiled(self, folder: Path) -> Iterator[None]:
        """Profile every process and its devices within the block.

        Args:
          folder: Folder of the traces; hosts of a cluster write to subfolders named after pools, on their machines.
        """
        traced = [(self._pools[0], folder)]  # pools of this process share its trace
        if self._on_hosts:
            traced = [(ranks, folder.absolute() / ranks.name) for ranks in self._pools]
        for ranks, traces in traced:
            ranks.on_all("start_trace", traces)
        try:
            yield
        except BaseException:
            if not self._on_hosts:  # hosts end with the run, but this process continues
                self._pools[0].on_all("stop_trace")
            raise
        for ranks, _ in traced:
            ranks.on_all("stop_trace")

    def close(self, *, wait: bool = True) -> None:
        """End the threads of the queues, and wait for running calls; with `wait=False` the calls finish later."""
        for queue in self._queues:
            queue.close(wait=wait)


def _group_as_launched(role: str, ranks: Ranks, queue: DeviceQueue) -> Group:
    """Make the group of a role's workers on the current processes."""
    return Group(role, ranks.protocols[role], ranks.as_launched(), queue)


class Pools:
    """Launched pools of a run; the phases of the run use the pools one after another."""

    def __init__(self, pools: Sequence[Ranks]) -> None:
        self._pools = list(pools)

    def rows(self) -> list[SummaryRow]:
        """Return the pools' rows of the table of derived settings.

        Raises:
          Refusal: A pool cannot hold a layout or a token budget.
        """
        return [row for ranks in self._pools for row in ranks.on_all("rows")[0]]

    def roles(self, phase: Phase) -> Roles:
        """Build the workers of a phase; the workers of the previous phase are dropped."""
        for ranks in self._pools:
            ranks.build(phase)
        return Roles(self._pools, phase)

    def close(self) -> None:
        """End all processes and the running calls; further calls of `close` do nothing."""
        pools, self._pools = self._pools, []
        with ExitStack() as stack:
            for ranks in pools:
                stack.callback(ranks.close)


def placed(config: Config, *, devices: int) -> list[Pool]:
    """Return the pools, with every role assigned to a pool; without configured pools, one pool of all `devices`."""
    roles = tuple(dict.fromkeys((*config.roles, "reward")))
    if not config.pools:
        return [Pool("all", config.devices or devices, roles)]
    first, *rest = config.pools
    if not any("reward" in pool.roles for pool in config.pools):
        first = replace(first, roles=(*first.roles, "reward"))
    return [first, *rest]

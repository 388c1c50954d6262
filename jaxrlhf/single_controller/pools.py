"""Pools of devices, the processes on them, and the roles that a dataflow calls.

`Ranks` is one pool's processes: here those of this process, in `ray_backend` those of a cluster.
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
from jaxrlhf.single_controller.group import ActorApart, DeviceQueue, Group, RunOnRanks, Timeline
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
"""File of the workdir that takes what reward functions print."""


class Ranks(ABC):
    """The processes of one pool."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.built: list[Built] = []
        self.protocols: dict[str, dict[str, TransferProtocol]] = {}

    @abstractmethod
    def on_all(self, method: str, *args: Any) -> list[Any]:
        """Results of a method of `Host` on every rank."""

    @abstractmethod
    def call(self, role: str, method: str, args: tuple[object, ...], kwargs: Mapping[str, object]) -> object:
        """Run a worker method on all ranks and collect its results, here or as a `RemoteValue`."""

    @abstractmethod
    def close(self) -> None:
        """End the processes."""

    def relaunch(self, failed: HostFailure) -> bool:
        """Launch processes that failed anew, with the workers that they had; false if that may not be."""
        return False

    def as_launched(self) -> RunOnRanks:
        """A `call` on the processes that are there now, and on none that are launched in their place."""
        return self.call

    def build(self, phase: Phase) -> None:
        """Make the workers of a phase on every rank."""
        self.built = self.on_all("build", phase)
        declared = phase.config.all_roles
        self.protocols = {role: worker_methods(declared[role].worker_class) for role in self.built[0].places}


class LocalRanks(Ranks):
    """A pool of devices of this process: one rank, whose results are handed on as they are."""

    def __init__(self, host: Host) -> None:
        super().__init__(host.builder.pool.name)
        self._host = host

    def on_all(self, method: str, *args: Any) -> list[Any]:
        return [getattr(self._host, method)(*args)]

    def call(self, role: str, method: str, args: tuple[object, ...], kwargs: Mapping[str, object]) -> object:
        return self.protocols[role][method].collect([self._host.call(role, method, args, kwargs)])

    def close(self) -> None:
        self._host.close()


class PoolItem:
    """One item of a checkpoint, on the ranks of a pool."""

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
    """The roles that a dataflow calls.

    To type checkers a role is its worker, whose worker methods take and return futures; at run
    time it is the `Group` of that worker on its pool. A role that the algorithm does not have is missing.

    Args:
      pools: Pools with the workers of the phase built.
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
            queue, beside = DeviceQueue(ranks.name, self.timeline), DeviceQueue(ON_HOST, self.timeline)
            self._queues += [queue, beside]
            for role in ranks.built[0].places:
                # Functions score beside the models' work; a reward model computes on the pool's devices, in turn.
                chosen = beside if role == "reward" and not phase.config.rewards.by_model else queue
                groups[role] = Group(role, ranks.protocols[role], ranks.call, chosen)
                if role == ROLLOUT:  # whose next weights come while it draws
                    self._queues.append(DeviceQueue(ON_HOST, self.timeline))
                    fetching = partial(_group_as_launched, role, ranks, self._queues[-1])
        self._groups = sorted(groups)
        vars(self).update(groups)
        if ROLLOUT in groups:
            vars(self)["actor"] = ActorApart(groups["actor"], groups[ROLLOUT], fetching)

    if not TYPE_CHECKING:  # or every misspelt role would have a type

        def __getattr__(self, role: str) -> NoReturn:
            there = vars(self).get("_groups", [])
            raise AttributeError(f"this stage has no role {role!r}; it has {there}, as the algorithm's roles say")

    @property
    def generates_apart(self) -> bool:
        """True if other devices generate than those of the actor."""
        return isinstance(vars(self).get("actor"), ActorApart)

    def as_of_now(self, *, waiting: int) -> "Roles":
        """These roles, whose actor generates with the weights of this moment; see `ActorApart.as_of_now`."""
        if not self.generates_apart:
            return self
        roles = copy(self)
        vars(roles)["actor"] = vars(self)["actor"].as_of_now(waiting=waiting)
        return roles

    def relaunch(self, failed: HostFailure) -> bool:
        """Launch the pool whose host failed anew, if it only generates and scores, and send it the newest weights.

        Returns:
          False if it holds what only a checkpoint could give back, or was launched as often as it may be.
        """
        pool = next((ranks for ranks in self._pools if ranks.name == failed.host.pool), None)
        if pool is None or not pool.relaunch(failed):
            return False
        actor = vars(self).get("actor")
        if isinstance(actor, ActorApart):
            actor.send_again()
        return True

    def _on_all(self, ranks: Ranks, method: str, *args: Any) -> list[Any]:
        """Results of a method of `Host` on every rank, of a pool that is launched anew if it failed and may be."""
        try:
            return ranks.on_all(method, *args)
        except (HostDied, HostHung) as failed:
            if not self.relaunch(failed):
                raise
            return ranks.on_all(method, *args)

    def items(self) -> dict[str, Item]:
        """Every tree of arrays that a checkpoint of the run holds."""
        return {name: PoolItem(ranks, name) for ranks in self._pools for name in ranks.built[0].items}

    def lowered(self) -> dict[str, jax.stages.Lowered]:
        """Programs that were lowered instead of run, on devices that are not here; named `role.program`."""
        return {name: program for ranks in self._pools for name, program in ranks.on_all("lowered")[0].items()}

    def counters(self) -> dict[str, int]:
        """Updates made so far, by role, the policy's version, and room for images."""
        return {name: count for ranks in self._pools for name, count in self._on_all(ranks, "counters")[0].items()}

    def set_counters(self, counters: Mapping[str, int]) -> None:
        """Go on from a checkpoint's counters."""
        for ranks in self._pools:
            self._on_all(ranks, "set_counters", dict(counters))

    def take_metrics(self) -> tuple[Metrics, dict[str, int]]:
        """Metrics of the hosts since the last call, and peak device bytes by worker method: the most of any host."""
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
        """Have every process trace its own work and its devices' within the block.

        Args:
          folder: Takes the traces; those of hosts lie in folders named after their pools, on their machines.
        """
        traced = [(self._pools[0], folder)]  # pools of this process share its trace
        if self._on_hosts:
            traced = [(ranks, folder.absolute() / ranks.name) for ranks in self._pools]
        for ranks, own in traced:
            ranks.on_all("start_trace", own)
        try:
            yield
        except BaseException:
            if not self._on_hosts:  # hosts end with the run, and this process goes on
                self._pools[0].on_all("stop_trace")
            raise
        for ranks, _ in traced:
            ranks.on_all("stop_trace")

    def close(self, *, wait: bool = True) -> None:
        """Let the threads end, and wait for running calls; without `wait` those go on until they are done."""
        for queue in self._queues:
            queue.close(wait=wait)


def _group_as_launched(role: str, ranks: Ranks, queue: DeviceQueue) -> Group:
    """The workers of a role on the processes that are there now."""
    return Group(role, ranks.protocols[role], ranks.as_launched(), queue)


class Pools:
    """The pools of a run, launched; they serve its phases one after another."""

    def __init__(self, pools: Sequence[Ranks]) -> None:
        self._pools = list(pools)

    def rows(self) -> list[SummaryRow]:
        """Rows of the table at the start: the configuration's consequences on each pool.

        Raises:
          Refusal: A layout or a token budget that a pool cannot hold.
        """
        return [row for ranks in self._pools for row in ranks.on_all("rows")[0]]

    def roles(self, phase: Phase) -> Roles:
        """Make the workers of a phase. Those of the phase before are dropped."""
        for ranks in self._pools:
            ranks.build(phase)
        return Roles(self._pools, phase)

    def close(self) -> None:
        """End all processes, and with them the calls that run; once, however often it is called."""
        pools, self._pools = self._pools, []
        with ExitStack() as stack:
            for ranks in pools:
                stack.callback(ranks.close)


def placed(config: Config, *, devices: int) -> list[Pool]:
    """The pools, with every role in one of them. Without configured pools one takes all `devices`."""
    roles = tuple(dict.fromkeys((*config.roles, "reward")))
    if not config.pools:
        return [Pool("all", config.devices or devices, roles)]
    first, *rest = config.pools
    if not any("reward" in pool.roles for pool in config.pools):
        first = replace(first, roles=(*first.roles, "reward"))
    return [first, *rest]

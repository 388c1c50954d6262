"""The pools of a run and the groups on them, wherever their processes are.

What a pool has to offer is `Ranks`; here are those of this process. The ones of other
processes are in `ray_backend`. Everything above works with either.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from jaxrlhf.batching.transfer_protocol import verbs_of
from jaxrlhf.checkpoint import Item
from jaxrlhf.config import ROLLOUT
from jaxrlhf.single_controller.group import ActorApart, Group, Lane, Timeline
from jaxrlhf.single_controller.host import Built, Host
from jaxrlhf.tracking import ON_HOST
from jaxrlhf.workers.build import Stage
from jaxrlhf.workers.model import Metrics
from jaxrlhf.workers.roles import WORKERS
from jaxrlhf.workers.summary import Row


class Ranks(ABC):
    """The processes of one pool.

    Args:
      name: Of the pool.
      roles: Placed on it, in any stage.
    """

    def __init__(self, name: str, roles: Sequence[str]) -> None:
        self.name, self.roles = name, tuple(roles)

    @abstractmethod
    def on_all(self, method: str, *args: Any) -> list[Any]:
        """What a method of `Host` returns on every rank."""

    @abstractmethod
    def call(self, role: str, verb: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Run a verb on all ranks and collect its results, here or as a `Remote`."""

    @abstractmethod
    def close(self) -> None:
        """End the processes."""

    def build(self, stage: Stage) -> None:
        """Make the workers of a stage on every rank."""
        self.built: list[Built] = self.on_all("build", stage)


class LocalRanks(Ranks):
    """A pool of devices of this process: one rank, whose results are handed on as they are."""

    def __init__(self, name: str, roles: Sequence[str], host: Host) -> None:
        super().__init__(name, roles)
        self._host = host

    def on_all(self, method: str, *args: Any) -> list[Any]:
        return [getattr(self._host, method)(*args)]

    def call(self, role: str, verb: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        protocol = verbs_of(WORKERS[role])[verb]
        return protocol.collect([self._host.call(role, verb, args, kwargs)])

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
    """The groups that a step calls, by role.

    Args:
      pools: With the workers of the stage built.
      stage: Of the run.

    Attributes:
      timeline: When each call ran.
    """

    actor: Any
    critic: Group
    reference: Group
    reward: Group

    def __init__(self, pools: Sequence[Ranks], stage: Stage) -> None:
        self.timeline = Timeline()
        self._pools, self._on_hosts = pools, stage.config.cluster is not None
        self._lanes: list[Lane] = []
        by_model = stage.config.rewards.by_model
        for ranks in pools:
            lane, beside = Lane(ranks.name, self.timeline), Lane(ON_HOST, self.timeline)
            self._lanes += [lane, beside]
            for role in ranks.built[0].places:
                # Functions score beside the models' work; a reward model computes on the pool's devices, in turn.
                chosen = beside if role == "reward" and not by_model else lane
                setattr(self, role, Group(role, verbs_of(WORKERS[role]), ranks.call, chosen))
        if hasattr(self, ROLLOUT):
            self.actor = ActorApart(self.actor, getattr(self, ROLLOUT))

    def __getattr__(self, role: str) -> Group:
        there = sorted(name for name, value in vars(self).items() if isinstance(value, Group | ActorApart))
        raise AttributeError(f"this stage has no role {role!r}; it has {there}, as the algorithm's roles say")

    def items(self) -> dict[str, Item]:
        """Every tree of arrays that a checkpoint of the run holds."""
        return {name: PoolItem(ranks, name) for ranks in self._pools for name in ranks.built[0].items}

    def counters(self) -> dict[str, int]:
        """Updates made so far, by role, and the policy's version."""
        return {name: count for ranks in self._pools for name, count in ranks.on_all("counters")[0].items()}

    def set_counters(self, counters: Mapping[str, int]) -> None:
        """Go on from a checkpoint's counters."""
        for ranks in self._pools:
            ranks.on_all("set_counters", dict(counters))

    def take_metrics(self) -> tuple[Metrics, dict[str, int]]:
        """What the hosts measured since the last call, and the peak device bytes by verb: the most of any host."""
        metrics: Metrics = {}
        peaks: dict[str, int] = {}
        for measured, bytes_by_verb in (pair for ranks in self._pools for pair in ranks.on_all("take_metrics")):
            metrics |= {name: max(value, metrics.get(name, value)) for name, value in measured.items()}
            peaks |= {verb: max(count, peaks.get(verb, 0)) for verb, count in bytes_by_verb.items()}
        return metrics, peaks

    @contextmanager
    def profiled(self, folder: Path) -> Iterator[None]:
        """Within the block every process traces what it and its devices do.

        Args:
          folder: Takes the traces; of hosts, in folders named after their pools and on their machines.
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
        for lane in self._lanes:
            lane.close(wait=wait)


class Pools:
    """The pools of a run, launched; they serve its stages one after another."""

    def __init__(self, pools: Sequence[Ranks]) -> None:
        self._pools = list(pools)

    def rows(self) -> list[Row]:
        """What the configuration comes down to on each pool.

        Raises:
          Refusal: A layout or a token budget that a pool cannot hold.
        """
        return [row for ranks in self._pools for row in ranks.on_all("rows")[0]]

    def roles(self, stage: Stage) -> Roles:
        """Make the workers of a stage. Those of the stage before are dropped."""
        for ranks in self._pools:
            ranks.build(stage)
        return Roles(self._pools, stage)

    def close(self) -> None:
        """End all processes, and with them the calls that run; once, however often it is called."""
        pools, self._pools = self._pools, []
        with ExitStack() as stack:
            for ranks in pools:
                stack.callback(ranks.close)

"""Off-policy schedule: steps learn from responses that were started some steps earlier."""

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from jaxrlhf.batch import RolloutBatch
from jaxrlhf.checkpoint import Damaged, Item
from jaxrlhf.config import Refusal
from jaxrlhf.dataflows.batches.in_flight import InFlight
from jaxrlhf.dataflows.batches.scored import ScoredRollout
from jaxrlhf.dataflows.step import Metrics, StepInput, StepResult, value_of
from jaxrlhf.single_controller.pools import Roles
from jaxrlhf.trainer.asynchronous.collector import Collector
from jaxrlhf.trainer.asynchronous.queue_item import QUEUE, QueueItem
from jaxrlhf.trainer.schedule import Synchronous, learn_from

IN_FLIGHT = "in_flight"
"""Name of the checkpoint item with the groups in flight, and of the item's folder."""


class Collection(NamedTuple):
    """Input of a step, the data collected for it, and metrics of the collection's rounds."""

    work: StepInput[Any]
    collected: Any
    metrics: Metrics


@dataclass
class OffPolicy(Synchronous):
    """Off-policy schedule: step i learns from responses collected with the weights of step i - k.

    k is `config.steps_ahead`. Without over-provision, k is `rollout.staleness`, and the first k + 1 steps learn from
    responses of the first weights. With over-provision, responses continue from one collection to the next, and k is at
    most 1.

    The weights that sample a token depend on step numbers and token counts alone, so a repeated or resumed run has the
    same numbers. The exception is `rollout.order='arrival'`, which follows the clock. A separate generation pool
    generates while models are updated; on a single pool, generation and updates take turns.
    """

    _collector: Collector = field(init=False)
    _queue: deque[Future[Collection]] = field(init=False, default_factory=deque)
    _started: int = field(init=False, default=0)
    _version: int = field(init=False, default=0)
    _metrics: Metrics = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self._collector = Collector(apart=self.roles.generates_apart)
        self._in_flight = InFlight(self.config) if self.config.rollout.over_provision > 1 else None

    def step(self, index: int, state: dict[str, float], *, doing: Callable[[str], None]) -> tuple[Any, StepResult]:
        """Run one step; see `Synchronous.step`. Collections of later steps may still be running when it returns."""
        ahead = self.config.steps_ahead
        doing("starting the responses of later steps")
        self._started = max(self._started, index)
        for number in range(self._started, min(index + ahead + 1, self.config.steps)):
            roles = self.roles.snapshot(waiting=ahead + 1)
            self._queue.append(self._collector.submit(partial(self._collected, number, state, roles)))
            self._started = number + 1
        ready = sum(future.done() for future in self._queue)
        doing("waiting for responses")
        work, collected, rounds = self._queue.popleft().result()
        doing("running the algorithm")
        learner = _LearningActor(self.roles.actor)
        result = learn_from(_with_actor(self.roles, learner), replace(work, state=state), collected)
        self._metrics = {"time/ready_batches": float(ready), **rounds, **age_metrics(collected, self._version)}
        self._version += learner.updates
        return collected, result

    def _collected(self, number: int, state: dict[str, float], roles: Roles) -> Collection:
        work, flight = replace(self.draw(number, state), in_flight=self._in_flight), self._in_flight
        before = None if flight is None else flight.saved()
        turns = [roles]

        def of_this_turn() -> Roles:
            """Return the roles as of the submission or, after a relaunch of hosts, as of now."""
            if flight is not None and before is not None:
                flight.restore(before)
                flight.begin_step()
            return turns.pop() if turns else self.roles.snapshot(waiting=self.config.steps_ahead + 1)

        collected = self.collect_with(of_this_turn, work)
        return Collection(work, collected, {} if flight is None else flight.metrics)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Start no collection within the block; submitted collections keep waiting."""
        with self._collector.paused():
            yield

    def metrics(self) -> Metrics:
        """Return the number of ready batches, the metrics of rounds, and the ages of the step's tokens."""
        return self._metrics

    def items(self) -> dict[str, Item]:
        """Return the checkpoint items: collections that no step has learned from, and the groups in flight."""
        flight, item = self._in_flight, partial(QueueItem, algorithm=self.config.algorithm)
        queue: dict[str, Item] = {QUEUE: item(self._waiting, self._wait)}
        return queue if flight is None else queue | {IN_FLIGHT: item(flight.saved, flight.restore)}

    def state(self) -> dict[str, Any]:
        """Return the position in the data after the collected records; waits for the submitted collections."""
        for future in self._queue:
            future.result()
        in_progress = 0 if self._in_flight is None else self._in_flight.groups
        return super().state() | {"begun": self._started, "queued": len(self._queue), "under_way": in_progress}

    def restore(self, saved: dict[str, Any]) -> None:
        """Continue from a checkpoint's position.

        Raises:
          Refusal: The checkpoint has more collections ahead than the staleness allows now.
        """
        queued, ahead = saved.get("queued", 0), self.config.steps_ahead
        if queued > ahead:
            rollout = self.config.rollout
            raise Refusal(
                f"the checkpoint holds queued responses of {queued} steps, but rollout.staleness={rollout.staleness} "
                f"with over_provision={rollout.over_provision} allows {ahead}; resume with "
                f"rollout.staleness={queued} or more and over_provision=1, or with the original settings"
            )
        in_progress = saved.get("under_way", 0)
        groups = in_progress if self._in_flight is None else self._in_flight.groups
        if (len(self._queue), groups) != (queued, in_progress):
            raise Damaged(
                f"the checkpoint should hold queued responses of {queued} steps and {in_progress} unfinished "
                f"groups, but its items hold {len(self._queue)} and {groups}; resume from an earlier checkpoint"
            )
        ours = {"queued"} if self._in_flight is None else {"queued", "under_way"}
        super().restore({name: value for name, value in saved.items() if name not in ours})
        self._started, self._version = saved.get("begun", 0), saved["counters"]["version"]

    def close(self) -> None:
        """Cancel the waiting collections."""
        self._collector.close()

    def _waiting(self) -> list[tuple[dict[str, Any], Any, Metrics]]:
        """Return the collections to save, each with the fields of its step's input that are data."""
        done = [future.result() for future in self._queue]
        return [
            ({name: getattr(work, name) for name in ("problems", "index", "state", "examples")}, collected, rounds)
            for work, collected, rounds in done
        ]

    def _wait(self, saved: list[tuple[dict[str, Any], Any, Metrics]]) -> None:
        self._queue.clear()
        for given, collected, *rounds in saved:  # older checkpoints have no metrics of rounds
            future: Future[Collection] = Future()
            work: StepInput[Any] = StepInput(self.config, draw_more=self.loader.next, **given)
            future.set_result(Collection(work, collected, rounds[0] if rounds else {}))
            self._queue.append(future)


class _LearningActor:
    """Actor that counts its updates; each update makes a new version of the policy."""

    def __init__(self, actor: Any) -> None:
        self._actor, self.updates = actor, 0

    def update_actor(self, *args: Any, **kwargs: Any) -> Any:
        self.updates += 1
        return self._actor.update_actor(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._actor, name)


def _with_actor(roles: Roles, actor: Any) -> Roles:
    changed = copy(roles)
    vars(changed)["actor"] = actor
    return changed


def age_metrics(collected: Any, version: int) -> Metrics:
    """Return the mean, the maximum and the distribution of token ages.

    The age of a token is the number of policy versions between the policy that sampled it and the policy that learns.

    Args:
      version: Version of the policy that learns.
    """
    if not isinstance(collected, ScoredRollout):
        return {}
    rollout: RolloutBatch = value_of(collected.rollout)
    age = version - np.asarray(rollout.version_BT)[np.asarray(rollout.sequences.mask_BT)]
    if not len(age):
        return {}
    shares = {f"staleness/share_age_{one}": float(np.mean(age == one)) for one in np.unique(age).tolist()}
    return {"staleness/age_mean": float(age.mean()), "staleness/age_max": float(age.max()), **shares}

"""Groups in flight across steps: more groups are started than a step takes; incomplete groups continue in later steps.

Source: APRIL, active partial rollouts (Zhou et al. 2025, arXiv:2509.18521).
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np

from jaxrlhf.batch import KEPT, Problem, RolloutBatch, images_of_problems
from jaxrlhf.batching.partial_rollouts import OpenGroups, PartialRollout, Round, unstarted_groups
from jaxrlhf.batching.transfer_protocol import join
from jaxrlhf.config import Config, Refusal

DrawMore = Callable[[], Sequence[Problem]]


class InFlight(ABC):
    """Groups in flight, in N places, and the problems that wait for a free place.

    A round ends when `prompts_per_step` groups are complete, and all groups that may not be postponed again. A group
    that a step takes leaves its place to the next waiting problem.

    Attributes:
      problems: Problem of the group in each place.
      metrics: Metrics of the rounds since `begin_step`.
    """

    def __init__(self, config: Config) -> None:
        rollout = config.rollout
        self._places, self._wanted = rollout.groups_in_flight, rollout.prompts_per_step
        self._copies, self._sampling = rollout.responses_per_prompt, rollout.sampling
        self._width = rollout.max_prompt_tokens + rollout.max_response_tokens
        self._most_postponed = rollout.staleness - config.steps_ahead
        self.problems: list[Problem] = []
        self._waiting: list[Problem] = []
        self._free: list[int] = []
        self.metrics: dict[str, float] = {}

    def begin_step(self) -> None:
        """Reset the metrics of rounds."""
        self.metrics = {}

    @property
    def groups(self) -> int:
        """Number of started groups that no step has taken."""
        return len(self.problems) - len(self._free)

    def take(
        self, actor: Any, problems: Sequence[Problem], *, step: int, seed: int, draw_more: DrawMore
    ) -> tuple[list[Problem], Any]:
        """Run one round and take the groups of a step, oldest complete groups first.

        Args:
          problems: Problems to start as soon as there is a place, after the problems that wait already.
          seed: Sampling seed of the groups that start now, kept until they end.
          draw_more: Returns further problems if there are too few to fill all places.

        Returns:
          Problems of the groups, and their responses or episodes.

        Raises:
          Refusal: The data hold fewer problems than there are places.
        """
        self._waiting += problems
        chosen, order = self._refill(draw_more)
        self._start(chosen, order, seed=seed, step=step)
        until = Round(self._wanted, len(self.problems), due=step - self._most_postponed)
        started_P, complete_P = self._round(actor, until, step)
        assert complete_P.sum() >= self._wanted, "the actor ended the round before a step's groups were complete"
        oldest_first = np.lexsort((np.arange(len(started_P)), started_P, ~complete_P))
        self._free = sorted(oldest_first[: self._wanted].tolist())
        self._add({"staleness/put_off_groups": float(self.groups)})
        return [self.problems[place] for place in self._free], self._taken()

    @abstractmethod
    def _start(self, chosen: Sequence[Problem], order: Sequence[int], *, seed: int, step: int) -> None:
        """Append a new group for each chosen problem, then put all groups in this order."""

    @abstractmethod
    def _round(self, actor: Any, until: Round, step: int) -> tuple[np.ndarray, np.ndarray]:
        """Continue all groups for one round; return the step that each started in, and whether it is complete."""

    @abstractmethod
    def _taken(self) -> Any:
        """Return the responses or episodes of the groups that the step takes, in `_free`."""

    def _add(self, numbers: dict[str, float]) -> None:
        self.metrics |= {name: self.metrics.get(name, 0.0) + value for name, value in numbers.items()}

    def _refill(self, draw_more: DrawMore) -> tuple[list[Problem], list[int]]:
        """Put a waiting problem in each free place, and adapt the number of places to the configuration.

        Returns:
          Problems that start, and the new order, as indices into the present groups followed by the new groups.
        """
        places = [*range(len(self.problems))]
        while len(places) > self._places and self._free:
            places.remove(self._free.pop())
        fresh = [*self._free, *range(len(self.problems), len(self.problems) + self._places - len(places))]
        here = {self.problems[place].prompt_id for place in places if place not in self._free}
        chosen = self._next(len(fresh), here, draw_more)
        source = {place: len(self.problems) + index for index, place in enumerate(fresh)}
        order = [source.get(place, place) for place in sorted({*places, *fresh})]
        together = [*self.problems, *chosen]
        self.problems, self._free = [together[index] for index in order], []
        return chosen, order

    def _next(self, count: int, here: set[int], draw_more: DrawMore) -> list[Problem]:
        """Return the first `count` waiting problems that have no group in flight: each prompt has one group."""
        chosen: list[Problem] = []
        draws = 0
        while len(chosen) < count:
            left = []
            for problem in self._waiting:
                if len(chosen) < count and problem.prompt_id not in here:
                    chosen.append(problem)
                    here.add(problem.prompt_id)
                else:
                    left.append(problem)
            self._waiting = left
            if len(chosen) < count:
                if draws > 2 * self._places:
                    raise Refusal(
                        f"rollout.over_provision keeps {self._places} prompts in flight, but the data have only "
                        f"{len(here)}; add records, or lower rollout.over_provision or rollout.prompts_per_step"
                    )
                self._waiting += draw_more()
                draws += 1
        return chosen

    def saved(self) -> dict[str, Any]:
        """Return everything that a resumed run needs."""
        return {"problems": [*self.problems], "waiting": [*self._waiting], "free": [*self._free]}

    def restore(self, saved: dict[str, Any]) -> None:
        """Continue from a saved state.

        Raises:
          Refusal: The saved groups have other sizes than the configuration.
        """
        self.problems = [*saved["problems"]]
        self._waiting, self._free = [*saved["waiting"]], [*saved["free"]]

    def _check_sizes(self, before: tuple[int, ...], now: tuple[int, ...]) -> None:
        if before != now:
            raise Refusal(
                "the checkpoint's groups in flight have (responses_per_prompt, max_prompt_tokens + "
                f"max_response_tokens, sampling.top_k) = {before}, but the rollout has {now}; resume with the "
                "original settings"
            )


class ResponsesInFlight(InFlight):
    """Groups of responses in flight. The order of completion depends on token counts, never on a clock.

    Attributes:
      in_progress: Partial responses of the groups; None before the first round.
    """

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.in_progress: PartialRollout | None = None

    def _start(self, chosen: Sequence[Problem], order: Sequence[int], *, seed: int, step: int) -> None:
        sizes = {"copies": self._copies, "width": self._width, "most_kept": self._sampling.most_kept}
        started = unstarted_groups(chosen, seed=seed, step=step, **sizes)
        self.in_progress = (started if self.in_progress is None else self.in_progress.concat(started)).take(order)

    def _round(self, actor: Any, until: Round, step: int) -> tuple[np.ndarray, np.ndarray]:
        assert self.in_progress is not None, "groups must be started before a round"
        before = self.in_progress.tokens
        how = {"sampling": self._sampling, "until": until}
        continued = actor.continue_sequences(self.problems, self.in_progress, **how).result()
        self.in_progress = continued
        self._add({"staleness/sampled_tokens": float(continued.tokens - before)})
        return continued.started_P, continued.complete_P

    def _taken(self) -> RolloutBatch:
        assert self.in_progress is not None, "responses are taken after a round"
        left = self.in_progress.take(np.setdiff1d(np.arange(len(self.problems)), self._free))
        tokens_B = left.rollout.sequences.mask_BT.sum(axis=1)
        self._add({"staleness/recomputed_tokens": float(tokens_B[~left.ended_B].sum())})
        rollout = self.in_progress.take(self._free).rollout
        chosen = [self.problems[place] for place in self._free for _ in range(self._copies)]
        return replace(rollout, sequences=replace(rollout.sequences, images_B=images_of_problems(chosen)))

    def saved(self) -> dict[str, Any]:
        return super().saved() | {"under_way": self.in_progress}

    def restore(self, saved: dict[str, Any]) -> None:
        if (in_progress := saved["under_way"]) is not None:
            sequences = in_progress.rollout.sequences
            kept = sequences.recorded[KEPT].shape[2] if KEPT in sequences.recorded else 0
            before = in_progress.copies, sequences.token_BT.shape[1], kept
            self._check_sizes(before, (self._copies, self._width, self._sampling.most_kept))
        super().restore(saved)
        self.in_progress = in_progress


class EpisodesInFlight(InFlight):
    """Groups of episodes in flight; a step takes the groups that arrive first, by wall-clock time.

    The state of an environment cannot be saved. After a resume, or after a host was relaunched, unfinished episodes
    restart from their prompts with their first seed.
    """

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self._groups = OpenGroups.begin(0, seed=0, step=0)
        self._over: list[RolloutBatch | None] = []

    def _start(self, chosen: Sequence[Problem], order: Sequence[int], *, seed: int, step: int) -> None:
        self._groups = self._groups.concat(OpenGroups.begin(len(chosen), seed=seed, step=step)).take(order)
        together = [*self._over, *[None for _ in chosen]]
        self._over = [together[index] for index in order]

    def _round(self, actor: Any, until: Round, step: int) -> tuple[np.ndarray, np.ndarray]:
        how = {"sampling": self._sampling, "responses_per_prompt": self._copies, "until": until}
        arrived = actor.continue_episodes(self.problems, self._groups, **how).result()
        place_of = {problem.prompt_id: place for place, problem in enumerate(self.problems)}
        for prompt_id, group in groups_of(arrived).items():
            self._over[place_of[prompt_id]] = group
        ended_P = np.array([group is not None for group in self._over])
        self._groups = replace(self._groups, ended_P=ended_P)
        self._add({"staleness/sampled_tokens": float(np.sum(arrived.sequences.mask_BT))})
        return self._groups.started_P, ended_P

    def _taken(self) -> RolloutBatch:
        taken = [self._over[place] for place in self._free]
        for place in self._free:  # a checkpoint holds waiting groups, not this step's
            self._over[place] = None
        self._add({"staleness/ready_groups": float(self._groups.ended_P.sum() - len(taken))})
        return join(taken)

    def saved(self) -> dict[str, Any]:
        return super().saved() | {"groups": self._groups, "over": [*self._over]}

    def restore(self, saved: dict[str, Any]) -> None:
        for group in saved["over"]:
            if group is not None:
                sizes = len(group.episodes.records), group.sequences.token_BT.shape[1], 0
                self._check_sizes(sizes, (self._copies, self._width, 0))
        super().restore(saved)
        self._groups, self._over = saved["groups"], [*saved["over"]]


def in_flight_of(config: Config) -> InFlight | None:
    """Make the in-flight groups of a configuration; None if every step completes its own groups."""
    if config.rollout.over_provision == 1:
        return None
    return ResponsesInFlight(config) if config.environment is None else EpisodesInFlight(config)


def groups_of(episodes: RolloutBatch) -> dict[int, RolloutBatch]:
    """Split episodes into groups, by prompt id."""
    prompt_id_B = np.asarray(episodes.sequences.prompt_id_B)
    rows = {prompt_id: np.flatnonzero(prompt_id_B == prompt_id) for prompt_id in dict.fromkeys(prompt_id_B.tolist())}
    return {
        prompt_id: jax.tree.map(lambda value, own=own: np.asarray(value)[own], episodes)
        for prompt_id, own in rows.items()
    }

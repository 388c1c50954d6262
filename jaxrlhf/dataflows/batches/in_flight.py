"""Groups in flight across steps: more groups are started than a step takes; incomplete groups continue in later steps.

Source: APRIL, active partial rollouts (Zhou et al. 2025, arXiv:2509.18521).
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from jaxrlhf.batch import KEPT, Problem, RolloutBatch, Sequences, images_of_problems
from jaxrlhf.batching.partial_rollouts import OpenGroups, Round, prompts_alone
from jaxrlhf.batching.transfer_protocol import join
from jaxrlhf.config import Config, Refusal

DrawMore = Callable[[], Sequence[Problem]]


class InFlight:
    """Groups of responses or episodes in flight, in N places, and the problems that wait for a free place.

    A round ends when `prompts_per_step` groups are complete, and all groups that may not be postponed again. A group
    that a step takes leaves its place to the next waiting problem. The order in which responses complete depends on
    token counts, never on a clock; the order of episodes is that of arrival.

    The state of an environment cannot be saved. After a resume, or after a host was relaunched, unfinished episodes
    restart from their prompts with their first seed.

    Attributes:
      problems: Problem of the group in each place.
      open: The groups, place by place; None before the first round.
      metrics: Metrics of the rounds since `begin_step`.
    """

    def __init__(self, config: Config) -> None:
        rollout = config.rollout
        self._places, self._wanted = rollout.groups_in_flight, rollout.prompts_per_step
        self._copies, self._sampling = rollout.responses_per_prompt, rollout.sampling
        self._width = rollout.max_prompt_tokens + rollout.max_response_tokens
        self._most_postponed = rollout.staleness - config.steps_ahead
        self._episodes = config.environment is not None
        self.problems: list[Problem] = []
        self.open: OpenGroups | None = None
        self._over: list[RolloutBatch | None] = []  # complete groups of episodes, place by place
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
        groups = self._round(actor, Round(self._wanted, len(self.problems), due=step - self._most_postponed))
        started_P, complete_P = groups.started_P, groups.complete_P
        assert complete_P.sum() >= self._wanted, "the actor ended the round before a step's groups were complete"
        oldest_first = np.lexsort((np.arange(len(started_P)), started_P, ~complete_P))
        self._free = sorted(oldest_first[: self._wanted].tolist())
        self._add({"staleness/put_off_groups": float(self.groups)})
        return [self.problems[place] for place in self._free], self._taken(groups)

    def _start(self, chosen: Sequence[Problem], order: Sequence[int], *, seed: int, step: int) -> None:
        """Append a new group for each chosen problem, then put all groups in this order."""
        rollout = None
        if not self._episodes:
            prompts = [problem for problem in chosen for _ in range(self._copies)]
            rollout = prompts_alone(prompts, width=self._width, most_kept=self._sampling.most_kept)
        started = OpenGroups.begin(len(chosen), copies=self._copies, seed=seed, step=step, rollout=rollout)
        self.open = (started if self.open is None else self.open.concat(started)).take(order)
        together = [*self._over, *[None for _ in chosen]]
        self._over = [together[index] for index in order]

    def _round(self, actor: Any, until: Round) -> OpenGroups:
        """Continue all groups for one round."""
        before = self.open
        assert before is not None, "groups must be started before a round"
        groups: OpenGroups = actor.continue_groups(self.problems, before, sampling=self._sampling, until=until).result()
        self._add({"staleness/sampled_tokens": float(groups.tokens - before.tokens)})
        if self._episodes:
            assert groups.rollout is not None, "a round returns the episodes that ended"
            place_of = {problem.prompt_id: place for place, problem in enumerate(self.problems)}
            for prompt_id, group in groups_of(groups.rollout).items():
                self._over[place_of[prompt_id]] = group
            groups = replace(groups, rollout=None)
        self.open = groups
        return groups

    def _taken(self, groups: OpenGroups) -> RolloutBatch:
        """Return the responses or episodes of the groups that the step takes, in `_free`."""
        if self._episodes:
            taken = [self._over[place] for place in self._free]
            for place in self._free:  # a checkpoint holds waiting groups, not this step's
                self._over[place] = None
            self._add({"staleness/ready_groups": float(groups.complete_P.sum() - len(taken))})
            return join(taken)
        left = groups.take(np.setdiff1d(np.arange(len(self.problems)), self._free))
        rollout = groups.take(self._free).rollout
        assert left.rollout is not None and rollout is not None, "responses have a rollout"
        tokens_B = np.sum(left.rollout.sequences.mask_BT, axis=1)
        self._add({"staleness/recomputed_tokens": float(tokens_B[~left.ended_B].sum())})
        chosen = [self.problems[place] for place in self._free for _ in range(self._copies)]
        return replace(rollout, sequences=replace(rollout.sequences, images_B=images_of_problems(chosen)))

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
        problems, waiting = [*self.problems], [*self._waiting]
        free, over = [*self._free], [*self._over]
        return {"groups": self.open, "problems": problems, "waiting": waiting, "free": free, "over": over}

    def restore(self, saved: dict[str, Any]) -> None:
        """Continue from a saved state.

        Raises:
          Refusal: The saved groups have other sizes than the configuration.
        """
        groups: OpenGroups | None = saved["groups"]
        for rollout in () if groups is None else (groups.rollout, *saved["over"]):
            if rollout is not None and groups is not None:
                self._check_sizes(groups.copies, rollout.sequences)
        self.open, self.problems = groups, [*saved["problems"]]
        self._waiting, self._free, self._over = ([*saved[name]] for name in ("waiting", "free", "over"))

    def _check_sizes(self, copies: int, sequences: Sequences) -> None:
        kept = sequences.recorded[KEPT].shape[2] if KEPT in sequences.recorded else 0
        before = copies, sequences.token_BT.shape[1], kept
        now = self._copies, self._width, 0 if self._episodes else self._sampling.most_kept
        if before != now:
            raise Refusal(
                "the checkpoint's groups in flight have (responses_per_prompt, max_prompt_tokens + "
                f"max_response_tokens, sampling.top_k) = {before}, but the rollout has {now}; resume with the "
                "original settings"
            )


def groups_of(episodes: RolloutBatch) -> dict[int, RolloutBatch]:
    """Split episodes into groups, by prompt id."""
    prompt_id_B = np.asarray(episodes.sequences.prompt_id_B)
    numbers = dict.fromkeys(prompt_id_B.tolist())
    return {prompt_id: episodes.take(np.flatnonzero(prompt_id_B == prompt_id)) for prompt_id in numbers}

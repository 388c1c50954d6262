"""Groups under way between steps: more are begun than a step takes, and those that are not complete go on later.

Source: APRIL, active partial rollouts (Zhou et al. 2025, arXiv:2509.18521).
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from jaxrlhf.batch import Problem, RolloutBatch, images_of_problems
from jaxrlhf.batching.partial_rollouts import PartialRollout, not_begun
from jaxrlhf.config import Config, Refusal


class InFlight:
    """Groups of responses under way, in N places, and the problems that wait for one.

    A round draws tokens until as many groups as a step takes are complete, and all that may be put off no more. Which
    they are hangs on counts of tokens, never on a clock. What a step takes leaves its place to the next problem.

    Attributes:
      problems: Problem in each place.
      under_way: What was drawn for them; None before the first round.
      metrics: Numbers of the rounds since they were last cleared.
    """

    def __init__(self, config: Config) -> None:
        rollout = config.rollout
        self._places, self._wanted = rollout.groups_under_way, rollout.prompts_per_step
        self._copies, self._sampling = rollout.responses_per_prompt, rollout.sampling
        self._width = rollout.max_prompt_tokens + rollout.max_response_tokens
        self._most_put_off = rollout.staleness - config.steps_ahead
        self.problems: list[Problem] = []
        self.under_way: PartialRollout | None = None
        self._waiting: list[Problem] = []
        self._free: list[int] = []
        self.metrics: dict[str, float] = {}

    @property
    def groups(self) -> int:
        """Groups that were begun and that no step has taken."""
        return len(self.problems) - len(self._free)

    def take(
        self,
        actor: Any,
        problems: Sequence[Problem],
        *,
        step: int,
        seed: int,
        draw_more: Callable[[], Sequence[Problem]],
    ) -> tuple[list[Problem], RolloutBatch]:
        """Go through one round, and take the groups of a step: those put off before first.

        Args:
          actor: Draws the tokens.
          problems: Problems that begin as soon as there is a place, behind those that wait.
          seed: What responses that begin now are drawn with, to their end.
          draw_more: Draws further problems where these are too few.

        Raises:
          Refusal: The data hold fewer problems than there are places.
        """
        self._waiting += problems
        begun = self._refill(draw_more, seed=seed, step=step)
        before = begun.tokens
        how = {"sampling": self._sampling, "complete": self._wanted, "of": len(self.problems)}
        drawn = actor.continue_sequences(self.problems, begun, due=step - self._most_put_off, **how).result()
        assert drawn.complete_P.sum() >= self._wanted, "the actor ended the round before a step's groups were complete"
        self.under_way = drawn
        oldest_first = np.lexsort((np.arange(len(drawn.begun_P)), drawn.begun_P, ~drawn.complete_P))
        self._free = sorted(oldest_first[: self._wanted].tolist())
        taken, chosen = drawn.take(self._free), [self.problems[place] for place in self._free]
        self._count(drawn, before)
        images_B = images_of_problems([problem for problem in chosen for _ in range(self._copies)])
        rollout = taken.rollout
        return chosen, replace(rollout, sequences=replace(rollout.sequences, images_B=images_B))

    def _count(self, drawn: PartialRollout, before: int) -> None:
        left = drawn.take(np.setdiff1d(np.arange(len(self.problems)), self._free))
        recomputed = np.sum(left.rollout.sequences.mask_BT[~left.ended_B])
        ours = {
            "staleness/put_off_groups": float(len(left.begun_P)),
            "staleness/drawn_tokens": float(drawn.tokens - before),
            "staleness/recomputed_tokens": float(recomputed),
        }
        self.metrics = {name: self.metrics.get(name, 0.0) + value for name, value in ours.items()}

    def _refill(self, draw_more: Callable[[], Sequence[Problem]], *, seed: int, step: int) -> PartialRollout:
        """A problem that waits in each free place, and as many places as the configuration has now."""
        places = [*range(len(self.problems))]
        while len(places) > self._places and self._free:
            places.remove(self._free.pop())
        fresh = [*self._free, *range(len(self.problems), len(self.problems) + self._places - len(places))]
        here = {self.problems[place].prompt_id for place in places if place not in self._free}
        chosen = self._next(len(fresh), here, draw_more)
        sizes = {"copies": self._copies, "width": self._width, "most_kept": self._sampling.most_kept}
        begun = not_begun(chosen, seed=seed, step=step, **sizes)
        source = {place: len(self.problems) + index for index, place in enumerate(fresh)}
        order = [source.get(place, place) for place in sorted({*places, *fresh})]
        together = [*self.problems, *chosen]
        self.problems, self._free = [together[index] for index in order], []
        return (begun if self.under_way is None else self.under_way.concat(begun)).take(order)

    def _next(self, count: int, here: set[int], draw_more: Callable[[], Sequence[Problem]]) -> list[Problem]:
        """The first `count` problems that wait and are not under way: responses to one prompt are one group."""
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
                        f"rollout.over_provision has {self._places} prompts under way at once, and the data have only "
                        f"{len(here)}; give more records, or lower over_provision or rollout.prompts_per_step"
                    )
                self._waiting += draw_more()
                draws += 1
        return chosen

    def saved(self) -> dict[str, Any]:
        """All that a run goes on from."""
        lists = {"problems": [*self.problems], "waiting": [*self._waiting], "free": [*self._free]}
        return lists | {"under_way": self.under_way}

    def restore(self, saved: dict[str, Any]) -> None:
        """Go on from what was saved.

        Raises:
          Refusal: Groups under way have other sizes than the configuration's.
        """
        if (under_way := saved["under_way"]) is not None:
            sequences = under_way.rollout.sequences
            kept = 0 if sequences.kept_BTK is None else sequences.kept_BTK.shape[2]
            before = under_way.copies, sequences.token_BT.shape[1], kept
            if before != (now := (self._copies, self._width, self._sampling.most_kept)):
                raise Refusal(
                    "the checkpoint's groups under way have (responses_per_prompt, max_prompt_tokens + "
                    f"max_response_tokens, sampling.top_k) = {before}, and the rollout has {now}; resume with what "
                    "they were begun with"
                )
        self.problems, self.under_way = [*saved["problems"]], saved["under_way"]
        self._waiting, self._free = [*saved["waiting"]], [*saved["free"]]

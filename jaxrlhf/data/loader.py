"""Loader of the problems of each step: shuffled, endless, and resumable to the very batch."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxrlhf.batch import Problem
from jaxrlhf.config import Refusal


class Loader:
    """Full batches of problems, reshuffled in every epoch.

    The order of an epoch is a function of the seed and the epoch alone, so the whole state is
    a position. It is the sorting permutation of raw Philox words, a sequence that numpy
    keeps across versions. Problems that do not fill a batch at the end of an epoch wait for a
    later one: a batch never holds a problem twice, since its id names its group.

    Args:
      problems: Already tokenised.
      per_step: Problems in a batch.
      seed: Seed of the shuffling.
      fingerprint: A text that is another one for other problems; a saved position is of these alone.

    Raises:
      Refusal: fewer problems than `per_step`.
    """

    def __init__(self, problems: Sequence[Problem], *, per_step: int, seed: int, fingerprint: str = "") -> None:
        if not 0 < per_step <= len(problems):
            raise Refusal(
                f"a step takes {per_step} problems and there are {len(problems)}; set rollout.prompts_per_step "
                f"(in supervised training examples_per_update, of pairs pairs_per_update) to 1 to {len(problems)} "
                "or give more problems"
            )
        self._problems = problems
        self._per_step = per_step
        self._seed, self._fingerprint = seed, fingerprint
        self._epoch, self._offset = 0, 0
        self._order = self._shuffled(0)

    def next(self) -> list[Problem]:
        """The next `per_step` problems."""
        if self._offset + self._per_step > len(self._problems):
            self._epoch, self._offset = self._epoch + 1, 0
            self._order = self._shuffled(self._epoch)
        start, self._offset = self._offset, self._offset + self._per_step
        return [self._problems[index] for index in self._order[start : self._offset]]

    def state(self) -> dict[str, int | str]:
        """Position in the data, as JSON takes it."""
        return {"epoch": self._epoch, "offset": self._offset} | self._identity()

    def _identity(self) -> dict[str, int | str]:
        return {"seed": self._seed, "problems": len(self._problems), "records": self._fingerprint}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on exactly where `state()` was taken.

        Raises:
          Refusal: the state is of another seed, another number of problems or others in the same number.
        """
        for name, here in self._identity().items():
            if state.get(name, here) != here:  # an earlier version did not save all
                raise Refusal(
                    f"the saved data position has {name}={state[name]} and this run has {name}={here}; "
                    "resume with the same data and seed, or start a new run"
                )
        self._epoch, self._offset = state["epoch"], state["offset"]
        self._order = self._shuffled(self._epoch)

    def _shuffled(self, epoch: int) -> list[int]:
        key = np.array([self._seed % 2**64, epoch], np.uint64)
        words = np.random.Philox(key=key).random_raw(len(self._problems))
        return np.argsort(words, kind="stable").tolist()

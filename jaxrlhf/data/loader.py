"""Loader of the problems of each step: shuffled, endless, and resumable to the very batch."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxrlhf.batch import Problem
from jaxrlhf.config import Refusal


@dataclass(frozen=True)
class Part:
    """Problems of one source, of which a step draws in proportion to its weight.

    Attributes:
      index: Indices of its problems, in their order.
      name: Name of the source; "" where there is one only.
    """

    index: np.ndarray
    weight: float = 1.0
    name: str = ""


@dataclass(frozen=True)
class Band:
    """Mean scores of problems that are neither too hard nor too easy, bounds included."""

    lowest: float
    highest: float


class Loader:
    """Full batches of problems, reshuffled in every epoch.

    The order of an epoch is a function of the seed and the epoch alone, so the whole state is
    a position. It is the sorting permutation of raw Philox words, a sequence that numpy
    keeps across versions. Problems that do not fill a batch at the end of an epoch wait for a
    later one, or without shuffling come together with the first of the next: a batch never holds
    a problem twice, since its id names its group.

    Args:
      fingerprint: A text that is another one for other problems; a saved position is of these alone.
      parts: Sources that a batch is drawn of, side by side, each in epochs of its own; None is all problems.
      shuffle: False keeps the order of each part in every epoch.
      band: Leaves out of later epochs what was observed outside of it, as long as enough is left; None leaves out none.

    Raises:
      Refusal: fewer problems than `per_step`, or than a step draws of a part.
    """

    def __init__(
        self,
        problems: Sequence[Problem],
        *,
        per_step: int,
        seed: int,
        fingerprint: str = "",
        parts: Sequence[Part] | None = None,
        shuffle: bool = True,
        band: Band | None = None,
    ) -> None:
        self._parts = list(parts or [Part(np.arange(len(problems)))])
        self._shares = [part.weight / sum(part.weight for part in self._parts) for part in self._parts]
        self._problems, self._per_step, self._shuffle, self._band = problems, per_step, shuffle, band
        self._check()
        self._seed, self._fingerprint = seed, fingerprint
        self._drawn = [0] * len(self._parts)
        self._observed: dict[int, float] = {}
        self._left_out = [np.zeros(0, np.int64) for _ in self._parts]  # of the epoch under way
        self._index_of: dict[int, int] = {}  # by prompt id, of problems that were drawn
        self._epoch, self._offset = [0] * len(self._parts), [0] * len(self._parts)
        self._order = [self._ordered(number, 0) for number in range(len(self._parts))]

    def _check(self) -> None:
        for number, part in enumerate(self._parts):
            most = self._most(number)
            if not 0 < most <= len(part.index):
                of = f" of source {part.name!r}" if len(self._parts) > 1 else ""
                raise Refusal(
                    f"a step takes {most} problems{of} and there are {len(part.index)}; set rollout.prompts_per_step "
                    "(in supervised training examples_per_update, of pairs pairs_per_update) to 1 to "
                    f"{len(part.index)} or give more problems"
                )

    def _most(self, number: int) -> int:
        """Problems that a step draws of a part, at most."""
        share = self._shares[number]
        return self._per_step if share == 1 else min(self._per_step, int(self._per_step * share) + 2)

    def next(self) -> list[Problem]:
        """The next `per_step` problems."""
        wanted = self._quotas()
        chosen = [index for number, count in enumerate(wanted) for index in self._take(number, count)]
        problems = [self._problems[index] for index in chosen]
        if self._band is not None:
            self._index_of |= {problem.prompt_id: index for problem, index in zip(problems, chosen, strict=True)}
        return problems

    def _quotas(self) -> list[int]:
        """Problems of each part in the next batch: whoever lacks most of its share comes first."""
        wanted = [0] * len(self._parts)
        if len(self._parts) == 1:
            wanted[0] = self._per_step
        while (total := sum(wanted)) < self._per_step:
            due = sum(self._drawn) + total + 1
            lacking = np.array(self._shares) * due - np.array(self._drawn) - np.array(wanted)
            wanted[int(np.argmax(lacking))] += 1
        self._drawn = [drawn + own for drawn, own in zip(self._drawn, wanted, strict=True)]
        return wanted

    def _take(self, number: int, count: int) -> list[int]:
        rest: list[int] = []
        if self._offset[number] + count > len(self._order[number]):
            if not self._shuffle:  # the same would be left over in every epoch, the hardest of a curriculum
                rest = self._order[number][self._offset[number] :].tolist()
            self._epoch[number], self._offset[number] = self._epoch[number] + 1, 0
            self._left_out[number] = self._outside(number)
            self._order[number] = self._ordered(number, self._epoch[number])
        start, self._offset[number] = self._offset[number], self._offset[number] + count - len(rest)
        return rest + self._order[number][start : self._offset[number]].tolist()

    def observe(self, scores: Mapping[int, float]) -> None:
        """Note mean scores of problems that were drawn, by prompt id."""
        if self._band is not None:
            self._observed |= {self._index_of[prompt]: score for prompt, score in scores.items()}

    def state(self) -> dict[str, Any]:
        """Position in the data, as JSON takes it."""
        several = len(self._parts) > 1
        position: dict[str, Any] = {"epoch": self._epoch[0], "offset": self._offset[0]}
        if several:
            position = {"epoch": [*self._epoch], "offset": [*self._offset], "drawn": [*self._drawn]}
            position["shares"] = [*self._shares]
        if self._band is not None:
            left_out = [index.tolist() for index in self._left_out]
            position |= {"observed": [*map(list, self._observed.items())], "left_out": left_out}
        return position | self._identity()

    def _identity(self) -> dict[str, int | str]:
        return {"seed": self._seed, "problems": len(self._problems), "records": self._fingerprint}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on exactly where `state()` was taken.

        Raises:
          Refusal: the state is of another seed, another number of problems or others in the same number, or of other
            sources.
        """
        for name, here in self._identity().items():
            if state.get(name, here) != here:  # an earlier version did not save all
                raise Refusal(
                    f"the saved data position has {name}={state[name]} and this run has {name}={here}; "
                    "resume with the same data and seed, or start a new run"
                )
        epoch, offset = (
            [state[name]] if isinstance(state[name], int) else [*state[name]] for name in ("epoch", "offset")
        )
        if len(epoch) != len(self._parts):
            raise Refusal(
                f"the saved data position is of {len(epoch)} sources and this run has {len(self._parts)}; "
                "resume with the same data and seed, or start a new run"
            )
        self._epoch, self._offset, self._drawn = epoch, offset, [0] * len(self._parts)
        if state.get("shares", self._shares) == self._shares:  # else what was drawn by other weights would be made up
            self._drawn = [*state.get("drawn", self._drawn)]
        self._observed = {int(index): float(score) for index, score in state.get("observed", ())}
        if "left_out" in state:
            self._left_out = [np.array(index, np.int64) for index in state["left_out"]]
        self._order = [self._ordered(number, epoch) for number, epoch in enumerate(self._epoch)]

    def _ordered(self, number: int, epoch: int) -> np.ndarray:
        """Indices of a part in the order of an epoch."""
        index = self._parts[number].index
        index = index[~np.isin(index, self._left_out[number])]
        if not self._shuffle:
            return index
        key = np.array([self._seed % 2**64, epoch + number * 2**32], np.uint64)
        words = np.random.Philox(key=key).random_raw(len(index))
        return index[np.argsort(words, kind="stable")]

    def _outside(self, number: int) -> np.ndarray:
        """Indices of a part that were observed outside of the band; none if that would leave too few."""
        index, band = self._parts[number].index, self._band
        if band is None:
            return np.zeros(0, np.int64)
        far = [one for one, score in self._observed.items() if not band.lowest <= score <= band.highest]
        outside = index[np.isin(index, far)]
        return outside if len(index) - len(outside) >= self._most(number) else np.zeros(0, np.int64)

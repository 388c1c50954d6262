"""Loader of the problems of each step: shuffled, endless, and resumable at the exact batch."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxrlhf.batch import Problem
from jaxrlhf.config import Refusal


@dataclass(frozen=True)
class Part:
    """Problems of one source; a step takes problems of each source in proportion to the source's weight.

    Attributes:
      index: Indices of the source's problems, in order.
      weight: Weight of the source, relative to the other weights.
      name: Name of the source; "" if there is only one.
    """

    index: np.ndarray
    weight: float = 1.0
    name: str = ""


@dataclass(frozen=True)
class Band:
    """Range of mean scores, bounds included, of problems that are neither too hard nor too easy."""

    lowest: float
    highest: float


class Loader:
    """Full batches of problems, reshuffled in every epoch.

    The order of an epoch depends only on the seed and the epoch, so a position in the data is the whole state. The
    order is the sorting permutation of raw Philox words, a sequence that numpy keeps across versions. Problems that do
    not fill a batch at the end of an epoch wait for a later epoch. Without shuffling they share a batch with the first
    problems of the next epoch. A batch never holds a problem twice, because a problem's id names its group.

    Args:
      fingerprint: Text that identifies the problems; a saved position can only be restored with the same text.
      parts: Sources that every batch mixes, each with its own epochs; None is one source with all problems.
      shuffle: False keeps the order of each part in every epoch.
      band: Range of scores. Problems observed outside of it are left out of later epochs, as long as enough problems
        remain. None keeps all problems.

    Raises:
      Refusal: There are fewer problems than `per_step`, or than a step takes from a part.
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
        self._taken = [0] * len(self._parts)
        self._observed: dict[int, float] = {}
        self._left_out = [np.zeros(0, np.int64) for _ in self._parts]  # in the current epoch
        self._index_of: dict[int, int] = {}  # by prompt id, of the problems used so far
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
        """Return the maximum number of problems that a step takes from a part."""
        share = self._shares[number]
        return self._per_step if share == 1 else min(self._per_step, int(self._per_step * share) + 2)

    def next(self) -> list[Problem]:
        """Return the next `per_step` problems."""
        wanted = self._quotas()
        chosen = [index for number, count in enumerate(wanted) for index in self._take(number, count)]
        problems = [self._problems[index] for index in chosen]
        if self._band is not None:
            self._index_of |= {problem.prompt_id: index for problem, index in zip(problems, chosen, strict=True)}
        return problems

    def _quotas(self) -> list[int]:
        """Return the number of problems of each part in the next batch; the part most below its share comes first."""
        wanted = [0] * len(self._parts)
        if len(self._parts) == 1:
            wanted[0] = self._per_step
        while (total := sum(wanted)) < self._per_step:
            count = sum(self._taken) + total + 1
            missing = np.array(self._shares) * count - np.array(self._taken) - np.array(wanted)
            wanted[int(np.argmax(missing))] += 1
        self._taken = [taken + new for taken, new in zip(self._taken, wanted, strict=True)]
        return wanted

    def _take(self, number: int, count: int) -> list[int]:
        """Return the indices of the next problems of a part."""
        rest: list[int] = []
        if self._offset[number] + count > len(self._order[number]):
            if not self._shuffle:  # else every epoch would skip the same problems, the hardest of a curriculum
                rest = self._order[number][self._offset[number] :].tolist()
            self._epoch[number], self._offset[number] = self._epoch[number] + 1, 0
            self._left_out[number] = self._outside(number)
            self._order[number] = self._ordered(number, self._epoch[number])
        start, self._offset[number] = self._offset[number], self._offset[number] + count - len(rest)
        return rest + self._order[number][start : self._offset[number]].tolist()

    def observe(self, scores: Mapping[int, float]) -> None:
        """Record mean scores of problems that were used, by prompt id."""
        if self._band is not None:
            self._observed |= {self._index_of[prompt]: score for prompt, score in scores.items()}

    def state(self) -> dict[str, Any]:
        """Return the position in the data, as JSON-compatible values."""
        position: dict[str, Any] = {"epoch": self._epoch[0], "offset": self._offset[0]}
        if len(self._parts) > 1:
            position = {"epoch": [*self._epoch], "offset": [*self._offset]}
            position |= {"drawn": [*self._taken], "shares": [*self._shares]}
        if self._band is not None:
            left_out = [index.tolist() for index in self._left_out]
            position |= {"observed": [*map(list, self._observed.items())], "left_out": left_out}
        return position | self._identity()

    def _identity(self) -> dict[str, int | str]:
        return {"seed": self._seed, "problems": len(self._problems), "records": self._fingerprint}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue exactly where `state()` was taken.

        Raises:
          Refusal: The state has another seed, number of problems, fingerprint or number of sources.
        """
        for name, here in self._identity().items():
            if state.get(name, here) != here:  # earlier versions did not save all of these
                raise Refusal(
                    f"the saved data position has {name}={state[name]} and this run has {name}={here}; "
                    "resume with the same data and seed, or start a new run"
                )
        epoch, offset = (
            [state[name]] if isinstance(state[name], int) else [*state[name]] for name in ("epoch", "offset")
        )
        if len(epoch) != len(self._parts):
            raise Refusal(
                f"the saved data position has {len(epoch)} sources and this run has {len(self._parts)}; "
                "resume with the same data and seed, or start a new run"
            )
        self._epoch, self._offset, self._taken = epoch, offset, [0] * len(self._parts)
        if state.get("shares", self._shares) == self._shares:  # under new weights, counts restart
            self._taken = [*state.get("drawn", self._taken)]
        self._observed = {int(index): float(score) for index, score in state.get("observed", ())}
        if "left_out" in state:
            self._left_out = [np.array(index, np.int64) for index in state["left_out"]]
        self._order = [self._ordered(number, epoch) for number, epoch in enumerate(self._epoch)]

    def _ordered(self, number: int, epoch: int) -> np.ndarray:
        """Return the indices of a part in the order of an epoch."""
        index = self._parts[number].index
        index = index[~np.isin(index, self._left_out[number])]
        if not self._shuffle:
            return index
        key = np.array([self._seed % 2**64, epoch + number * 2**32], np.uint64)
        words = np.random.Philox(key=key).random_raw(len(index))
        return index[np.argsort(words, kind="stable")]

    def _outside(self, number: int) -> np.ndarray:
        """Return the indices of a part whose scores are outside of the band; none if too few would remain."""
        index, band = self._parts[number].index, self._band
        if band is None:
            return np.zeros(0, np.int64)
        bad = [n for n, score in self._observed.items() if not band.lowest <= score <= band.highest]
        outside = index[np.isin(index, bad)]
        return outside if len(index) - len(outside) >= self._most(number) else np.zeros(0, np.int64)

"""Selection of problems: leaves out repeated problems and those of the wrong difficulty, and orders the rest."""

import hashlib
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

import numpy as np

from jaxrlhf.config import Refusal, Selection
from jaxrlhf.data.records import read_rows
from jaxrlhf.data.table.problem_table import ProblemTable


class Selected(NamedTuple):
    """Selected problems of a split.

    Attributes:
      kept: Indices of the selected problems, in order.
      repeated: Number of problems left out because an earlier problem has the same prompt.
      outside: Number of problems left out because their mean score is outside of the band.
    """

    kept: np.ndarray
    repeated: int
    outside: int


def selected(problems: ProblemTable, index: np.ndarray, selection: Selection) -> Selected:
    """Select and order the problems at some indices.

    Raises:
      Refusal: The samples cannot be read, contain none of the problems although they set the order, or all problems
        are outside of the band.
    """
    total = len(index)
    if selection.unique:
        index = _first_of_each(problems, index)
    repeated, outside = total - len(index), 0
    scores: dict[str, float] = {}
    if selection.samples is not None:
        scores = mean_scores(selection.samples)
        known = np.array([scores.get(problems.prompt(n), np.nan) for n in index.tolist()])
        lowest, highest = selection.band
        inside = np.isnan(known) | ((known >= lowest) & (known <= highest))
        outside = int((~inside).sum())
        if outside == len(index):
            raise Refusal(
                f"all {outside} problems have mean scores outside of selection.band={selection.band} in "
                f"{selection.samples}; widen the band"
            )
        index, known = index[inside], known[inside]
        if selection.order == "by_difficulty":
            if np.isnan(known).all():
                raise Refusal(f"{selection.samples} has no sample of any problem, so it cannot order the problems")
            index = index[np.argsort(-known, kind="stable")]  # easiest first, problems without a score last
    if selection.order == "by_length":
        index = index[np.argsort(problems.lengths[index], kind="stable")]
    return Selected(index, repeated, outside)


def mean_scores(path: str) -> dict[str, float]:
    """Return the mean score of each rendered prompt in a run's file of samples; unscorable responses are left out.

    Raises:
      Refusal: The file is missing or is no file of samples.
    """
    scores: dict[str, list[float]] = defaultdict(list)
    for row in read_rows(Path(path).expanduser()):
        score = row.value("score")
        if score is None:
            continue
        if not isinstance(score, int | float) or not np.isfinite(score):
            raise Refusal(f"{row.place}: 'score' must be a finite number, or null, got {score!r:.80}")
        scores[row.text("prompt")].append(score)
    return {prompt: float(np.mean(given)) for prompt, given in scores.items()}


def _first_of_each(problems: ProblemTable, index: np.ndarray) -> np.ndarray:
    """Return the indices without repeated prompts; prompts are compared without regard to spaces and case."""
    seen: set[bytes] = set()
    first = np.zeros(len(index), bool)
    for place, n in enumerate(index.tolist()):
        text = " ".join(problems.question(n).split()).casefold()
        digest = hashlib.blake2b(text.encode(), digest_size=12).digest()
        first[place] = digest not in seen
        seen.add(digest)
    return index[first]

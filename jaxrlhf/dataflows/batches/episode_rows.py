"""Sequences of an episode side by side, so that the maths of advantages sees an episode as one row.

Most episodes are one sequence, and then nothing is done. Where a chat template or an agent rewrites what was said, an
episode has several; each is a row for the models, and together they are one for returns, baselines and denominators.
"""

from dataclasses import replace
from typing import Any

import jax
import numpy as np

from jaxrlhf.batch import Array, RolloutBatch, Scores, Sequences


def side_by_side(rollout: Any, values: tuple[Any, ...]) -> tuple[Any, ...]:
    """A rollout and `[B, T]` arrays of its rows, with the rows of each episode side by side.

    Returns:
      The same objects where each episode is one row. Else `[E, k T]` arrays, and of what is one for each row the entry
      of an episode's first; scores are of episodes and stay.
    """
    if not isinstance(rollout, RolloutBatch) or rollout.episodes is None:
        return (rollout, *values)
    place_EK = _places(np.asarray(rollout.episodes.episode_B))
    if place_EK.shape[1] == 1:
        return (rollout, *values)
    rows = len(rollout.episodes.episode_B)

    def joined(value: Any) -> Any:
        if isinstance(value, Scores):  # of episodes already
            return value
        return jax.tree.map(lambda leaf: _joined(np.asarray(leaf), place_EK, rows), value)

    sequences = rollout.sequences
    length_EK = np.where(place_EK < 0, 0, np.asarray(sequences.length_B)[place_EK])
    images_EK = None if sequences.images_B is None else _images_of(sequences.images_B, place_EK)
    whole = replace(joined(rollout), sequences=replace(joined(sequences), length_B=length_EK, images_B=images_EK))
    truncated_EK = np.where(place_EK < 0, False, np.asarray(rollout.truncated_B)[place_EK])
    return (replace(whole, truncated_B=truncated_EK.any(axis=1)), *(joined(value) for value in values))


class Apart:
    """The rows that lie side by side in some sequences, as rows again; all stays as it is where none do."""

    def __init__(self, sequences: Sequences) -> None:
        length_EK = np.asarray(sequences.length_B)
        self._sequences, self._there_EK = sequences, length_EK.reshape(len(length_EK), -1) > 0
        self._needless = length_EK.ndim == 1

    def array(self, value: Any, episodes: np.ndarray | None = None) -> Any:
        """Rows of `[E, k T]` arrays.

        Args:
          episodes: Indices of the episodes that the arrays are of; None is all.
        """
        if self._needless:
            return value
        there_EK = self._there_EK if episodes is None else self._there_EK[episodes]

        def parted(leaf: Array) -> np.ndarray:
            leaf = np.asarray(leaf)
            return leaf.reshape(*there_EK.shape, -1, *leaf.shape[2:])[there_EK]

        return jax.tree.map(parted, value)

    def rows(self, episodes: np.ndarray) -> np.ndarray:
        """Indices of the rows of these episodes, in their order."""
        if self._needless:
            return episodes
        count_E = self._there_EK.sum(axis=1)
        start_E = np.cumsum(count_E) - count_E
        return np.concatenate([start_E[episode] + np.arange(count_E[episode]) for episode in episodes])

    @property
    def sequences(self) -> Sequences:
        """The sequences, one a row."""
        whole, there_EK = self._sequences, self._there_EK
        if self._needless:
            return whole
        return Sequences(
            **self.array({name: getattr(whole, name) for name in ("token_BT", "mask_BT", "choice_BTLk")}),
            length_B=np.asarray(whole.length_B)[there_EK],
            prompt_id_B=np.repeat(whole.prompt_id_B, there_EK.sum(axis=1)),
            images_B=None if whole.images_B is None else whole.images_B[there_EK],
        )


def drawn_by(rollout: RolloutBatch) -> tuple[np.ndarray, np.ndarray]:
    """Tokens that the policy chose in each response or episode, and whether a limit ended it."""
    length_B, truncated_B = np.asarray(rollout.sequences.mask_BT).sum(axis=1), np.asarray(rollout.truncated_B)
    if rollout.episodes is None:
        return length_B, truncated_B
    start_E = starts_of(rollout.episodes.episode_B)
    return np.add.reduceat(length_B, start_E), np.logical_or.reduceat(truncated_B, start_E)


def starts_of(episode_B: Array) -> np.ndarray:
    """`start_E`, the first row of each episode; an episode's rows are one after another."""
    return np.flatnonzero(np.diff(np.asarray(episode_B), prepend=-1))


def _places(episode_B: np.ndarray) -> np.ndarray:
    """`place_EK`, the rows of each episode; -1 fills up."""
    starts = starts_of(episode_B)
    counts_E = np.diff([*starts, len(episode_B)])
    number_EK = np.arange(counts_E.max())[None]
    return np.where(number_EK < counts_E[:, None], starts[:, None] + number_EK, -1)


def _images_of(images_B: np.ndarray, place_EK: np.ndarray) -> np.ndarray:
    """Images of each sequence of each episode."""
    images_EK = np.empty(place_EK.shape, object)
    for place in np.ndindex(place_EK.shape):
        images_EK[place] = images_B[place_EK[place]] if place_EK[place] >= 0 else ()
    return images_EK


def _joined(leaf: np.ndarray, place_EK: np.ndarray, rows: int) -> np.ndarray:
    """Rows of an array side by side; an array of one entry for each row keeps each episode's first."""
    assert len(leaf) == rows, f"an array of {len(leaf)} rows beside {rows} sequences"
    if leaf.ndim == 1:
        return leaf[place_EK[:, 0]]
    there_EK = (place_EK >= 0).reshape(*place_EK.shape, *[1] * (leaf.ndim - 1))
    filled = np.where(there_EK, leaf[place_EK], np.zeros((), leaf.dtype))
    return filled.reshape(len(place_EK), -1, *leaf.shape[2:])

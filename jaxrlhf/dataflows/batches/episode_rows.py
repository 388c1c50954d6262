"""Concatenation of an episode's sequences into one row, so that advantages are computed over whole episodes.

Most episodes are one sequence, and then nothing is done. If a chat template or an agent rewrites earlier messages, an
episode has several sequences. Each sequence is a row for the models; concatenated they are one row for returns,
baselines and denominators.
"""

from dataclasses import replace
from typing import Any

import jax
import numpy as np

from jaxrlhf.batch import EpisodeRows, RolloutBatch, Scores


def side_by_side(rollout: Any, values: tuple[Any, ...]) -> tuple[Any, ...]:
    """Concatenate the rows of each episode in a rollout and in `[B, T]` arrays of its rows.

    Returns:
      The unchanged objects if each episode is one row. Otherwise `[E, k T]` arrays, where k is the largest number of
      rows of an episode. A `[B]` array keeps the entry of each episode's first row. Scores are per episode already.
    """
    if not isinstance(rollout, RolloutBatch) or rollout.episodes is None:
        return (rollout, *values)
    place_EK = _places(rollout.episodes)
    if place_EK.shape[1] == 1:
        return (rollout, *values)
    rows = len(rollout.episodes.episode_B)

    def joined(value: Any) -> Any:
        if isinstance(value, Scores):  # one score per episode already
            return value
        return jax.tree.map(lambda leaf: _joined(np.asarray(leaf), place_EK, rows), value)

    sequences = rollout.sequences
    length_EK = np.where(place_EK < 0, 0, np.asarray(sequences.length_B)[place_EK])
    images_B = sequences.images_B  # of each sequence still
    whole = replace(joined(rollout), sequences=replace(joined(sequences), length_B=length_EK, images_B=images_B))
    truncated_EK = np.where(place_EK < 0, False, np.asarray(rollout.truncated_B)[place_EK])
    return (replace(whole, truncated_B=truncated_EK.any(axis=1)), *(joined(value) for value in values))


def sampled_lengths(rollout: RolloutBatch) -> tuple[np.ndarray, np.ndarray]:
    """Return the number of sampled tokens of each response or episode, and whether a limit ended it."""
    length_B, truncated_B = np.asarray(rollout.sequences.mask_BT).sum(axis=1), np.asarray(rollout.truncated_B)
    if rollout.episodes is None:
        return length_B, truncated_B
    start_E = rollout.episodes.start_E
    return np.add.reduceat(length_B, start_E), np.logical_or.reduceat(truncated_B, start_E)


def _places(episodes: EpisodeRows) -> np.ndarray:
    """Return `place_EK`, the row indices of each episode, padded with -1."""
    number_EK = np.arange(episodes.rows_E.max())[None]
    return np.where(number_EK < episodes.rows_E[:, None], episodes.start_E[:, None] + number_EK, -1)


def _joined(leaf: np.ndarray, place_EK: np.ndarray, rows: int) -> np.ndarray:
    """Concatenate an array's rows by episode; a `[B]` array keeps the entry of each episode's first row."""
    assert len(leaf) == rows, f"an array has {len(leaf)} rows, expected {rows}"
    if leaf.ndim == 1:
        return leaf[place_EK[:, 0]]
    there_EK = (place_EK >= 0).reshape(*place_EK.shape, *[1] * (leaf.ndim - 1))
    filled = np.where(there_EK, leaf[place_EK], np.zeros((), leaf.dtype))
    return filled.reshape(len(place_EK), -1, *leaf.shape[2:])

"""Conversion of finished episodes to the rows of a batch."""

import hashlib
from collections.abc import Sequence

import numpy as np

from jaxrlhf.agent_loop.recorded import Finished
from jaxrlhf.batch import EpisodeRows, RolloutBatch, Sequences, padded_rows
from jaxrlhf.conversations.conversation import TokenSequence
from jaxrlhf.episode import TRUNCATIONS


def episodes_to_rollout(finished: Sequence[Finished], *, width: int, sees: bool = False) -> RolloutBatch:
    """Convert the sequences of episodes to left-aligned arrays of `width` columns, grouped by episode.

    Args:
      sees: True if the policy accepts images, even if these episodes have none.
    """
    rows = [(episode, sequence) for episode in finished for sequence in _sequences(episode, width)]
    turn_BT, version_BT = (
        padded_rows([getattr(sequence, name) for _, sequence in rows], width=width, dtype=dtype, padding=-1)
        for name, dtype in (("turn", np.int16), ("version", np.int32))
    )
    reward_BT, anchor_BT = np.zeros(turn_BT.shape, np.float32), np.full(turn_BT.shape, -1, np.int64)
    images_B, record_B = np.empty(len(rows), object), np.empty(len(rows), object)
    for row, (episode, sequence) in enumerate(rows):
        images_B[row], record_B[row] = sequence.images, episode.record
        anchors = np.array([-1 if state is None else _number(state) for state in episode.states], np.int64)
        for turn in np.unique(turn_BT[row][turn_BT[row] >= 0]).tolist():
            places = np.flatnonzero(turn_BT[row] == turn)
            reward_BT[row, places[-1]] = episode.rewards[turn]
            anchor_BT[row, places] = anchors[turn]
    episode_B = np.array([episode.episode for episode, _ in rows], np.int64)
    return RolloutBatch(
        sequences=Sequences.of(
            [sequence.tokens for _, sequence in rows],
            [sequence.mask for _, sequence in rows],
            [episode.problem.prompt_id for episode, _ in rows],
            width=width,
            images_B=images_B if sees else None,
        ),
        sampler_logp_BT=padded_rows([sequence.logps for _, sequence in rows], width=width, dtype=np.float32),
        truncated_B=np.array([episode.record.stop in TRUNCATIONS for episode, _ in rows], bool),
        version_BT=version_BT,
        episodes=EpisodeRows(episode_B, turn_BT, reward_BT, anchor_BT, record_B),
    )


def _sequences(episode: Finished, width: int) -> Sequence[TokenSequence]:
    """Return the sequences of an episode, or if there are none, the problem's prompt without a token to train on."""
    if episode.sequences:
        return episode.sequences
    return [TokenSequence.of(episode.problem.prompt_tokens[:width], (), episode.problem.images)]


def _number(state: object) -> int:
    """Hash a state to a number that is the same in every process."""
    return int.from_bytes(hashlib.blake2b(repr(state).encode(), digest_size=7).digest(), "big")

"""Conversion of finished episodes to the rows of a batch."""

import hashlib
from collections.abc import Sequence

import numpy as np

from jaxrlhf.agent_loop.recorded import Finished
from jaxrlhf.batch import EpisodeBatch, EpisodeRows, RolloutBatch, Sequences
from jaxrlhf.conversations.conversation import TokenSequence
from jaxrlhf.episode import TRUNCATIONS


def to_episode_batch(finished: Sequence[Finished], *, width: int, sees: bool = False) -> EpisodeBatch:
    """Convert the sequences of episodes to left-aligned arrays of `width` columns, grouped by episode.

    Args:
      sees: True if the policy accepts images, even if these episodes have none.
    """
    rows = [(episode, sequence) for episode in finished for sequence in _sequences(episode, width)]
    count = len(rows)
    token_BT, mask_BT = np.zeros((count, width), np.int32), np.zeros((count, width), bool)
    logp_BT, reward_BT = np.zeros((count, width), np.float32), np.zeros((count, width), np.float32)
    turn_BT, anchor_BT = np.full((count, width), -1, np.int16), np.full((count, width), -1, np.int64)
    version_BT = np.full((count, width), -1, np.int32)
    for row, (episode, sequence) in enumerate(rows):
        span = slice(len(sequence.tokens))
        token_BT[row, span], mask_BT[row, span] = sequence.tokens, sequence.mask
        logp_BT[row, span], turn_BT[row, span] = sequence.logps, sequence.turn
        version_BT[row, span] = sequence.version
        anchors = np.array([-1 if state is None else _number(state) for state in episode.states], np.int64)
        for turn in np.unique(turn_BT[row][turn_BT[row] >= 0]).tolist():
            places = np.flatnonzero(turn_BT[row] == turn)
            reward_BT[row, places[-1]] = episode.rewards[turn]
            anchor_BT[row, places] = anchors[turn]
    images_B = np.empty(count, object) if sees else None
    if images_B is not None:
        for row, (_, sequence) in enumerate(rows):
            images_B[row] = sequence.images
    record_E = np.empty(len(finished), object)
    record_E[:] = [episode.record for episode in finished]
    return EpisodeBatch(
        RolloutBatch(
            sequences=Sequences(
                token_BT,
                np.array([len(sequence.tokens) for _, sequence in rows], np.int32),
                mask_BT,
                np.array([episode.problem.prompt_id for episode, _ in rows], np.int64),
                images_B=images_B,
            ),
            sampler_logp_BT=logp_BT,
            truncated_B=np.array([episode.record.stop in TRUNCATIONS for episode, _ in rows]),
            version_BT=version_BT,
            episodes=EpisodeRows(
                np.array([episode.episode for episode, _ in rows], np.int64), turn_BT, reward_BT, anchor_BT
            ),
        ),
        record_E,
    )


def _sequences(episode: Finished, width: int) -> Sequence[TokenSequence]:
    """Return the sequences of an episode, or if there are none, the problem's prompt without a token to train on."""
    if episode.sequences:
        return episode.sequences
    return [TokenSequence.of(episode.problem.prompt_tokens[:width], (), episode.problem.images)]


def _number(state: object) -> int:
    """Hash a state to a number that is the same in every process."""
    return int.from_bytes(hashlib.blake2b(repr(state).encode(), digest_size=7).digest(), "big")

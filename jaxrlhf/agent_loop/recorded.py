"""Finished episodes: of the turn-by-turn loop, and of agent programs as the server recorded them."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from jaxrlhf.batch import Problem
from jaxrlhf.conversations.chat_format import ChatFormat
from jaxrlhf.conversations.conversation import TokenSequence
from jaxrlhf.episode import EpisodeRecord, Message, Reply, StopCause, TurnRecord
from jaxrlhf.serving.sessions import RecordedEpisode


@dataclass(frozen=True)
class Finished:
    """Finished episode.

    Attributes:
      sequences: Token sequences to train on; empty if the policy never replied.
      rewards: Reward of each turn.
      states: State in which each turn was made, for comparison within a group; None if the environment gives no state.
    """

    problem: Problem
    episode: int
    record: EpisodeRecord
    sequences: Sequence[TokenSequence]
    rewards: Sequence[float]
    states: Sequence[object]


def recorded_episode(
    problem: Problem,
    episode: int,
    environment: int,
    format: ChatFormat,
    recorded: RecordedEpisode,
    score: float | None,
    stop: StopCause,
    detail: str,
) -> Finished:
    """Build the finished episode of an agent program.

    Turns are numbered consecutively across all sequences. The episode's reward is the program's score plus the rewards
    posted for single answers.

    Args:
      score: Score that the program returned; None uses the score posted for the episode.
    """
    sequences: list[TokenSequence] = []
    rewards: list[float] = []
    turns: list[TurnRecord] = []
    texts: list[str] = []
    for row, sequence in enumerate(recorded.sequences):
        own = sorted({turn for turn in sequence.turn if turn >= 0})
        numbers = {turn: len(rewards) + place for place, turn in enumerate(own)}
        rewards += [float(recorded.rewards.get((row, turn), 0.0)) for turn in own]
        sequences.append(replace(sequence, turn=tuple(numbers.get(turn, -1) for turn in sequence.turn)))
        opening, spoken = _spoken(sequence, recorded.replies[row], format)
        texts.append(opening)
        turns += spoken
    turns = [replace(turn, reward=reward) for turn, reward in zip(turns, rewards, strict=True)]
    final = recorded.reward if score is None else score
    paid = sum(rewards) + (final or 0.0) if rewards or final is not None else None
    if final is not None and rewards:
        rewards[-1] += final
    forks = {str(cause): count for cause, count in recorded.forks.items()}
    branches = len(sequences) - 1 - sum(forks.values())
    record = EpisodeRecord(
        opening=[{"role": "user", "content": texts[0]}] if texts else list(problem.messages),
        turns=turns,
        stop=stop,
        environment=environment,
        failure=detail,
        environment_reward=paid,
        metrics={f"refused_{limit}": float(count) for limit, count in recorded.refused.items()},
        forks={**forks, "branch": branches} if branches > 0 else forks,
    )
    return Finished(problem, episode, record, sequences, rewards, [None] * len(rewards))


def _spoken(
    sequence: TokenSequence, replies: Sequence[Reply | None], format: ChatFormat
) -> tuple[str, list[TurnRecord]]:
    """Return the text before the first reply of a sequence, and each reply with the text that follows it."""
    turn_T = np.array(sequence.turn)
    changes = [0, *(np.flatnonzero(np.diff(turn_T)) + 1).tolist(), len(turn_T)]
    opening, turns = "", list[TurnRecord]()
    for start, end in pairwise(changes):
        tokens = sequence.tokens[start:end]
        if turn_T[start] >= 0:
            turns.append(TurnRecord(replies[int(turn_T[start])] or format.parse(tokens)))
            continue
        text = str(format.tokenizer.decode(list(tokens)))
        if turns:
            message: Message = {"role": "user", "content": text}
            turns[-1] = replace(turns[-1], observed=[message])
        else:
            opening = text
    return opening, turns

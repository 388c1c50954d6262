"""Adapter for environments of NeMo RL: their `step` takes a batch of conversations, an episode is a batch of one.

In a file of yours, for `Environment(factory="my_puzzle.py:puzzle")`:

    from nemo_rl.environments.games.sliding_puzzle import SlidingPuzzleEnv, SlidingPuzzleGameLogic

    def begin(record, seed):
        game = SlidingPuzzleGameLogic.generate({"size": 2, "shuffle_moves": 3})
        return SlidingPuzzleGameLogic.init(game), {"game_state": game, "num_moves": 0, "max_moves": 12}

    puzzle = NemoRL(SlidingPuzzleEnv, begin=begin)
"""

from collections.abc import Callable, Mapping
from copy import copy
from functools import partial
from typing import Any, Self

from jaxrlhf.episode import Observation, Reply


class NemoRL:
    """Conversation with an environment, as a batch of one; a call returns the instance for an episode.

    The policy sees the environment's messages as user messages. Stop strings that the environment requests belong into
    `Sampling.stop_tokens`. Rewards of several parts are summed.

    Args:
      kind: Class of the environment, or the Ray actor made from the class; it runs in the episode's process.
      begin: Function of a record and of the group's seed that returns the first message's text and the metadata.
      settings: Arguments of the class.
    """

    _environment: Any

    def __init__(
        self, kind: Any, *settings: Any, begin: Callable[[Mapping[str, Any], int], tuple[str, Any]], **named: Any
    ) -> None:
        actor = getattr(kind, "__ray_metadata__", None)
        self._make, self._begin = partial(actor.modified_class if actor else kind, *settings, **named), begin

    def __call__(self) -> Self:
        game = copy(self)
        game._environment = self._make()
        return game

    def reset(self, record: Mapping[str, Any], seed: int) -> str:
        """Return the first message."""
        text, self._metadata = self._begin(record, seed)
        self._messages = [{"role": "user", "content": text}]
        return text

    def step(self, reply: Reply) -> Observation:
        """Step the environment; metadata of None leaves the metadata unchanged."""
        self._messages.append({"role": "assistant", "content": reply.text})
        returned = self._environment.step([self._messages], [self._metadata])
        answer, [metadata] = returned.observations[0], returned.metadata
        self._metadata = self._metadata if metadata is None else metadata
        self._messages.append(answer)
        reward, done = float(returned.rewards[0].sum()), bool(returned.terminateds[0])
        return Observation([{"role": "user", "content": answer["content"]}], reward, done)

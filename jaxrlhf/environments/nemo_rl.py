"""Environments of NeMo RL, whose `step` takes a batch of conversations; an episode is a batch of one.

In a file of yours, for `Environment(factory="my_puzzle.py:puzzle")`:

    from nemo_rl.environments.games.sliding_puzzle import SlidingPuzzleEnv, SlidingPuzzleGameLogic

    def begin(record, seed):
        game = SlidingPuzzleGameLogic.generate({"size": 2, "shuffle_moves": 3})
        return SlidingPuzzleGameLogic.init(game), {"game_state": game, "num_moves": 0, "max_moves": 12}

    puzzle = NemoRL(SlidingPuzzleEnv, begin=begin)
"""

from collections.abc import Callable, Mapping
from typing import Any

from jaxrlhf.episode import Observation, Reply


class NemoRL:
    """Factory of episodes in an environment.

    Args:
      kind: Class of the environment, or actor of Ray's that was made of it; it runs in the episode's process.
      begin: The first message's text and the metadata, made of a record and of the seed that a group shares.
      settings: Arguments of the class.
    """

    def __init__(
        self, kind: Any, *settings: Any, begin: Callable[[Mapping[str, Any], int], tuple[str, Any]], **named: Any
    ) -> None:
        actor = getattr(kind, "__ray_metadata__", None)
        self._kind, self._begin = (actor.modified_class if actor else kind), begin
        self._settings, self._named = settings, named

    def __call__(self) -> "BatchOfOne":
        return BatchOfOne(self._kind(*self._settings, **self._named), self._begin)


class BatchOfOne:
    """A conversation with an environment, whose messages the policy reads as a user's.

    Stop texts that it asks for belong into `Sampling.stop_tokens`. Rewards of several parts are summed.
    """

    def __init__(self, environment: Any, begin: Callable[[Mapping[str, Any], int], tuple[str, Any]]) -> None:
        self._environment, self._begin = environment, begin

    def reset(self, record: Mapping[str, Any], seed: int) -> str:
        """The first message."""
        text, self._metadata = self._begin(record, seed)
        self._said = [{"role": "user", "content": text}]
        return text

    def step(self, reply: Reply) -> Observation:
        """Have the environment take a step; metadata of None is as before."""
        self._said.append({"role": "assistant", "content": reply.text})
        seen = self._environment.step([self._said], [self._metadata])
        told, [metadata] = seen.observations[0], seen.metadata
        self._metadata = self._metadata if metadata is None else metadata
        self._said.append(told)
        reward, done = float(seen.rewards[0].sum()), bool(seen.terminateds[0])
        return Observation([{"role": "user", "content": told["content"]}], reward, done)

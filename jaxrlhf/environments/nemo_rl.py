"""Adapter for environments of NeMo RL: their `step` takes a batch of conversations, an episode is a batch of one.

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
      kind: Class of the environment, or the Ray actor made from the class; it runs in the episode's process.
      begin: Function of a record and of the group's seed that returns the first message's text and the metadata.
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
    """Conversation with an environment; the policy sees the environment's messages as user messages.

    Stop strings that the environment requests belong into `Sampling.stop_tokens`. Rewards of several parts are summed.
    """

    def __init__(self, environment: Any, begin: Callable[[Mapping[str, Any], int], tuple[str, Any]]) -> None:
        self._environment, self._begin = environment, begin

    def reset(self, record: Mapping[str, Any], seed: int) -> str:
        """Return the first message."""
        text, self._metadata = self._begin(record, seed)
        self._said = [{"role": "user", "content": text}]
        return text

    def step(self, reply: Reply) -> Observation:
        """Step the environment; metadata of None leaves the metadata unchanged."""
        self._said.append({"role": "assistant", "content": reply.text})
        seen = self._environment.step([self._said], [self._metadata])
        told, [metadata] = seen.observations[0], seen.metadata
        self._metadata = self._metadata if metadata is None else metadata
        self._said.append(told)
        reward, done = float(seen.rewards[0].sum()), bool(seen.terminateds[0])
        return Observation([{"role": "user", "content": told["content"]}], reward, done)

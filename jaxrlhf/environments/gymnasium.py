"""Adapter for gymnasium environments with discrete actions, as text games; needs `jaxrlhf[environments]`.

In a file of yours, for `Environment(factory="my_games.py:lake")`:

    lake = Gymnasium("FrozenLake-v1", actions=("left", "down", "right", "up"), prompt="Go to G; H is a hole.",
                     is_slippery=False, render_mode="ansi")
"""

import re
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from typing import Any, Self

from jaxrlhf.episode import Observation, Opening, Reply

_UNDER_CURSOR = re.compile(r"\x1b\[4\dm(.*?)\x1b\[0m", re.DOTALL)
_COLOUR = re.compile(r"\x1b\[[\d;]*m")


class Gymnasium:
    """Environment whose state is shown as text; a call returns the instance for an episode.

    The last action word in a reply is played.

    Args:
      name: Name in gymnasium's registry.
      actions: Words for the actions, in the order of their numbers; empty uses the numbers.
      prompt: Text before the first view.
      view: Function of the environment and its observation that returns the text of a state. The default returns the
        drawing of `render_mode="ansi"`, the cell under the cursor in brackets, or in other modes the observation.
      settings: Arguments of `gymnasium.make`.
    """

    _game: Any
    _actions: Mapping[str, int]
    _word: re.Pattern[str]

    def __init__(
        self,
        name: str,
        *,
        actions: Sequence[str] = (),
        prompt: str = "",
        view: Callable[[Any, Any], str] | None = None,
        **settings: Any,
    ) -> None:
        self._name, self._words, self._prompt, self._view = name, tuple(actions), prompt, view or ansi_drawing
        self._settings = settings

    def __call__(self) -> Self:
        import gymnasium

        episode = copy(self)
        episode._game = gymnasium.make(self._name, **self._settings)
        space = episode._game.action_space
        if not isinstance(space, gymnasium.spaces.Discrete):
            raise ValueError(f"{self._name} has actions {space}; only discrete actions can be words")
        first, count = int(space.start), int(space.n)
        if self._words and len(self._words) != count:
            raise ValueError(f"{self._name} has {count} actions, got {len(self._words)} words for them")
        words = self._words or tuple(str(first + number) for number in range(count))
        episode._actions = {word.lower(): first + number for number, word in enumerate(words)}
        longest_first = sorted(episode._actions, key=len, reverse=True)
        episode._word = re.compile(rf"(?<!\w)({'|'.join(map(re.escape, longest_first))})(?!\w)", re.IGNORECASE)
        return episode

    def reset(self, record: Mapping[str, Any], seed: int) -> Opening:
        """Start a game and return the prompt with the first state; equal seeds give equal games."""
        observation, _ = self._game.reset(seed=seed % 2**32)
        self._seen, self._missed = self._view(self._game, observation), 0.0
        text = "\n".join([*([self._prompt] if self._prompt else []), self._seen])
        return Opening([{"role": "user", "content": text}], state=self._seen)

    def step(self, reply: Reply) -> Observation:
        """Play an action; a reply without an action only uses up a turn."""
        found = self._word.findall(reply.content)
        self._missed += not found
        metrics = {"no_action": self._missed}  # total so far, because only the last value of a metric counts
        if not found:
            text = f"Say one of {', '.join(self._actions)}."
            return Observation([{"role": "user", "content": text}], state=self._seen, metrics=metrics)
        observation, reward, done, truncated, _ = self._game.step(self._actions[found[-1].lower()])
        text = self._seen = self._view(self._game, observation)
        return Observation(
            [{"role": "user", "content": text}], float(reward), bool(done), bool(truncated), text, metrics
        )

    def close(self) -> None:
        self._game.close()


def ansi_drawing(game: Any, observation: Any) -> str:
    """Return the environment's text drawing of a state, or the observation as text if `render_mode` is not "ansi"."""
    if game.render_mode != "ansi":
        return str(observation)
    return _COLOUR.sub("", _UNDER_CURSOR.sub(r"[\1]", game.render())).strip("\n")

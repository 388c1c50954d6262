"""Adapter for gymnasium environments with discrete actions, as text games; needs `jaxrlhf[environments]`.

In a file of yours, for `Environment(factory="my_games.py:lake")`:

    lake = Gymnasium("FrozenLake-v1", actions=("left", "down", "right", "up"), prompt="Go to G; H is a hole.",
                     is_slippery=False, render_mode="ansi")
"""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxrlhf.episode import Observation, Opening, Reply

_UNDER_CURSOR = re.compile(r"\x1b\[4\dm(.*?)\x1b\[0m", re.DOTALL)
_COLOUR = re.compile(r"\x1b\[[\d;]*m")


class Gymnasium:
    """Factory of instances of one environment.

    Args:
      name: Name in gymnasium's registry.
      actions: Words for the actions, in the order of their numbers; empty uses the numbers.
      prompt: Text before the first view.
      view: Function of the environment and its observation that returns the text of a state. The default returns the
        drawing of `render_mode="ansi"`, the cell under the cursor in brackets, or in other modes the observation.
      settings: Arguments of `gymnasium.make`.
    """

    def __init__(
        self,
        name: str,
        *,
        actions: Sequence[str] = (),
        prompt: str = "",
        view: Callable[[Any, Any], str] | None = None,
        **settings: Any,
    ) -> None:
        self._name, self._actions, self._prompt, self._view = name, tuple(actions), prompt, view or drawn
        self._settings = settings

    def __call__(self) -> "TextGame":
        import gymnasium

        game = gymnasium.make(self._name, **self._settings)
        space = game.action_space
        if not isinstance(space, gymnasium.spaces.Discrete):
            raise ValueError(f"{self._name} has actions {space}; words can be given to discrete ones alone")
        first, count = int(space.start), int(space.n)
        if self._actions and len(self._actions) != count:
            raise ValueError(f"{self._name} has {count} actions, got {len(self._actions)} words for them")
        words = self._actions or tuple(str(first + number) for number in range(count))
        return TextGame(
            game, {word.lower(): first + number for number, word in enumerate(words)}, self._prompt, self._view
        )


class TextGame:
    """Game whose state is shown as text; the last action word in a reply is played."""

    def __init__(self, game: Any, actions: Mapping[str, int], prompt: str, view: Callable[[Any, Any], str]) -> None:
        self._game, self._actions, self._prompt, self._view = game, actions, prompt, view
        words = "|".join(re.escape(word) for word in sorted(actions, key=len, reverse=True))
        self._word = re.compile(rf"(?<!\w)({words})(?!\w)", re.IGNORECASE)

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


def drawn(game: Any, observation: Any) -> str:
    """Return the environment's text drawing of a state, or the observation as text if `render_mode` is not "ansi"."""
    if game.render_mode != "ansi":
        return str(observation)
    return _COLOUR.sub("", _UNDER_CURSOR.sub(r"[\1]", game.render())).strip("\n")

"""Adapter for environments on an OpenEnv server, played through OpenEnv's client; needs `jaxrlhf[openenv]`.

In a file of yours, for `Environment(factory="my_games.py:grid")`:

    grid = OpenEnv("http://127.0.0.1:8000", action=move, view=lambda seen: f"{seen['x']},{seen['y']}", seeded=False)

    def move(reply):
        word = reply.content.strip().upper()
        return {"action": word} if word in ("UP", "DOWN", "LEFT", "RIGHT") else "Say up, down, left or right."
"""

from collections.abc import Callable, Mapping
from copy import copy
from functools import partial
from typing import Any, Self

from jaxrlhf.episode import Observation, Opening, Reply


class OpenEnv:
    """Session with a server's environment; a call returns the session of an episode.

    The state is the text of the last observation.

    Args:
      action: Function of a reply that returns the fields of an action, or a text for the policy if the reply is not an
        action.
      view: Function of an observation's fields that returns a text; the default is `str`.
      prompt: Text before the first view.
      seeded: True if `reset` receives a seed; some environments do not accept a seed.
    """

    _client: Any

    def __init__(
        self,
        address: str,
        *,
        action: Callable[[Reply], Mapping[str, Any] | str],
        view: Callable[[Mapping[str, Any]], str] = str,
        prompt: str = "",
        seeded: bool = True,
    ) -> None:
        from openenv.core.generic_client import GenericEnvClient  # imported once, in the fork server

        self._connect = partial(GenericEnvClient, base_url=address)
        self._action, self._view, self._prompt, self._seeded = action, view, prompt, seeded

    def __call__(self) -> Self:
        session = copy(self)
        session._client = self._connect()
        return session

    async def reset(self, record: Mapping[str, Any], seed: int) -> Opening:
        """Start an episode and return the prompt with the first view."""
        started = await self._client.reset(**({"seed": seed % 2**31} if self._seeded else {}))
        self._state = self._view(started.observation)
        text = "\n".join(filter(None, [self._prompt, self._state]))
        return Opening([{"role": "user", "content": text}], state=self._state)

    async def step(self, reply: Reply) -> Observation:
        """Send the reply as an action; an action that the server refuses counts as an environment failure."""
        action = self._action(reply)
        if isinstance(action, str):
            return Observation([{"role": "user", "content": action}], state=self._state)
        result = await self._client.step(dict(action))
        self._state = self._view(result.observation)
        messages = [{"role": "user", "content": self._state}]
        return Observation(messages, float(result.reward or 0.0), result.done, state=self._state)

    async def close(self) -> None:
        await self._client.close()

"""Adapter for environments on an OpenEnv server, played through OpenEnv's client; needs `jaxrlhf[openenv]`.

In a file of yours, for `Environment(factory="my_games.py:grid")`:

    grid = OpenEnv("http://127.0.0.1:8000", action=move, view=lambda seen: f"{seen['x']},{seen['y']}", seeded=False)

    def move(reply):
        word = reply.content.strip().upper()
        return {"action": word} if word in ("UP", "DOWN", "LEFT", "RIGHT") else "Say up, down, left or right."
"""

from collections.abc import Callable, Mapping
from typing import Any

from jaxrlhf.episode import Observation, Opening, Reply


class OpenEnv:
    """Factory of sessions with one server; each session is an instance of the server's environment.

    Args:
      action: Function of a reply that returns the fields of an action, or a text for the policy if the reply is not an
        action.
      view: Function of an observation's fields that returns a text; the default is `str`.
      prompt: Text before the first view.
      seeded: True if `reset` receives a seed; some environments do not accept a seed.
    """

    def __init__(
        self,
        address: str,
        *,
        action: Callable[[Reply], Mapping[str, Any] | str],
        view: Callable[[Mapping[str, Any]], str] = str,
        prompt: str = "",
        seeded: bool = True,
    ) -> None:
        import openenv.core.generic_client  # noqa: F401 - imported once, in the fork server

        self.address, self.action, self.view, self.prompt, self.seeded = address, action, view, prompt, seeded

    def __call__(self) -> "ServedGame":
        return ServedGame(self)


class ServedGame:
    """Session with the server; the state is the text of the last observation."""

    def __init__(self, server: OpenEnv) -> None:
        from openenv.core.generic_client import GenericEnvClient

        self._server, self._client = server, GenericEnvClient(base_url=server.address)

    async def reset(self, record: Mapping[str, Any], seed: int) -> Opening:
        """Start an episode and return the prompt with the first view."""
        begun = await self._client.reset(**({"seed": seed % 2**31} if self._server.seeded else {}))
        self._state = self._server.view(begun.observation)
        text = "\n".join(filter(None, [self._server.prompt, self._state]))
        return Opening([{"role": "user", "content": text}], state=self._state)

    async def step(self, reply: Reply) -> Observation:
        """Send the reply as an action; an action that the server refuses counts as an environment failure."""
        action = self._server.action(reply)
        if isinstance(action, str):
            return Observation([{"role": "user", "content": action}], state=self._state)
        seen = await self._client.step(dict(action))
        self._state = self._server.view(seen.observation)
        told = [{"role": "user", "content": self._state}]
        return Observation(told, float(seen.reward or 0.0), seen.done, state=self._state)

    async def close(self) -> None:
        await self._client.close()

"""Games of several turns, whose best play is known."""

from collections.abc import Mapping
from typing import Any

from jaxrlhf.episode import Observation, Opening, Reply


class Treasure:
    """A path of nine places, on which the policy goes step by step to a treasure; 1 is paid for reaching it.

    A reply is L or R and is told the new place; a step over an end leads nowhere, and any other reply is told `?`. The
    state is the place.
    """

    def reset(self, record: Mapping[str, Any], seed: int) -> Opening:
        """Begin at the first place of the record's prompt, `place>treasure`."""
        self._place, self._treasure = map(int, record["prompt"].split(">"))
        return Opening(state=self._place)

    def step(self, reply: Reply) -> Observation:
        """Go a step."""
        if reply.text not in ("L", "R"):
            return self._told("?")
        self._place = min(max(self._place + (1 if reply.text == "R" else -1), 1), 9)
        if self._place == self._treasure:
            return Observation(reward=1.0, done=True)
        return self._told(str(self._place))

    def _told(self, text: str) -> Observation:
        return Observation([{"role": "user", "content": text}], state=self._place)

"""Games of several turns, whose best play is known."""

import re
from collections.abc import Mapping
from typing import Any

from jaxrlhf.episode import Observation, Opening, Reply


class HigherLower:
    """A number to be guessed, of which one is told if it is higher (`>`) or lower (`<`); 1 is paid for finding it.

    The state is what the answers so far leave: the least and the largest number that it may be.
    """

    def reset(self, record: Mapping[str, Any], seed: int) -> Opening:
        """Take the record's `secret`, a number from 1 to the one in its prompt."""
        self._secret = int(record["secret"])
        self._low, self._high = 1, int(re.findall(r"\d+", record["prompt"])[-1])
        return Opening(messages=(), state=(self._low, self._high))

    def step(self, reply: Reply) -> Observation:
        """Compare the reply's number; anything else is no guess and costs a turn."""
        guess = int(reply.text) if re.fullmatch("[0-9]{1,9}", reply.text) else None
        if guess is None:
            return self._told("?")
        if guess == self._secret:
            return Observation(reward=1.0, done=True)
        if guess < self._secret:
            self._low = max(self._low, guess + 1)
            return self._told(">")
        self._high = min(self._high, guess - 1)
        return self._told("<")

    def _told(self, sign: str) -> Observation:
        return Observation([{"role": "user", "content": sign}], state=(self._low, self._high))

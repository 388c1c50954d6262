"""Multi-turn games with a known optimal strategy."""

import re
from collections.abc import Mapping
from typing import Any

from jaxrlhf.environments.gymnasium import Gymnasium
from jaxrlhf.episode import Observation, Opening, Reply

lake = Gymnasium("FrozenLake-v1", actions=("L", "D", "R", "U"), is_slippery=False)
"""Gymnasium's frozen lake of 4 x 4 cells; the state is shown as the cell's number; needs `jaxrlhf[environments]`."""


class Treasure:
    """Path of nine places, on which the policy walks step by step to a treasure; the reward for reaching it is 1.

    A reply is L or R, and the observation is the new place. A step beyond an end leaves the place unchanged, and any
    other reply is answered with `?`. The state is the place.
    """

    def reset(self, record: Mapping[str, Any], seed: int) -> Opening:
        """Start at the place given in the record's prompt, `place>treasure`."""
        self._place, self._treasure = map(int, record["prompt"].split(">"))
        return Opening(state=self._place)

    def step(self, reply: Reply) -> Observation:
        """Move one step."""
        if reply.text not in ("L", "R"):
            return self._state("?")
        self._place = min(max(self._place + (1 if reply.text == "R" else -1), 1), 9)
        if self._place == self._treasure:
            return Observation(reward=1.0, done=True)
        return self._state(str(self._place))

    def _state(self, text: str) -> Observation:
        return Observation([{"role": "user", "content": text}], state=self._place)


class HigherLower:
    """Guessing game: each guess is answered with the range that is left; the reward for the secret number is 1.

    The state is the range that is left. Success rates with three guesses at a number from 1 to 7: bisection 100 %,
    random guesses within the range 67.8 %, guesses that ignore the answers 42.9 %. With seven guesses at a number from
    1 to 64 the rates are 100, 64.3 and 10.9 %.
    """

    def reset(self, record: Mapping[str, Any], seed: int) -> Opening:
        """Start with the range of the record's prompt, `lowest-highest`; the record's `answer` is the secret."""
        self._lowest, self._highest = map(int, record["prompt"].split("-"))
        self._secret = int(record["answer"])
        return Opening(state=record["prompt"])

    def step(self, reply: Reply) -> Observation:
        """Answer a guess; a guess that is not a number or not in the range leaves the range unchanged."""
        guess = int(reply.text) if re.fullmatch("[0-9]{1,9}", reply.text) else -1
        if guess == self._secret:
            return Observation(reward=1.0, done=True)
        if self._lowest <= guess < self._secret:
            self._lowest = guess + 1
        elif self._secret < guess <= self._highest:
            self._highest = guess - 1
        left = f"{self._lowest}-{self._highest}"
        return Observation([{"role": "user", "content": left}], state=left)

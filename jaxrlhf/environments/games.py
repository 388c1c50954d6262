"""Games of several turns, whose best play is known."""

import re
from collections.abc import Mapping
from typing import Any

from jaxrlhf.environments.gymnasium import Gymnasium
from jaxrlhf.episode import Observation, Opening, Reply

lake = Gymnasium("FrozenLake-v1", actions=("L", "D", "R", "U"), is_slippery=False)
"""Gymnasium's frozen lake of 4 x 4 cells, told by the number of the cell; needs `jaxrlhf[environments]`."""


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


class HigherLower:
    """A secret number, to be guessed; each guess is told the numbers that are left, and 1 is paid for the right one.

    The state is the numbers that are left. With three guesses at a number from 1 to 7, halving what is left always
    finds it, guessing any that is left finds 67.8 % of the numbers, and guessing without listening 42.9 %; with seven
    guesses at one from 1 to 64 that is 100, 64.3 and 10.9 %.
    """

    def reset(self, record: Mapping[str, Any], seed: int) -> Opening:
        """Begin with all numbers of the record's prompt, `lowest-highest`; its `answer` is the secret."""
        self._lowest, self._highest = map(int, record["prompt"].split("-"))
        self._secret = int(record["answer"])
        return Opening(state=record["prompt"])

    def step(self, reply: Reply) -> Observation:
        """Answer a guess; one that is no number, or not among those left, tells nothing new."""
        guess = int(reply.text) if re.fullmatch("[0-9]{1,9}", reply.text) else -1
        if guess == self._secret:
            return Observation(reward=1.0, done=True)
        if self._lowest <= guess < self._secret:
            self._lowest = guess + 1
        elif self._secret < guess <= self._highest:
            self._highest = guess - 1
        left = f"{self._lowest}-{self._highest}"
        return Observation([{"role": "user", "content": left}], state=left)

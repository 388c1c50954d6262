"""Environment of `turns.py` and `slow_tools.py`, in a separate file so that it loads quickly."""

import random
import time
from typing import Any

from jaxrlhf.episode import Observation, Reply

ANSWER_DIGITS = 24


TURNS = 6


def records(split: str, count: int, seed: int) -> list[dict[str, Any]]:
    """Return records of episodes whose answers take 0 to 2 s each."""
    return [{"prompt": "", "number": number, "turns": TURNS, "pause_s": 2.0} for number in range(count)]


class Talks:
    """Environment that answers with digits after a pause, sampled by record and turn; the last reply ends the episode.

    The reward is the share of digits in the last reply.
    """

    def reset(self, record: dict[str, Any], seed: int) -> str:
        self._record, self._turn = record, 0
        return "".join(random.Random(record["number"]).choices("0123456789", k=16))

    def step(self, reply: Reply) -> Observation:
        dice = random.Random(f"{self._record['number']} {self._turn}")
        self._turn += 1
        if self._turn == self._record["turns"]:
            digits = sum(letter.isdigit() for letter in reply.text)
            return Observation(done=True, reward=digits / max(len(reply.text), 1))
        time.sleep(dice.uniform(0, self._record["pause_s"]))
        return Observation([{"role": "user", "content": "".join(dice.choices("0123456789", k=ANSWER_DIGITS))}])

"""Environment of `bench_agents.py`, in a file of its own that loads quickly."""

import random
import time
from typing import Any

from jaxrlhf.episode import Observation, Reply

ANSWER_DIGITS = 24


class Talks:
    """Answers with digits after a pause that depends on the record and the turn; the last reply ends the episode."""

    def reset(self, record: dict[str, Any], seed: int) -> str:
        self._record, self._turn = record, 0
        return "".join(random.Random(record["number"]).choices("0123456789", k=16))

    def step(self, reply: Reply) -> Observation:
        dice = random.Random(f"{self._record['number']} {self._turn}")
        self._turn += 1
        if self._turn == self._record["turns"]:
            return Observation(done=True)
        time.sleep(dice.uniform(0, self._record["pause_s"]))
        return Observation([{"role": "user", "content": "".join(dice.choices("0123456789", k=ANSWER_DIGITS))}])

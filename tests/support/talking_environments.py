"""Environments with a fixed number of turns."""

import hashlib
import secrets
import time

from jaxrlhf.episode import Observation, Opening


def digits(*parts, count=5):
    """Return digits that depend only on the arguments."""
    return str(int(hashlib.sha256(repr(parts).encode()).hexdigest(), 16))[:count]


class Talks:
    """Environment that answers, after the record's pause, with digits that depend on all earlier replies."""

    def reset(self, record, seed):
        self._turns, self._pause_s, self._heard = record["turns"], record.get("pause_s", 0.0), [seed]
        return Opening(messages=[{"role": "user", "content": digits(seed)}], state=1)

    def step(self, reply):
        time.sleep(self._pause_s)
        self._heard.append(reply.text)
        done = len(self._heard) > self._turns
        said = digits(self._heard)
        return Observation(
            messages=() if done else [{"role": "user", "content": said}],
            reward=int(said[0]) / 10,
            done=done,
            state=len(self._heard) % 2,
            metrics={"heard": len(self._heard)},
        )


class Dawdles(Talks):
    """Environment that pauses before random answers, one in four."""

    def step(self, reply):
        time.sleep(secrets.choice((0.0, 0.0, 0.0, 0.3)))
        return super().step(reply)


class PaysLate(Talks):
    """Environment whose final reward is slow."""

    def reset(self, record, seed):
        self._late_s = record["pause_s"]
        return super().reset({**record, "pause_s": 0.0}, seed)

    def get_reward(self):
        time.sleep(self._late_s)
        return 7.0


class GivesUp:
    """Environment that truncates its episode after the first reply, like gymnasium."""

    def reset(self, record, seed):
        return "?"

    def step(self, reply):
        return Observation(truncated=True)


def calculator(expression: str) -> str:
    """Compute an arithmetic expression.

    Args:
        expression: Such as "47*86".
    """
    return "7"


class Answers:
    """An environment in TRL's form: its methods are tools."""

    def reset(self, turns, **record):
        self._asked = 0
        return " Ask."

    def ask(self, number: int) -> str:
        """Ask.

        Args:
            number: Any number.
        """
        self._asked += 1
        return str(number + 1)

    def get_reward(self):
        return float(self._asked)

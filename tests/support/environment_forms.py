"""Tools, environments and agent programs of every form that a user may write."""

import asyncio
import os
import random
import time

from jaxrlhf.episode import Observation, Opening


def add(a: int, b: int) -> int:
    """Adds two numbers.

    Args:
        a: The first.
        b: The second.
    """
    return a + b


def draw() -> float:
    """Draws from the global generator."""
    return random.random()


def sleep(seconds: float) -> str:
    """Blocks.

    Args:
        seconds: How long.
    """
    time.sleep(seconds)
    return f"slept {seconds}"


async def wait(seconds: float) -> str:
    """Waits.

    Args:
        seconds: How long.
    """
    await asyncio.sleep(seconds)
    return f"waited {seconds}"


def long(length: int) -> str:
    """Says much.

    Args:
        length: How much.
    """
    return "x" * length


def process() -> int:
    """Process that the tool runs in."""
    return os.getpid()


class Counter:
    """Game: say numbers until their sum is the record's target; the seed is part of the opening."""

    def reset(self, record, seed):
        self.sum, self.target, self.seed, self.paid = 0, record["target"], seed, record.get("paid")
        return [{"role": "system", "content": "count"}, {"role": "user", "content": f"to {self.target} ({seed})"}]

    def step(self, reply):
        self.sum += int(reply.text)
        done = self.sum >= self.target
        return Observation(
            [] if done else [{"role": "user", "content": f"{self.sum}"}],
            reward=1.0 if self.sum == self.target else 0.0,
            done=done,
            state=("sum", self.sum),
            metrics={"sum": self.sum},
            max_tokens=5,
        )

    def get_reward(self):
        return self.paid

    def close(self):
        print(f"closed with seed {self.seed}")


class AsyncCounter(Counter):
    """Counter with async methods."""

    async def reset(self, record, *, seed):
        await asyncio.sleep(0)
        return super().reset(record, seed)

    async def step(self, reply):
        await asyncio.sleep(0.01)
        return super().step(reply)

    async def close(self):
        await asyncio.sleep(0)
        super().close()


class Brief:
    """Shortest form: texts and tuples, no seed, no close."""

    def reset(self, record):
        self.turns = 0
        return f"say {record['word']}"

    def step(self, reply):
        self.turns += 1
        if reply.text == "five":
            return "again", 0.5, False, True, {}
        return ("well", 1, True) if self.turns == 2 else "once more"


def made():
    """Factory of an environment."""
    return Brief()


class Account:
    """Methods are tools, as in TRL."""

    def __init__(self):
        self.money = 0

    def reset(self, **record):
        self.money = record.get("money", 0)
        return f" You have {self.money}."

    def deposit(self, amount: int) -> str:
        """Puts money in.

        Args:
            amount: How much.
        """
        if amount < 0:
            raise ValueError("amounts are not negative")
        self.money += amount
        return f"{self.money}"

    async def interest(self, percent: int) -> str:
        """Adds interest.

        Args:
            percent: Share that is added.
        """
        await asyncio.sleep(0.01)
        self.money += self.money * percent // 100
        return f"{self.money}"

    def get_reward(self):
        return float(self.money)

    def _hidden(self):
        return "no tool"


class Tooled:
    """An environment whose tools depend on the record."""

    def reset(self, record, seed):
        schema = {"type": "function", "function": {"name": record["tool"], "description": "", "parameters": {}}}
        return Opening([{"role": "user", "content": "use it"}], [schema])

    def step(self, reply):
        return "", random.random(), True


class Slow(Brief):
    """Environment whose factory and `reset` are slow."""

    def __init__(self):
        time.sleep(0.6)

    def reset(self, record):
        time.sleep(0.6)
        return super().reset(record)


def run(session, record):
    """Agent program that checks its session."""
    assert os.environ["OPENAI_BASE_URL"] == session.base_url and os.environ["OPENAI_API_KEY"] == session.api_key
    assert session.record == record
    return record["score"] + session.seed


async def run_async(session, record):
    """Async agent program that checks its session."""
    await asyncio.sleep(0.1)
    return None if record["score"] is None else run(session, record)

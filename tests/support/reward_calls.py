"""Calls of all functions of a reward pool."""

from collections.abc import Iterable, Iterator

from jaxrlhf.rewards.pool import ExampleCalls, Outcome, RewardPool, pack
from jaxrlhf.rewards.protocol import Example


def start(pool: RewardPool, examples: Iterable[Example]) -> list[ExampleCalls]:
    """Submit examples to every function of the pool."""
    functions = range(len(pool._functions))
    return pool.start((pack(example), functions) for example in examples)


def run(pool: RewardPool, examples: Iterable[Example]) -> Iterator[Outcome]:
    """Submit examples to every function of the pool, and return the outcomes in the order of completion."""
    return pool.outcomes(start(pool, examples))

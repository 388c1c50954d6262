"""Rewards, a conversation and preference pairs for the claims; processes of users' code load this file alone."""

import random
from collections.abc import Iterator, Mapping
from typing import Any

from jaxrlhf.environments.calculator import calculator
from jaxrlhf.episode import Observation, Opening, Reply

NOUNS = (
    *("fox", "river", "lamp", "violin", "garden", "bridge", "teacher", "storm", "bakery", "train", "owl", "harbour"),
    *("mountain", "kettle", "sailor", "library", "meadow", "engine", "painter", "candle", "valley", "tiger"),
    *("market", "doctor", "forest", "window", "piano", "island", "farmer", "castle", "desert", "rabbit"),
)
HELD_OUT_NOUNS = ("comet", "orchard", "ladder", "pilot", "canyon", "clock", "whale", "tower")
ADJECTIVES = ("quiet", "bright", "old", "gentle", "busy", "strange", "small", "proud", "calm", "lively")
TURNS = 10


def lowercase(prompt: str, response: str, answer: str | None, record: Mapping[str, Any]) -> float:
    """Share of a response's letters that are lowercase."""
    letters = [letter for letter in response if letter.isalpha()]
    return sum(letter.islower() for letter in letters) / max(1, len(letters))


def vowels(prompt: str, response: str, answer: str | None, record: Mapping[str, Any]) -> float:
    """Share of a response's characters that are vowels, a score that differs between any two responses."""
    return sum(letter in "aeiou" for letter in response) / max(1, len(response))


class Sums:
    """A conversation of ten turns: after each reply a calculator speaks, then the user asks for the next sum."""

    def reset(self, record: Mapping[str, Any], seed: int) -> Opening:
        """Begin with the record's own prompt."""
        self._turn, self._total = 0, int(record["answer"])
        return Opening()

    def step(self, reply: Reply) -> Observation:
        """Say the right sum, and ask for the next."""
        self._turn += 1
        if self._turn == TURNS:
            return Observation(reward=float(str(self._total) in reply.text), done=True)
        expression = f"{self._total}+{7 * self._turn}"
        told = {"role": "tool", "name": "calculator", "content": f"{self._total}"}
        asked = {"role": "user", "content": f"And what is {expression}?"}
        self._total = int(calculator(expression))
        return Observation([told, asked])


def opening_sums(count: int) -> list[dict[str, Any]]:
    """Records whose prompts ask for a first sum."""
    return [{"prompt": f"What is {11 + n}+{5 * n + 3}?", "answer": str(14 + 6 * n)} for n in range(count)]


def pairs(nouns: tuple[str, ...], *, each: int, seed: int = 0) -> Iterator[dict[str, str]]:
    """Preference pairs: a sentence in lowercase letters is preferred to the same one with capitals.

    Args:
      each: Pairs of each noun.
    """
    dice = random.Random(seed)
    for number in range(each):
        for noun in nouns:
            first, second = dice.sample(ADJECTIVES, 2)
            chosen = f"the {noun} is {first} and {second}."
            rejected = (chosen.capitalize(), chosen.title(), chosen.upper())[number % 3]
            yield {"prompt": f"Write a short sentence about a {noun}.", "chosen": chosen, "rejected": rejected}

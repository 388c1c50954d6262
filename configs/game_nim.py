"""RAE on a game of two players, from random weights: Nim, in which one policy plays both sides.

    python -m jaxrlhf.train --config game_nim.py

A game starts with five to nine sticks. A player takes one, two or three of them, and who takes the last stick wins: a
reward of 1 for the winner's turn, which counts against the other player. A reply that is no legal move loses the game.
The demonstrations move at random. The best strategy leaves a multiple of four.

Result: where such a move exists, the policy takes it in 49 % of its turns in the first training step, in 99 % from step
14 on (one seed).

Source: Liu et al. 2025 (SPIRAL, arXiv:2506.24119).
"""

import random
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from jaxrlhf.config import Config, Environment, Generated, load, load_module
from jaxrlhf.episode import Observation, Opening, Reply


class Nim:
    """Game of Nim with one heap; the state is the number of sticks that are left."""

    def reset(self, record: Mapping[str, Any], seed: int) -> Opening:
        """Start with the number of sticks in the record's prompt."""
        self._sticks = int(record["prompt"])
        return Opening(state=self._sticks)

    def step(self, reply: Reply) -> Observation:
        """Take sticks, and tell the other player how many are left."""
        if reply.text not in ("1", "2", "3") or int(reply.text) > self._sticks:
            return Observation(reward=-1.0, done=True)
        self._sticks -= int(reply.text)
        if self._sticks == 0:
            return Observation(reward=1.0, done=True)
        return Observation([{"role": "user", "content": str(self._sticks)}], state=self._sticks)


def games(split: str, count: int, seed: int) -> list[dict[str, Any]]:
    """Return numbers of sticks, with solutions that play both sides at random."""
    dice, records = random.Random(f"{seed} {split}"), []
    for _ in range(count):
        sticks = dice.randint(5, 9)
        prompt, solution = str(sticks), list[dict[str, Any]]()
        while sticks:
            taken = dice.randint(1, min(sticks, 3))
            sticks -= taken
            solution.append({"role": "assistant", "content": str(taken)})
            if sticks:
                solution.append({"role": "user", "content": str(sticks)})
        records.append({"prompt": prompt, "solution": solution})
    return records


def get_config() -> Config:
    """Return the configuration of the run."""
    return replace(
        load("game_treasure"),
        name="game_nim",
        data=Generated("game_nim.py:games", train_problems=12_800),
        environment=Environment(factory="game_nim.py:Nim", max_turns=9, turn_tokens=3),
        algorithm=load_module("rae").RAE(responses_per_update=64),
        steps=20,
    )

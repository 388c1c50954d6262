"""Records made by a function: a user's, or one of the tasks in this package."""

import inspect
import random
from collections.abc import Iterator, Sequence
from typing import Any

from jaxrlhf.config import Refusal
from jaxrlhf.config.named_functions import load
from jaxrlhf.data.records import Row


def generated_records(
    reference: str, split: str, count: int, seed: int, arguments: dict[str, Any] | None = None
) -> Iterator[Row]:
    """Yield the records of a split.

    Args:
      reference: Function as `module:function` or `path/to/file.py:function`.

    Raises:
      Refusal: The function is missing, does not take these arguments, or does not return a list of `count` dicts with
        strings as keys.
    """
    function = load(reference, "data function")
    try:
        inspect.signature(function).bind(split, count, seed, **arguments or {})
    except TypeError as error:
        raise Refusal(
            f"Generated.function {reference} must take a split, a number of records, a seed and the arguments "
            f"{arguments or {}}: {error}"
        ) from error
    records = function(split, count, seed, **arguments or {})
    if not isinstance(records, Sequence) or len(records) != count:
        given = f"{len(records)} records" if isinstance(records, Sequence) else f"a {type(records).__name__}"
        raise Refusal(f"{reference}({split!r}, {count}, {seed}) returned {given}, expected a list of {count} records")
    for number, record in enumerate(records):
        place = f"record {number} of {reference}"
        if not isinstance(record, dict) or not all(isinstance(key, str) for key in record):
            raise Refusal(f"{place} is a {type(record).__name__}, expected a dict with strings as keys")
        yield Row(place, record, record)


def products(split: str, count: int, seed: int, *, most_digits: int = 2, calls: float = 0.3) -> list[dict[str, Any]]:
    """Return products of two numbers, with solutions that call a calculator or guess.

    No product is in both splits, in either order of its factors.

    Args:
      most_digits: Maximum digits of a factor; the minimum is 2.
      calls: Share of the solutions that call the calculator; the others guess.
    """
    dice = random.Random(f"{seed} {split}")
    records = []
    for _ in range(count):
        factors = _factors(dice, split, most_digits)
        expression, product = "*".join(map(str, factors)), factors[0] * factors[1]
        solution: Any = f"#### {dice.randrange(10 ** (len(str(product)) - 1), 10 ** len(str(product)))}"
        if dice.random() < calls:
            call = {"type": "function", "function": {"name": "calculator", "arguments": {"expression": expression}}}
            solution = [
                {"role": "assistant", "content": "", "tool_calls": [call]},
                {"role": "tool", "name": "calculator", "content": str(product)},
                {"role": "assistant", "content": f"#### {product}"},
            ]
        records.append({"prompt": f"{expression}=?", "answer": str(product), "solution": solution})
    return records


def programs(split: str, count: int, seed: int, *, hang: float = 0.05) -> list[dict[str, Any]]:
    """Return the records of `products`, with Python programs in the place of calculator calls.

    Args:
      hang: Share of the programs that never end.
    """
    dice, records = random.Random(f"{seed} {split}"), products(split, count, seed)
    for record in records:
        if isinstance(record["solution"], list):
            call, output, reply = record["solution"]
            program = f"print({record['prompt'].removesuffix('=?')})"
            if dice.random() < hang:
                program, output["content"], reply["content"] = "while 1:0", "error: stopped after 10 s", "#### 0"
            else:
                output["content"] += "\n"
            call["tool_calls"][0]["function"] = {"name": "python", "arguments": {"code": program}}
            output["name"] = "python"
    return records


def _factors(dice: random.Random, split: str, most_digits: int) -> tuple[int, int]:
    """Sample two factors whose product belongs to a split; one pair in eight is held out."""
    while True:
        pair = sorted(dice.randrange(10, 10**most_digits) for _ in range(2))
        held_out = random.Random(repr(pair)).random() < 1 / 8
        if held_out == (split == "evaluation"):
            return (pair[0], pair[1]) if dice.random() < 0.5 else (pair[1], pair[0])


def treasures(
    split: str, count: int, seed: int, *, moves: int = 10, least_distance: int = 5, towards: float = 0.6
) -> list[dict[str, Any]]:
    """Return games on a path of nine places: start, treasure, and a walk that often moves away from the treasure.

    Args:
      moves: Maximum steps of the walk.
      least_distance: Minimum steps from the start to the treasure.
      towards: Share of steps that go towards the treasure. At 0.5, imitation does not learn to look at the treasure,
        and the policy then learns to go in one direction always, which reaches half of the treasures.
    """
    dice = random.Random(f"{seed} {split}")
    pairs = [(a, b) for a in range(1, 10) for b in range(1, 10) if abs(a - b) >= least_distance]
    records = []
    for _ in range(count):
        place, treasure = dice.choice(pairs)
        prompt, solution = f"{place}>{treasure}", list[dict[str, Any]]()
        for _ in range(moves):
            letter = "R" if (place < treasure) == (dice.random() < towards) else "L"
            place = min(max(place + (1 if letter == "R" else -1), 1), 9)
            solution.append({"role": "assistant", "content": letter})
            if place == treasure:
                break
            solution.append({"role": "user", "content": str(place)})
        if solution[-1]["role"] == "user":
            solution.pop()
        records.append({"prompt": prompt, "solution": solution})
    return records


def secrets(split: str, count: int, seed: int, *, highest: int = 7, guesses: int = 3) -> list[dict[str, Any]]:
    """Return secret numbers, with solutions that guess at random among the numbers that are still possible.

    Args:
      highest: Largest number; the smallest is 1.
    """
    dice = random.Random(f"{seed} {split}")
    records = []
    for _ in range(count):
        secret, low, high = dice.randint(1, highest), 1, highest
        solution = list[dict[str, Any]]()
        for _ in range(guesses):
            guess = dice.randint(low, high)
            solution += [{"role": "user", "content": f"{low}-{high}"}, {"role": "assistant", "content": str(guess)}]
            if guess == secret:
                break
            low, high = (guess + 1, high) if guess < secret else (low, guess - 1)
        records.append({"prompt": solution[0]["content"], "answer": str(secret), "solution": solution[1:]})
    return records


def lake_walks(split: str, count: int, seed: int, *, moves: int = 12, ahead: float = 0.7) -> list[dict[str, Any]]:
    """Return walks over gymnasium's frozen lake of 4 x 4 cells; they end in a hole, at the goal or after `moves` steps.

    Args:
      moves: Maximum steps of a walk.
      ahead: Share of steps to the right or down, towards the goal; walks ignore the holes.
    """
    dice, ends = random.Random(f"{seed} {split}"), {5, 7, 11, 12, 15}
    records = []
    for _ in range(count):
        cell, solution = 0, list[dict[str, Any]]()
        while len(solution) < 2 * moves and cell not in ends:
            letter = dice.choice("RD" if dice.random() < ahead else "LU")
            solution += [{"role": "user", "content": str(cell)}, {"role": "assistant", "content": letter}]
            row, column = divmod(cell, 4)
            row += {"D": 1, "U": -1}.get(letter, 0)
            column += {"R": 1, "L": -1}.get(letter, 0)
            cell = min(max(row, 0), 3) * 4 + min(max(column, 0), 3)
        records.append({"prompt": "0", "solution": solution[1:]})
    return records

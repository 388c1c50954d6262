"""Generated arithmetic word problems with worked solutions; nothing is downloaded.

A problem is an opening amount and a chain of changes, one operation a sentence:

    Mia has 3 boxes of 4 marbles. She finds 5 more. How many marbles does Mia have now?

The solution computes the chain, one operation a line:

    3*4=12
    12+5=17
    #### 17
"""

import hashlib
import operator
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeVar

from jaxrlhf.config import Refusal
from jaxrlhf.data.stories import PEOPLE, STORIES, Story

Split = Literal["train", "evaluation"]
OPERATORS = {"+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.floordiv}
Item = TypeVar("Item")

# One problem in this many belongs to the held-out split.
_EVALUATION_SHARE = 8
# After this many repeated candidates in a row, the distinct problems count as exhausted.
_PATIENCE = 2_000


@dataclass(frozen=True)
class Level:
    """Sizes of the problems of one difficulty; all bounds are inclusive.

    Attributes:
      operators: Operations that occur.
      steps: Minimum and maximum number of lines of a worked solution before its answer.
      start: Largest opening amount.
      change: Largest number added or subtracted.
      factor: Largest multiplier and divisor.
      largest: Largest amount at any step.
    """

    operators: str
    steps: tuple[int, int]
    start: int
    change: int
    factor: int
    largest: int


LEVELS = {
    1: Level("+-*", steps=(1, 2), start=5, change=4, factor=2, largest=10),
    2: Level("+-*", steps=(2, 2), start=6, change=5, factor=2, largest=12),
    3: Level("+-*/", steps=(2, 3), start=20, change=9, factor=4, largest=60),
    4: Level("+-*/", steps=(3, 4), start=50, change=50, factor=9, largest=200),
    5: Level("+-*/", steps=(4, 5), start=200, change=200, factor=12, largest=2_000),
}


class _Dice:
    """Seeded choices that are the same on every machine and Python version.

    Only `random.Random.random` keeps its sequence between Python versions, so every choice uses this method.
    """

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def between(self, low: int, high: int) -> int:
        """Return a whole number in [low, high]."""
        return low + int(self._random.random() * (high - low + 1))

    def pick(self, items: Sequence[Item]) -> Item:
        return items[self.between(0, len(items) - 1)]


class _Problem(NamedTuple):
    """Problem under construction; names and things are not filled in in `template` yet."""

    template: str
    steps: tuple[str, ...]
    answer: int


def arithmetic_records(
    *, difficulty: int, problems: int, seed: int, split: Split, unfinished_share: float = 0.0
) -> list[dict[str, Any]]:
    """Return distinct word problems of one split, the same on every machine.

    A hash of the problem's text without names and things decides its split. So two splits never share a problem, not
    even with other names and things, for any sizes and seeds. A longer list starts with the shorter one.

    Args:
      difficulty: 1 to 5: more steps and larger numbers; exact division from 3 on.
      unfinished_share: Share of the solutions that stop one step early and answer with the result so far.

    Returns:
      Records with `question`, `answer` (digits), `solution` (lines `a+b=c`, then `#### answer`) and `steps` (number of
      operations).

    Raises:
      Refusal: The difficulty or the split is unknown, or there are fewer distinct problems.
    """
    if difficulty not in LEVELS:
        raise Refusal(f"difficulty must be one of {list(LEVELS)}, got {difficulty}")
    if split not in ("train", "evaluation"):
        raise Refusal(f"split must be 'train' or 'evaluation', got {split!r}")
    records: dict[str, dict[str, Any]] = {}
    repeats = 0
    for record in _candidates(LEVELS[difficulty], seed, split, unfinished_share):
        if len(records) == problems:
            break
        known = record["question"] in records
        repeats = repeats + 1 if known else 0
        records[record["question"]] = record
        if repeats == _PATIENCE:
            raise Refusal(
                f"only {len(records)} distinct {split} problems were found at difficulty {difficulty}, expected "
                f"{problems}; request fewer problems or raise the difficulty"
            )
    return list(records.values())


def lexicon() -> Iterator[str]:
    """Yield texts that together contain every word of every problem, in every context in which the word can occur."""
    for story in STORIES:
        changes = [f" {sentence}" for sentences in story.changes.values() for sentence in sentences]
        for sentence in (story.amount, story.product, f" {story.question}", *changes):
            for thing in story.things:
                for pronoun, names in PEOPLE.items():
                    for name in names:
                        yield sentence.format(n=0, m=0, He=pronoun, name=name, friend=name, thing=thing)
    yield "\n#### 0123456789+-*/="


def _candidates(level: Level, seed: int, split: Split, unfinished_share: float) -> Iterator[dict[str, Any]]:
    """Yield records of one split endlessly; records may repeat."""
    dice = _Dice(seed)
    while True:
        story = dice.pick(STORIES)
        problem = _compose(dice, story, level)
        if _split_of(problem.template) != split:
            continue
        question = _cast(dice, story, problem.template)
        unfinished = stable_hash(question) % 1000 < 1000 * unfinished_share and len(problem.steps) > 1
        working = problem.steps[:-1] if unfinished else problem.steps
        yield {
            "question": question,
            "answer": str(problem.answer),
            "solution": "\n".join((*working, f"#### {working[-1].partition('=')[2]}")),
            "steps": len(problem.steps),
        }


def _split_of(template: str) -> Split:
    return "evaluation" if stable_hash(template) % _EVALUATION_SHARE == 0 else "train"


def stable_hash(text: str) -> int:
    """Return a 64-bit hash that is the same on every machine and in every process."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")


def _compose(dice: _Dice, story: Story, level: Level) -> _Problem:
    """Sample an opening, then changes until the problem has its number of steps."""
    count = dice.between(*level.steps)
    steps: list[str] = []
    factors = dice.between(2, level.factor), dice.between(2, level.start)
    if dice.between(1, 3) == 1 and factors[0] * factors[1] <= level.largest:
        amount = factors[0] * factors[1]
        sentences = [story.product.replace("{n}", str(factors[0])).replace("{m}", str(factors[1]))]
        steps.append(f"{factors[0]}*{factors[1]}={amount}")
    else:
        amount = dice.between(2, level.start)
        sentences = [story.amount.replace("{n}", str(amount))]
    while len(steps) < count:
        operator = dice.pick(level.operators)
        operands = _operands(operator, amount, level)
        if not operands:
            continue
        operand = dice.pick(operands)
        result = OPERATORS[operator](amount, operand)
        sentences.append(dice.pick(story.changes[operator]).replace("{n}", str(operand)))
        steps.append(f"{amount}{operator}{operand}={result}")
        amount = result
    return _Problem(" ".join((*sentences, story.question)), tuple(steps), amount)


def _operands(operator: str, amount: int, level: Level) -> Sequence[int]:
    """Return the operands, from 2 on, that keep the result whole and in [0, level.largest]."""
    if operator == "+":
        return range(2, min(level.change, level.largest - amount) + 1)
    if operator == "-":
        return range(2, min(level.change, amount) + 1)
    if amount == 0:
        return ()
    if operator == "*":
        return range(2, min(level.factor, level.largest // amount) + 1)
    return [n for n in range(2, level.factor + 1) if amount % n == 0]


def _cast(dice: _Dice, story: Story, template: str) -> str:
    """Fill in the names and the thing of a problem."""
    pronoun = dice.pick(tuple(PEOPLE))
    name = dice.pick(PEOPLE[pronoun])
    friends = [person for names in PEOPLE.values() for person in names if person != name]
    return template.format(name=name, He=pronoun, friend=dice.pick(friends), thing=dice.pick(story.things))

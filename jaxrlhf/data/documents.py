"""Retrieval tasks on generated text: documents with a search, two-hop questions, and haystacks."""

import math
import random
import re
from collections import Counter
from typing import Any

from jaxrlhf.data.arithmetic import lexicon
from jaxrlhf.data.stories import PEOPLE, STORIES

SUBJECTS = range(1000, 3000)
DICE = random.Random("documents")
A_OF = dict(zip(SUBJECTS, DICE.sample(range(3000, 5000), len(SUBJECTS)), strict=True))
B_OF = dict(zip(A_OF.values(), DICE.sample(range(5000, 7000), len(SUBJECTS)), strict=True))
BESIDE = {number: DICE.randrange(7000, 10_000) for number in (*A_OF, *B_OF)}
DOCUMENTS = [
    f"{name} {of} {is_}" for name, facts in (("a", A_OF), ("b", B_OF), ("c", BESIDE)) for of, is_ in facts.items()
]
HOLDING: dict[str, Counter[int]] = {}
"""Inverted index: for each word, the indices of the documents that contain it, and how often they do."""
for place, document in enumerate(DOCUMENTS):
    for word in document.split():
        HOLDING.setdefault(word, Counter())[place] += 1


def search(query: str) -> str:
    """Find the document that fits best.

    Args:
        query: Words, such as "a 1234".
    """
    score: dict[int, float] = {}
    for word in query.split():
        holding = HOLDING.get(word, Counter[int]())
        rarity = math.log(1 + (len(DOCUMENTS) - len(holding) + 0.5) / (len(holding) + 0.5))
        for place, times in holding.items():  # BM25 without its length term: all documents have three words
            score[place] = score.get(place, 0.0) + rarity * times * 2.2 / (times + 1.2)
    return DOCUMENTS[max(score, key=lambda place: score[place])] if score else "nothing"


def questions(split: str, count: int, seed: int, *, searches: float = 0.4) -> list[dict[str, Any]]:
    """Return questions for the `b` of the `a` of a number, with solutions that search or guess.

    One number in eight is held out: only evaluation questions ask about it.

    Args:
      searches: Share of the solutions that search, twice each; the others guess.
    """
    dice, made = random.Random(f"{seed} {split}"), []
    subjects = [number for number in SUBJECTS if (number % 8 == 0) == (split == "evaluation")]
    for _ in range(count):
        subject = dice.choice(subjects)
        answer = B_OF[A_OF[subject]]
        solution: Any = f"#### {dice.randrange(5000, 7000)}"
        if dice.random() < searches:
            solution = []
            for query in (f"a {subject}", f"b {A_OF[subject]}"):
                call = {"type": "function", "function": {"name": "search", "arguments": {"query": query}}}
                solution.append({"role": "assistant", "content": "", "tool_calls": [call]})
                solution.append({"role": "tool", "name": "search", "content": search(query)})
            solution.append({"role": "assistant", "content": f"#### {answer}"})
        made.append({"prompt": f"b a {subject}?", "answer": str(answer), "solution": solution})
    return made


COLLECTED = dict(zip(PEOPLE["She"], (story.things for story in STORIES if len(story.things) == 4), strict=False))
"""Four things of one kind for each person; a haystack contains one of the four."""
HAY = sorted(
    set(re.findall(r" [a-z]+", " ".join(lexicon()))) - {f" {thing}" for story in STORIES for thing in story.things}
)
"""Filler words that are no things, each with the space before it."""


def haystack(
    split: str,
    count: int,
    seed: int,
    *,
    tokens: int = 4096,
    shortest: int | None = None,
    growing: bool = False,
    asked: int = 3,
    unfinished: float = 0.6,
    there: bool = True,
) -> list[dict[str, Any]]:
    """Return texts of filler words with one thing of each kind among them, and questions which things people find.

    Args:
      tokens: Approximate number of tokens of the text; each word is one token.
      shortest: Tokens of the shortest text; lengths are then sampled log-uniformly up to `tokens`. None: equal lengths.
      growing: Lengths grow from the shortest to the longest in record order, instead of being sampled.
      asked: Number of people that a question asks about.
      unfinished: Share of the solutions that stop after the first person.
      there: False samples the things in the text independently of the answer, so that the answer has to be guessed.
    """
    dice, made = random.Random(f"{seed} {split}"), []
    for place in range(count):
        share = place / max(1, count - 1) if growing else dice.random()
        length = round(tokens**share * (shortest or tokens) ** (1 - share))
        found = {name: dice.choice(things) for name, things in COLLECTED.items()}
        words = dice.choices(HAY, k=max(0, length - len(found)))
        for name, things in COLLECTED.items():
            thing = found[name] if there else dice.choice(things)
            words.insert(dice.randrange(len(words) + 1), f" {thing}")
        names = dice.sample(list(found), asked)
        answers = [f"{name} {found[name]}" for name in names]
        solution = " ".join(answers[:1] if dice.random() < unfinished else answers)
        question = f"{''.join(words)}. {', '.join(names)}?"
        made.append({"prompt": question, "answer": " ".join(answers), "solution": f" {solution}"})
    return made


def all_found(prompt: str, response: str, answer: str | None, record: dict[str, Any]) -> float:
    """Return 1 if the response names exactly the people and things of the answer, in the order asked; else 0."""
    return float(response.strip() == answer)

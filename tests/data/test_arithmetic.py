"""Arithmetic word problems: correct, distinct, with fixed splits, and harder with difficulty."""

import hashlib
import json
import re

import pytest

from jaxrlhf.data import arithmetic, stories
from jaxrlhf.data.arithmetic import LEVELS, Level, arithmetic_records

DIFFICULTIES = sorted(LEVELS)
SPLITS = ("train", "evaluation")
NUMBER = re.compile(r"\d+")
NAMES = {name for names in stories.PEOPLE.values() for name in names}
THINGS = {thing for story in stories.STORIES for thing in story.things}
WORDS = {
    "+": "more|adds|earns|pays|buys|finds|brings|Then 0 get on|come in|wins",
    "-": "takes|loses|sells|eats|burns|spends|drops|get off|go out|picks|run",
    "*": "times|pieces|new ones",
    "/": "equal",
}


def records(difficulty, problems=200, seed=0, split="train", **more):
    return arithmetic_records(difficulty=difficulty, problems=problems, seed=seed, split=split, **more)


def worked_off(solution):
    """Check a solution line by line without the generator; return the final answer."""
    *steps, last = solution.split("\n")
    amount = None
    for step in steps:
        left, operator, right, result = re.fullmatch(r"(\d+)([-+*/])(\d+)=(\d+)", step).groups()
        assert amount is None or int(left) == amount
        amount = int(result)
        inverse = {"+": amount - int(right), "-": amount + int(right), "/": amount * int(right)}
        if operator == "*":
            assert int(left) * int(right) == amount
        else:
            assert inverse[operator] == int(left)
    assert last == f"#### {amount}"
    return str(amount)


def without_cast(text):
    """Return the text without names and things."""
    return re.sub(r"\w+", lambda word: "_" if word[0] in NAMES | THINGS | {"She", "He"} else word[0], text)


@pytest.mark.parametrize("difficulty", DIFFICULTIES)
def test_solutions_are_right_and_end_in_the_answer(difficulty):
    for record in records(difficulty):
        assert worked_off(record["solution"]) == record["answer"]
        assert record["steps"] == record["solution"].count("\n")
        assert ("/" in record["solution"]) <= (difficulty >= 3)


@pytest.mark.parametrize("difficulty", DIFFICULTIES)
def test_the_question_holds_exactly_the_numbers_of_the_solution(difficulty):
    for record in records(difficulty):
        steps = record["solution"].split("\n")[:-1]
        operands = [*NUMBER.findall(steps[0])[:2], *(NUMBER.findall(step)[1] for step in steps[1:])]
        assert NUMBER.findall(record["question"]) == operands


def test_each_sentence_says_its_operation():
    for story in stories.STORIES:
        assert set(story.changes) == set("+-*/")
        for operator, sentences in story.changes.items():
            for sentence in sentences:
                assert sentence.count("{n}") == 1
                assert re.search(WORDS[operator], sentence.replace("{n}", "0")), (operator, sentence)


def test_no_story_names_a_person_or_a_thing_by_itself():
    # Otherwise two templates in two splits could become one text.
    for story in stories.STORIES:
        for sentence in (story.amount, story.product, story.question, *sum(story.changes.values(), ())):
            assert not set(re.findall(r"\w+", sentence.replace("{thing}", ""))) & (NAMES | THINGS - {"train"})


def test_two_steps_stay_below_a_hundred():
    for difficulty in (1, 2):
        assert max(int(record["answer"]) for record in records(difficulty, 1_000)) < 100


def test_harder_means_more_steps_and_larger_numbers():
    steps, sizes = [], []
    for difficulty in DIFFICULTIES:
        sample = records(difficulty, 500)
        steps.append(sum(record["steps"] for record in sample))
        numbers = [int(n) for record in sample for n in NUMBER.findall(record["solution"])]
        sizes.append(sum(numbers) / len(numbers))
    assert steps == sorted(set(steps))
    assert sizes == sorted(set(sizes))


def test_same_seed_same_problems_and_another_seed_others():
    assert records(2) == records(2)
    questions = {record["question"] for record in records(2)}
    others = {record["question"] for record in records(2, seed=1)}
    assert len(questions & others) < 5


def test_the_problems_never_change():
    # Written down once: the same on every machine and Python version.
    text = json.dumps([records(difficulty, 50, split=split) for difficulty in DIFFICULTIES for split in SPLITS])
    assert hashlib.sha256(text.encode()).hexdigest()[:16] == "52049d823478db87"


def test_a_longer_list_starts_with_the_shorter_one():
    assert records(3, 500)[:200] == records(3, 200)


@pytest.mark.parametrize("difficulty", DIFFICULTIES)
def test_splits_share_no_problem_whatever_their_seeds(difficulty):
    train = {record["question"] for seed in range(2) for record in records(difficulty, 600, seed)}
    evaluation = {record["question"] for seed in range(2) for record in records(difficulty, 150, seed, "evaluation")}
    assert not train & evaluation
    assert not {without_cast(text) for text in train} & {without_cast(text) for text in evaluation}


def test_problems_are_distinct():
    for split in SPLITS:
        sample = records(1, 800, split=split)
        assert len({record["question"] for record in sample}) == 800


def test_held_out_problems_differ_in_more_than_the_split():
    stories_seen = {without_cast(NUMBER.sub("0", record["question"])) for record in records(2, 256, split="evaluation")}
    assert len(stories_seen) > 100


def test_asking_for_more_than_there_is(monkeypatch):
    few = stories.Story(("coins",), "{n} {thing}.", "{n} by {m}.", dict.fromkeys("+-*/", ("{n}",)), "?")
    monkeypatch.setattr(arithmetic, "STORIES", (few,))
    monkeypatch.setitem(LEVELS, 1, Level("+", steps=(1, 1), start=5, change=5, factor=2, largest=9))
    # Sums of two numbers in [2, 5] up to 9, and the products 2 by 2 to 2 by 4.
    found = []
    for split in SPLITS:
        with pytest.raises(ValueError, match=f"{split} problems were found at difficulty 1, expected 100") as error:
            records(1, 100, split=split)
        found.append(int(NUMBER.search(str(error.value))[0]))
    assert sum(found) == 15 + 3


def test_unknown_difficulty():
    with pytest.raises(ValueError, match=r"one of \[1, 2, 3, 4, 5\], got 6"):
        records(6)


def test_unfinished_solutions_stop_one_step_early_and_only_they_differ():
    whole, careless = records(3, 400), records(3, 400, unfinished_share=0.5)
    unfinished = 0
    for one, other in zip(whole, careless, strict=True):
        assert {**one, "solution": ""} == {**other, "solution": ""}
        if one["solution"] != other["solution"]:
            unfinished += 1
            *steps, _, _ = one["solution"].splitlines()
            reached = steps[-1].rpartition("=")[2]
            assert other["solution"].splitlines() == [*steps, f"#### {reached}"]
    assert 0.4 < unfinished / len(whole) < 0.6

"""Rewards and prompts of `grpo_instructions`: right responses are paid, and what a policy would try instead is not."""

import json

import pytest

from jaxrlhf.config import load, shipped
from jaxrlhf.config.named_functions import load as load_function

FILE = "grpo_instructions.py"
follows = load_function(f"{FILE}:follows", "reward function")
comes_near = load_function(f"{FILE}:comes_near", "reward function")
prompts = load_function(f"{FILE}:prompts", "data function")
task = follows.__globals__


def record(*instructions, topic="cats"):
    """A record of the data, with the prompt that the instructions make."""
    texts = (task["KINDS"][kind].text for kind, _ in instructions)
    filled = (
        text.format(*argument.split(), topic=topic, TOPIC=topic.upper())
        for text, (_, argument) in zip(texts, instructions, strict=True)
    )
    return {
        "prompt": f"Write a short sentence about {topic}. {' '.join(filled)}",
        "topic": topic,
        "instructions": instructions,
    }


RIGHT = [
    (("lowercase", ""), "my cats sleep all day."),
    (("capitals", ""), "ALL CATS SLEEP AT NOON!"),
    (("no_comma", ""), "Cats sleep and eat."),
    (("words", "5"), "Cats sleep on warm roofs."),
    (("begins", "Maybe"), "Maybe cats dream at night."),
    (("begins", "Yes"), "Yes, cats purr loudly."),
    (("ends", "today"), "My cats caught mice today."),
    (("repeats", "2"), "Cats chase other cats around."),
    (("points", "2"), "- Cats sleep a lot\n- They hunt mice"),
    (("json", "name fact"), '{"name": "Cats", "fact": "They sleep a lot"}'),
    (("quoted", ""), '"Cats sleep all day."'),
    (("question", ""), "Why do cats purr?"),
    (("question", ""), 'Why do cats purr?"\n'),
    (("no_comma", ""), "My cat doesn't like rain."),
]
WRONG = [
    (("lowercase", ""), "My cats sleep all day."),
    (("lowercase", ""), "we like cats."),  # a copy of the prompt's example
    (("capitals", ""), "CATS sleep at noon."),
    (("no_comma", ""), "Cats sleep, and eat."),
    (("words", "5"), "Cats sleep on roofs."),
    (("begins", "Maybe"), "Cats maybe dream at night."),
    (("ends", "today"), "Today my cats caught mice."),
    (("repeats", "2"), "Cats sleep near dogs."),
    (("repeats", "2"), "Cats chase cats and other cats."),
    (("points", "2"), "- Cats sleep a lot"),
    (("points", "2"), "Here they are:\n- Cats sleep\n- They hunt"),
    (("points", "2"), "- first: cats\n- second: cats"),
    (("json", "name fact"), '{"name": "Cats"}'),
    (("json", "name fact"), 'Sure: {"name": "Cats", "fact": "They sleep a lot"}'),
    (("json", "name fact"), '{"name": "Cats", "fact": ["They sleep a lot"]}'),
    (("json", "name fact"), '{"name": "Cats sleeping", "fact": ""}'),
    (("quoted", ""), 'They said "cats sleep all day."'),
    (("json", "name fact"), '{"name": "Cats", "name": "Cats sleeping", "fact": "They sleep a lot"}'),
    (("json", "name fact"), '[["name", "Cats"], ["fact", "They sleep a lot"]]'),
    (("json", "name fact"), "[" * 5000),
    (("question", ""), "Why do cats purr? They are happy."),
    (("no_comma", ""), ""),
    (("no_comma", ""), "Dogs sleep and eat."),
    (("no_comma", ""), "Cats."),
    (("no_comma", ""), "Cats sleep sleep sleep sleep here."),
    (("no_comma", ""), "Cats 1 2"),
    (("no_comma", ""), "cats xq zv"),
    (("no_comma", ""), "cats sleep soundly" + " _*" * 100),
    (("words", "5"), "cats were exact five words."),
    (("words", "5"), "Cats were exactly quite there."),
    (("words", "5"), "Cats wrote shortly exact sentences."),
    (("quoted", ""), '"the cats was written in double-coconut."'),
    (("quoted", ""), '"Cats are my favourite quotes."'),
    (("words", "4"), "cats are-very-nice-animals sleeping soundly on roofs"),
    (("no_comma", ""), "Cats sleep and eat " + " ".join(f"word{n}" for n in range(20))),
]


@pytest.mark.parametrize("instruction, response", RIGHT)
def test_what_follows_is_paid(instruction, response):
    given = record(instruction)
    assert follows("", response, None, given) == 1 and comes_near("", response, None, given) == 1


@pytest.mark.parametrize("instruction, response", WRONG)
def test_what_does_not_follow_is_not_paid(instruction, response):
    given = record(instruction)
    assert follows("", response, None, given) == 0
    assert 0 <= comes_near("", response, None, given) < 1


def test_both_instructions_have_to_be_followed():
    given = record(("lowercase", ""), ("ends", "today"))
    assert follows("", "my cats caught mice today", None, given) == 1
    assert follows("", "My cats caught mice today", None, given) == 0
    assert follows("", "my cats caught mice", None, given) == 0


def test_one_of_a_topic_is_its_name_without_the_last_letter():
    topics = task["TRAIN_TOPICS"] + task["HELD_OUT_TOPICS"]
    assert len(topics) == len(set(topics)) > 100
    doubtful = {topic for topic in topics if topic.endswith(("ies", "ves", "oes", "ches", "xes"))}
    assert doubtful == {"shoes", "caves"}


def test_topics_and_pairs_of_the_evaluation_are_in_no_training_prompt():
    train, held_out = prompts("train", 2000, 0), prompts("evaluation", 400, 0)
    topics = [{one["topic"] for one in split} for split in (train, held_out)]
    pairs = [
        {tuple(kind for kind, _ in one["instructions"]) for one in split if len(one["instructions"]) == 2}
        for split in (train, held_out)
    ]
    assert not topics[0] & topics[1] and not pairs[0] & pairs[1] and len(pairs[1]) >= 8
    singles = {one["instructions"][0][0] for one in train[:800]}
    assert singles == set(task["KINDS"])
    counts = [len(one["instructions"]) for one in train]
    assert counts == sorted(counts) and set(counts) == {1, 2}
    assert train == prompts("train", 2000, 0) != prompts("train", 2000, 1)


def written(given):
    """A response to instructions, by their kinds: words, their number, first and last one, then lines and marks."""
    if "json" in given:
        return json.dumps(dict.fromkeys(given["json"].split(), "Cats sleep"))
    words = ["cats", "chase", "mice", "near"] if "repeats" not in given else ["cats", "see", "near"]
    words += ["cats"] * (int(given.get("repeats", 1)) - 1)
    if "words" in given:
        ends = ("begins" in given) + ("ends" in given)
        words = [*words, "windows", "quietly", "there"][: int(given["words"]) - ends]
    words = [given[kind] for kind in ("begins",) if kind in given] + words
    if "points" in given:
        count = int(given["points"])
        lines = [words[: -count + 1], *([word] for word in words[-count + 1 :])]
        lines = [["some", *line] for line in lines]
        lines[-1] += [given["ends"]] if "ends" in given else []
        text = "\n".join("- " + " ".join(line) for line in lines)
    else:
        text = " ".join(words + [given[kind] for kind in ("ends",) if kind in given])
    text += "?" if "question" in given else ""
    text = text.upper() if "capitals" in given else text.lower() if "lowercase" in given else text
    return f'"{text}"' if "quoted" in given else text


def test_a_topic_may_be_a_word_about_the_form():
    assert follows("", "Old letters rest under stamps", None, record(("no_comma", ""), topic="letters")) == 1
    assert follows("", "Cats rest under letters", None, record(("no_comma", ""))) == 0


@pytest.mark.parametrize("pair", task["PAIRS"], ids="-".join)
def test_no_two_instructions_exclude_each_other(pair):
    """For each pair and the first arguments of both there is a response that is paid."""
    given = {kind: task["KINDS"][kind].arguments[-1] for kind in pair}
    assert follows("", written(given), None, record(*given.items())) == 1, written(given)


def test_the_configuration_ships_with_its_functions(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = load("grpo_instructions")
    assert shipped()["grpo_instructions"].name == FILE
    assert [part.function for part in config.rewards.parts] == [f"{FILE}:follows", f"{FILE}:comes_near"]

"""Haystacks, texts with one thing of each kind among many words: only the text has the answer."""

import re
import sys
from collections import Counter
from dataclasses import replace

import pytest

from jaxrlhf.config import Generated, load
from jaxrlhf.data.documents import COLLECTED, all_found, haystack
from jaxrlhf.data.generated import generated_records
from jaxrlhf.data.sources import load_problems
from jaxrlhf.data.tokenizer import embedded_tokenizer
from jaxrlhf.trainer.phase import load_data


def read(record):
    """Return the words of the text, and the people of the question."""
    text, _, question = record["prompt"].partition(". ")
    return text.split(), re.findall(r"[A-Z]\w+", question)


@pytest.mark.parametrize("split", ["train", "evaluation"])
def test_answers_are_in_the_text(split):
    """A text has one thing of each kind, at any position."""
    places = []
    for record in haystack(split, 100, 0, tokens=200):
        words, asked = read(record)
        answer = record["answer"].split()
        assert len(asked) == len(set(asked)) == 3
        assert answer[::2] == asked
        for name, thing in zip(asked, answer[1::2], strict=True):
            assert [word for word in words if word in COLLECTED[name]] == [thing]
            places.append(words.index(thing))
        assert record["solution"].split() in (answer, answer[:2])
        assert all_found("", record["answer"], record["answer"], {})
        assert not all_found("", " ".join(answer[:4]), record["answer"], {})
    assert min(places) < 20 and max(places) > 180


def test_a_share_of_the_solutions_stops_early_and_lengths_are_exact():
    records = haystack("train", 400, 0, tokens=256, shortest=16)
    early = sum(len(record["solution"].split()) == 2 for record in records)
    assert 0.5 < early / len(records) < 0.7
    tokenizer = embedded_tokenizer()
    lengths = [len(tokenizer.encode(record["prompt"])) - 7 for record in records]
    assert min(lengths) < 20 and 230 < max(lengths) <= 257
    assert sum(length < 64 for length in lengths) / len(lengths) == pytest.approx(0.5, abs=0.1), "by their logarithm"


def test_without_the_text_an_answer_is_right_by_chance():
    """One answer in four is right."""
    right = Counter()
    for record in haystack("train", 300, 0, tokens=40, there=False):
        words, _ = read(record)
        right.update(thing in words for thing in record["answer"].split()[1::2])
    assert right[True] / right.total() == pytest.approx(0.25, abs=0.05)


def test_splits_and_seeds_differ_and_repeat():
    one = haystack("train", 5, 0, tokens=40)
    assert one == haystack("train", 5, 0, tokens=40)
    others = [haystack("evaluation", 5, 0, tokens=40), haystack("train", 5, 1, tokens=40)]
    assert all(one[0]["prompt"] != other[0]["prompt"] for other in others)


def test_a_cold_start_reads_separate_data_with_shorter_prompts():
    config = load("grpo_haystack")
    config = replace(
        config,
        data=replace(config.data, train_problems=8, eval_problems=2),
        cold_start=replace(config.cold_start, data=replace(config.cold_start.data, train_problems=64)),
    )
    cold, run = (load_data(phase, embedded_tokenizer()).train.problems for phase in config.phases)
    assert (len(cold), len(run)) == (64, 8)
    assert min(cold.prompt_tokens.lengths) > 20 and max(cold.prompt_tokens.lengths) <= 288
    lengths = list(run.prompt_tokens.lengths)
    assert lengths == sorted(set(lengths)) and (lengths[0], lengths[-1]) == (512 + 9, 4096 + 9), "texts grow"
    assert [phase.rollout.width for phase in config.phases] == [296, 4352]


def test_arguments_that_a_function_does_not_take_are_refused(refused):
    with refused():
        list(generated_records("jaxrlhf.data.documents:haystack", "train", 2, 0, {"pages": 3}))


def test_a_file_of_records_may_import_its_neighbours(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "neighbour_of_records.py").write_text("PROMPT = 'x'")
    file = tmp_path / "records.py"
    file.write_text(
        "from neighbour_of_records import PROMPT\ndef made(split, count, seed): return [{'prompt': PROMPT}] * count"
    )
    assert [row.record for row in generated_records(f"{file}:made", "train", 2, 0)] == [{"prompt": "x"}] * 2


@pytest.mark.parametrize(
    "record",
    [{"prompt": None}, {"prompt": 5}, {"prompt": []}, {"prompt": {"role": "user"}}]
    + [{"prompt": "x", "solution": said} for said in (5, [], [1], {"role": "assistant"})],
)
def test_records_that_are_no_texts_are_refused(refused, tmp_path, record):
    file = tmp_path / "records.py"
    file.write_text(f"def made(split, count, seed): return [{record!r}] * count")
    data = Generated(f"{file}:made", train_problems=1)
    with refused():
        load_problems(data, embedded_tokenizer(), split="train", max_prompt_tokens=8, system_prompt="Be brief.")

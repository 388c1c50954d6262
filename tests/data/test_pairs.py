"""Preference pairs: from files in hh-rlhf's format, from records with a prompt, and from arithmetic problems."""

import gzip
import json

import pytest

from jaxrlhf.batch import Pair
from jaxrlhf.config import ArithmeticPairs, PairFile
from jaxrlhf.data.sources import load_problems
from jaxrlhf.data.tokenizer import embedded_tokenizer

HH = {
    "chosen": "\n\nHuman: Hi.\n\nAssistant: Hello!\n\nHuman: 1+1?\n\nAssistant: It is 2.",
    "rejected": "\n\nHuman: Hi.\n\nAssistant: Hello!\n\nHuman: 1+1?\n\nAssistant: 3",
}
ASKED = {"prompt": "Two and two?", "chosen": "4", "rejected": "5", "gap": 0.5, "good": True, "bad": False}
MALFORMED = {
    "differ before the last turn": {**HH, "rejected": "\n\nHuman: Hi!\n\nAssistant: 3"},
    "turns must alternate": {**HH, "chosen": "\n\nHuman: Hi.\n\nHuman: Hi?\n\nAssistant: yes"},
    "are the same": {**HH, "rejected": HH["chosen"]},
    "the rejected answer is empty": {**ASKED, "rejected": " "},
    "no key 'rejected'": {"prompt": "x", "chosen": "y"},
    "must be a text": {**ASKED, "chosen": 4},
}


@pytest.fixture(scope="module")
def tokenizer():
    return embedded_tokenizer()


@pytest.fixture
def load(tokenizer):
    def call(data, split="train", **limits):
        return load_problems(data, tokenizer, split=split, **{"max_prompt_tokens": 1000, **limits})

    return call


def write(path, records):
    text = "".join(json.dumps(record) + "\n" for record in records)
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return str(path)


def test_a_margin_may_be_a_cell_of_a_csv_file(load, tmp_path):
    file = tmp_path / "pairs.csv"
    file.write_text("prompt,chosen,rejected,gap\n2+2?,4,5,0.5\n")
    [pair] = load(PairFile(str(file), margin_key="gap")).problems
    assert pair.margin == 0.5
    for cell in ("high", "nan", ""):
        file.write_text(f"prompt,chosen,rejected,gap\n2+2?,4,5,{cell}\n")
        with pytest.raises(ValueError, match=r"pairs\.csv, line 2: 'gap' must be a finite number"):
            load(PairFile(str(file), margin_key="gap"))


@pytest.mark.parametrize("name", ["pairs.jsonl", "pairs.jsonl.gz"])
def test_dialogues_share_all_turns_except_the_last(name, load, tokenizer, tmp_path):
    [pair] = load(PairFile(write(tmp_path / name, [HH]))).problems
    assert isinstance(pair, Pair)
    assert pair.prompt == "<|user|>Hi.<|assistant|>Hello!<|eos|><|user|>1+1?<|assistant|>"
    assert tokenizer.decode(pair.prompt_tokens) == pair.prompt
    assert tokenizer.decode(pair.solution_tokens) == "It is 2.<|eos|>"
    assert tokenizer.decode(pair.rejected_tokens) == "3<|eos|>"
    assert (pair.margin, pair.safe, pair.record) == (0.0, None, HH)


def test_a_record_with_a_prompt_may_have_margin_and_safety_labels(load, tokenizer, tmp_path):
    data = PairFile(write(tmp_path / "pairs.jsonl", [ASKED]), margin_key="gap", safe_keys=("good", "bad"))
    [pair] = load(data).problems
    assert pair.prompt == "<|user|>Two and two?<|assistant|>"
    assert tokenizer.decode(pair.rejected_tokens) == "5<|eos|>"
    assert (pair.margin, pair.safe) == (0.5, (True, False))


def test_margins_and_labels_are_part_of_the_fingerprint(load, tmp_path):
    records = [ASKED, ASKED | {"gap": 0.75}, ASKED | {"bad": True}]
    files = [write(tmp_path / f"{n}.jsonl", [record]) for n, record in enumerate([ASKED, *records])]
    data = [PairFile(file, margin_key="gap", safe_keys=("good", "bad")) for file in files]
    first, *others = (load(one).problems.fingerprint for one in data)
    assert [first == other for other in others] == [True, False, False]


def test_malformed_pairs_are_left_out_and_reported_with_file_and_line(load, tmp_path):
    path = write(tmp_path / "pairs.jsonl", [HH, *MALFORMED.values(), ASKED])
    loaded = load(PairFile(path, malformed_fraction=0.8))
    assert [pair.record for pair in loaded.problems] == [HH, ASKED]
    assert loaded.total == 2 + len(MALFORMED)
    assert len(loaded.malformed) == len(MALFORMED)
    for line, (reason, told) in enumerate(zip(MALFORMED, loaded.malformed, strict=True), start=2):
        assert told.startswith(f"{path}, line {line}: ")
        assert reason in told


def test_an_implicit_prompt_needs_prompt_key_none(refused, load, tokenizer, tmp_path):
    chosen, rejected = "Two and two? It is 4.", "Two and two? It is 40."
    path = write(tmp_path / "pairs.jsonl", [{"chosen": chosen, "rejected": rejected}, HH])
    first, second = load(PairFile(path, prompt_key=None)).problems
    assert first.question == "Two and two? It is" and tokenizer.decode(first.rejected_tokens) == " 40.<|eos|>"
    assert tokenizer.decode(second.solution_tokens) == "It is 2.<|eos|>"
    unlike = write(tmp_path / "unlike.jsonl", [{"chosen": "Yes", "rejected": "Yeah", "question": "2?"}])
    for key in ("prompt", "asked", None):
        with refused():
            load(PairFile(unlike, prompt_key=key))


@pytest.mark.parametrize(("records", "allowed"), [([HH, *MALFORMED.values()], 0.5), (MALFORMED.values(), 1.0)])
def test_too_many_malformed_pairs_are_refused(refused, load, tmp_path, records, allowed):
    with refused():
        load(PairFile(write(tmp_path / "pairs.jsonl", records), malformed_fraction=allowed))


def test_pairs_are_held_out_by_file_or_by_prompt(load, tmp_path):
    records = [{**ASKED, "prompt": f"{n // 2}?", "gap": n} for n in range(400)]
    path, other = write(tmp_path / "pairs.jsonl", records), write(tmp_path / "other.jsonl", [HH])
    assert load(PairFile(path), "evaluation").problems[:] == []
    assert [pair.record for pair in load(PairFile(path, other), "evaluation").problems] == [HH]
    parts = [load(PairFile(path, evaluation_fraction=0.25), split).problems for split in ("train", "evaluation")]
    prompts = [{pair.prompt for pair in part} for part in parts]
    assert not prompts[0] & prompts[1]
    assert sorted(pair.record["gap"] for part in parts for pair in part) == list(range(400))
    assert 0.15 < len(parts[1]) / 400 < 0.35


def test_a_pair_is_too_long_if_one_of_its_answers_is(load, tmp_path):
    records = [{**ASKED, "rejected": "5" * 9}, {**ASKED, "chosen": "4" * 9}, ASKED]
    loaded = load(PairFile(write(tmp_path / "pairs.jsonl", records)), max_solution_tokens=9)
    assert [pair.record for pair in loaded.problems] == [ASKED]
    assert loaded.dropped_too_long == 2


def test_wrong_arithmetic_solutions_have_one_mistake_and_a_wrong_answer(load, tokenizer):
    data = ArithmeticPairs(difficulty=3, train_problems=300, eval_problems=10)
    early = 0
    for pair in load(data).problems:
        right, wrong = (tokenizer.decode(ids) for ids in (pair.solution_tokens, pair.rejected_tokens))
        assert right == pair.record["solution"] + "<|eos|>"
        *lines, last = wrong.removesuffix("<|eos|>").split("\n")
        assert last.startswith("#### ")
        assert last != f"#### {pair.answer}"
        assert last == f"#### {lines[-1].partition('=')[2]}"
        assert pair.safe == (True, False)
        false = [line for line in lines if eval(line.replace("=", "==").replace("/", "//")) is False]
        stopped = len(lines) < pair.record["steps"]
        early += stopped
        assert len(false) == (0 if stopped else 1), wrong
    assert 100 < early < 200
    again = load(data, "evaluation").problems
    assert len(again) == 10

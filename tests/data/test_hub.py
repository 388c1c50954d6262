"""Data sets of the hub: the files of a split, downloads, and errors."""

import itertools
import json
import threading

import pyarrow
import pytest
import tiny_hub
from pyarrow import parquet

from jaxrlhf.config import Gsm8k, HubData, HubPairs, HubSteps, PromptFile, Refusal
from jaxrlhf.data.sources import load_problems
from jaxrlhf.data.tokenizer import embedded_tokenizer
from tests.data.test_sources import write
from tests.models.test_hub import gone, listen

NAME = "us/sums"
CARD = """---
configs:
- config_name: plain
  data_files:
  - split: train
    path: plain/train-*
  - split: test
    path: [plain/held.jsonl]
- config_name: other
  data_files: other.jsonl
---
Sums.
"""


def lines(*numbers: int) -> bytes:
    return b"".join(json.dumps({"prompt": f"{n}+1?", "answer": n + 1}).encode() + b"\n" for n in numbers)


FILES = {
    "README.md": CARD.encode(),
    "plain/train-00000-of-00002.jsonl": lines(1, 2),
    "plain/train-00001-of-00002.jsonl": lines(3, 4),
    "plain/held.jsonl": lines(5),
    "other.jsonl": lines(6),
}


@pytest.fixture
def hub(tmp_path, monkeypatch):
    contents = tiny_hub.Contents({f"datasets/{NAME}": {"main": FILES, "v1": {"train.jsonl": lines(7)}}})
    server = tiny_hub.serve(contents)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    listen(monkeypatch, server.server_port)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("JAXRLHF_DATA_CACHE", "false")
    monkeypatch.delenv("HF_TOKEN", raising=False)
    yield contents
    server.shutdown()
    server.server_close()


def answers(data, split="train"):
    return [one.answer for one in load_problems(data, embedded_tokenizer(), split=split, max_prompt_tokens=99).problems]


def test_the_card_declares_the_files_of_a_split(hub):
    plain = HubData(NAME, subset="plain")
    assert (answers(plain), answers(plain, "evaluation")) == (["2", "3", "4", "5"], ["6"])
    assert answers(HubData(NAME, subset="other", evaluation=None)) == ["7"]


def test_a_file_is_downloaded_when_its_records_are_read(hub):
    assert answers(HubData(NAME, subset="plain", train_problems=2)) == ["2", "3"]
    assert hub.sent() == {"README.md", "train-00000-of-00002.jsonl"}


def test_gsm8k_is_the_subset_main(hub):
    files = {"main/train-0.jsonl": b'{"question": "1+1?", "answer": "#### 2"}\n', "socratic/train-0.jsonl": lines(1)}
    hub.repositories["datasets/openai/gsm8k"] = {"main": files}
    assert answers(Gsm8k()) == ["2"]
    assert hub.sent() == {"train-0.jsonl"}


def test_a_revision_is_another_state(hub):
    assert answers(HubData(NAME, revision="v1")) == ["8"]


def test_the_parquet_conversion_of_the_hub_is_a_revision(hub):
    hub.repositories[f"datasets/{NAME}"]["refs/convert/parquet"] = {"default/train/0000.jsonl": lines(8)}
    assert answers(HubData(NAME, revision="refs/convert/parquet")) == ["9"]


def test_downloaded_files_are_read_without_the_hub(hub, monkeypatch):
    data = HubData(NAME, subset="plain")
    assert len(answers(data)) == 4
    gone(monkeypatch)
    assert len(answers(data)) == 4
    with pytest.raises(Refusal, match="cannot be reached"):
        answers(HubData("us/other"))


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (HubData("us/none"), "no public data set of that name"),
        (HubData(NAME), "has the subsets plain, other; set data"),
        (HubData(NAME, subset="no"), "got 'no'"),
        (
            HubData(NAME, subset="plain", train="dev"),
            "no .jsonl, .json, .csv or .parquet file of split 'dev' in subset 'plain'",
        ),
        (HubData(NAME, revision="v2"), "no branch, tag or commit 'v2'"),
    ],
)
def test_missing_data_is_named(hub, data, said):
    with pytest.raises(Refusal, match=said):
        answers(data)


def test_a_local_directory_may_have_the_layout_of_a_hub_data_set(tmp_path):
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        write(tmp_path / folder / "train-00000.parquet", [{"prompt": folder, "answer": 1}])
    write(tmp_path / "a" / "test.jsonl", [{"prompt": "held", "answer": 2}])
    assert answers(HubData(str(tmp_path), subset="a")) == ["1"]
    assert answers(HubData(str(tmp_path), subset="a"), "evaluation") == ["2"]
    with pytest.raises(Refusal, match=r"set data\.subset to one of them"):
        answers(HubData(str(tmp_path)))


def test_the_name_of_a_file_takes_precedence_over_its_folders(tmp_path):
    (tmp_path / "train_test_split").mkdir()
    for split, number in (("train", 1), ("test", 2)):
        write(tmp_path / f"train_test_split/{split}.jsonl", [{"prompt": "x", "answer": number}])
    data = HubData(str(tmp_path))
    assert (answers(data), answers(data, "evaluation")) == (["1"], ["2"])


def test_a_card_that_cannot_be_read_is_named(tmp_path):
    write(tmp_path / "train.jsonl", [{"prompt": "x", "answer": 1}])
    (tmp_path / "README.md").write_bytes("Né à Paris".encode("latin-1"))
    assert answers(HubData(str(tmp_path))) == ["1"]
    (tmp_path / "README.md").write_text("---\nconfigs: [\n---\n")
    with pytest.raises(Refusal, match=r"README\.md of the directory .* is no data set's card"):
        answers(HubData(str(tmp_path)))


def test_columns_of_verl_and_trl_are_read_as_they_are(tmp_path):
    asked, said = {"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "It is 2."}
    verl = {"data_source": "sums", "prompt": [asked], "reward_model": {"style": "rule", "ground_truth": "2"}}
    write(tmp_path / "verl.parquet", [verl])
    write(tmp_path / "sft.jsonl", [{"messages": [asked, said]}])
    write(
        tmp_path / "completions.jsonl",
        [{"prompt": [asked], "completion": [said]}, {"prompt": "1+1?", "completion": "2"}],
    )
    tokenizer = embedded_tokenizer()

    def load(data):
        return load_problems(data, tokenizer, split="train", max_prompt_tokens=99).problems

    (one,) = load(PromptFile(str(tmp_path / "verl.parquet")))
    assert (one.answer, one.question, one.record["data_source"]) == ("2", "1+1?", "sums")
    (one,) = load(PromptFile(str(tmp_path / "sft.jsonl"), answer_key=None, solution_key="messages"))
    assert (one.question, tokenizer.decode(one.solution_tokens)) == ("1+1?", "It is 2.<|eos|>")
    data = PromptFile(str(tmp_path / "completions.jsonl"), answer_key=None, solution_key="completion")
    assert [tokenizer.decode(one.solution_tokens) for one in load(data)] == ["It is 2.<|eos|>", "2<|eos|>"]


def pair_lines(*records: dict) -> bytes:
    return b"".join(json.dumps(record).encode() + b"\n" for record in records)


def message(role: str, content: str) -> dict:
    return {"role": role, "content": content}


ASKED = message("user", "Sky?")
BLUE, RED = message("assistant", "It is blue."), message("assistant", "It is red.")
TRL_PAIRS = {
    "explicit": {"prompt": "Sky?", "chosen": "It is blue.", "rejected": "It is red."},
    "implicit": {"chosen": "Sky? It is blue.", "rejected": "Sky? It is red."},
    "conversation": {"prompt": [ASKED], "chosen": [BLUE], "rejected": [RED]},
    "implicit conversation": {"chosen": [ASKED, BLUE], "rejected": [ASKED, RED]},
}
"""A pair in each of the formats of TRL's page on data sets."""


def pairs_of(data, split="train"):
    """Prompt, chosen and rejected answer of each pair, as text."""
    tokenizer = embedded_tokenizer()
    loaded = load_problems(data, tokenizer, split=split, max_prompt_tokens=99)
    assert not loaded.malformed
    answers = ([tokenizer.decode(ids) for ids in (one.solution_tokens, one.rejected_tokens)] for one in loaded.problems)
    return [(one.question, *said) for one, said in zip(loaded.problems, answers, strict=True)]


@pytest.mark.parametrize("form", TRL_PAIRS)
def test_pairs_in_every_format_of_trl(hub, form):
    files = {"train.jsonl": pair_lines(TRL_PAIRS[form]), "test.jsonl": pair_lines(TRL_PAIRS[form])}
    hub.repositories["datasets/us/pairs"] = {"main": {}, "v1": files}
    key = None if form == "implicit" else "prompt"
    data = HubPairs("us/pairs", evaluation="test", revision="v1", prompt_key=key)
    prompt, chosen, rejected = "Sky?", "It is blue.<|eos|>", "It is red.<|eos|>"
    if form == "implicit":  # the words that both begin with
        prompt, chosen, rejected = "Sky? It is", " blue.<|eos|>", " red.<|eos|>"
    assert pairs_of(data) == pairs_of(data, "evaluation") == [(prompt, chosen, rejected)]


def test_pairs_of_the_hub_are_held_out_by_split_or_share_and_downloaded_as_they_are_read(hub):
    shards = [[{"prompt": f"{n}?", "chosen": "yes", "rejected": "no"} for n in range(k, k + 60)] for k in (0, 60)]
    files = {f"train-{k}.jsonl": pair_lines(*shard) for k, shard in enumerate(shards)}
    hub.repositories["datasets/us/pairs"] = {"main": files}
    few = HubPairs("us/pairs", evaluation_fraction=0.3, train_problems=60)
    train, held = pairs_of(few), pairs_of(few, "evaluation")
    assert hub.sent() == {"train-0.jsonl"}
    assert {prompt for prompt, *_ in (*train, *held)} == {f"{n}?" for n in range(60)} and len(train) + len(held) == 60
    assert pairs_of(HubPairs("us/pairs"), "evaluation") == [] and len(pairs_of(HubPairs("us/pairs"))) == 120
    with pytest.raises(Refusal, match="set only one of them"):
        HubPairs("us/pairs", evaluation="test", evaluation_fraction=0.1)


STEPS_CARD = """---
dataset_info:
  features:
  - name: prompt
    dtype: string
  - name: completions
    sequence: string
  - name: labels
    sequence: bool
configs:
- config_name: default
  data_files:
  - split: train
    path: data/train-*
  - split: test
    path: data/test-*
---
"""
"""Card in the form of trl-lib/math_shepherd and trl-lib/prm800k, whose files are Parquet with these columns."""


def test_labelled_steps_of_the_hub(hub, tmp_path):
    said = ["Step 1: 2 + 3 = 5.", "Step 2: 5 + 4 = 8. The answer is: 8"]
    table = {"prompt": ["2 + 3 + 4?"], "completions": [said], "labels": [[True, False]]}
    parquet.write_table(pyarrow.table(table), tmp_path / "steps.parquet")
    file = (tmp_path / "steps.parquet").read_bytes()
    files = dict.fromkeys(("data/train-00000-of-00001.parquet", "data/test-00000-of-00001.parquet"), file)
    hub.repositories["datasets/us/steps"] = {"main": {"README.md": STEPS_CARD.encode(), **files}}
    tokenizer = embedded_tokenizer()
    for split in ("train", "evaluation"):
        [one] = load_problems(HubSteps("us/steps"), tokenizer, split=split, max_prompt_tokens=99).problems
        ends = [0, *one.step_ends]
        texts = [tokenizer.decode(one.solution_tokens[a:b]) for a, b in itertools.pairwise(ends)]
        assert (one.question, texts) == ("2 + 3 + 4?", [f"{text}\n" for text in said])
        assert one.step_labels == (True, False)

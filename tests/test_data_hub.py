"""Data sets of the hub, by name: which files a split is, what is downloaded, and what is said when nothing comes."""

import json
import threading

import pytest
import tiny_hub
from test_data_sources import write
from test_models_hub import gone, listen

from jaxrlhf.config import HubData, PairFile, PromptFile, Refusal
from jaxrlhf.data.sources import load_problems
from jaxrlhf.data.tokenizer import embedded_tokenizer

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
    threading.Thread(target=server.serve_forever, daemon=True).start()
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


def test_the_card_says_which_files_a_split_is(hub):
    plain = HubData(NAME, subset="plain")
    assert (answers(plain), answers(plain, "evaluation")) == (["2", "3", "4", "5"], ["6"])
    assert answers(HubData(NAME, subset="other", evaluation=None)) == ["7"]


def test_a_file_is_downloaded_when_its_records_are_read(hub):
    assert answers(HubData(NAME, subset="plain", train_problems=2)) == ["2", "3"]
    assert hub.sent() == {"README.md", "train-00000-of-00002.jsonl"}


def test_a_revision_is_another_state(hub):
    assert answers(HubData(NAME, revision="v1")) == ["8"]


def test_the_parquet_that_the_hub_makes_of_a_data_set_is_a_revision(hub):
    hub.repositories[f"datasets/{NAME}"]["refs/convert/parquet"] = {"default/train/0000.jsonl": lines(8)}
    assert answers(HubData(NAME, revision="refs/convert/parquet")) == ["9"]


def test_without_the_hub_there_is_what_was_downloaded(hub, monkeypatch):
    data = HubData(NAME, subset="plain")
    assert len(answers(data)) == 4
    gone(monkeypatch)
    assert len(answers(data)) == 4
    with pytest.raises(Refusal, match="cannot be reached"):
        answers(HubData("us/other"))


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (HubData("us/none"), "no data set of that name"),
        (HubData(NAME), "has the subsets plain, other; say which"),
        (HubData(NAME, subset="no"), "got 'no'"),
        (HubData(NAME, subset="plain", train="dev"), "no .jsonl or .parquet file of split 'dev' in subset 'plain'"),
        (HubData(NAME, revision="v2"), "no branch, tag or commit 'v2'"),
    ],
)
def test_what_is_not_there_is_named(hub, data, said):
    with pytest.raises(Refusal, match=said):
        answers(data)


def test_a_local_directory_may_be_laid_out_like_one(tmp_path):
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        write(tmp_path / folder / "train-00000.parquet", [{"prompt": folder, "answer": 1}])
    write(tmp_path / "a" / "test.jsonl", [{"prompt": "held", "answer": 2}])
    assert answers(HubData(str(tmp_path), subset="a")) == ["1"]
    assert answers(HubData(str(tmp_path), subset="a"), "evaluation") == ["2"]
    with pytest.raises(Refusal, match=r"say which is data\.subset"):
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
    pairs = [{"chosen": [asked, said], "rejected": [asked, {**said, "content": "3"}]}]
    pairs.append({"prompt": [asked], "chosen": [said], "rejected": [{**said, "content": "3"}]})
    write(tmp_path / "pairs.jsonl", pairs)
    tokenizer = embedded_tokenizer()

    def load(data):
        return load_problems(data, tokenizer, split="train", max_prompt_tokens=99).problems

    (one,) = load(PromptFile(str(tmp_path / "verl.parquet")))
    assert (one.answer, one.question, one.record["data_source"]) == ("2", "1+1?", "sums")
    (one,) = load(PromptFile(str(tmp_path / "sft.jsonl"), answer_key=None, solution_key="messages"))
    assert (one.question, tokenizer.decode(one.solution_tokens)) == ("1+1?", "It is 2.<|eos|>")
    data = PromptFile(str(tmp_path / "completions.jsonl"), answer_key=None, solution_key="completion")
    assert [tokenizer.decode(one.solution_tokens) for one in load(data)] == ["It is 2.<|eos|>", "2<|eos|>"]
    for one in load(PairFile(str(tmp_path / "pairs.jsonl"))):
        texts = tokenizer.decode(one.solution_tokens), tokenizer.decode(one.rejected_tokens)
        assert (one.question, texts) == ("1+1?", ("It is 2.<|eos|>", "3<|eos|>"))

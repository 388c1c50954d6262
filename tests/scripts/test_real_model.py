"""The page on a real model is written from its figures, and a claim is measured in a process of its own."""

import json
import subprocess
import sys

import pytest

from jaxrlhf.episode import Reply
from scripts import pages
from scripts.real_model import __main__ as real_model
from scripts.real_model import page, tasks


def figures_of(claim):
    """Figures that have every row's name, each as expected."""
    made = {}
    for row in claim.rows:
        *parts, last = row.name.split("/")
        place = made
        for part in parts:
            place = place.setdefault(part, {})
        value = row.equal if row.most is None and row.least is None else row.most or row.least
        place[last] = 64 if value is None or isinstance(value, str) else value
    return made


@pytest.fixture
def measured():
    about = {"date": "2026-11-27 14:00", "commit": "abc1234", "seconds": 61.2, "machine": "a processor"}
    return {name: {"figures": figures_of(claim), **about} for name, claim in page.CLAIMS.items()}


def test_every_claim_has_a_function_and_a_place_on_the_page(measured):
    assert list(real_model.FUNCTIONS) == list(page.CLAIMS)
    written = pages.written(real_model.PAGE.read_text(), page.parts(measured, {}))
    for name, claim in page.CLAIMS.items():
        assert f"## {claim.title}\n" in written.partition(f"<!-- {name} -->")[0]
    assert "does not hold" not in page.table("logits", measured["logits"])
    assert "a processor; 2026-11-27 14:00, commit `abc1234`, 61 s." in written


def test_what_does_not_hold_is_marked(measured):
    measured["logits"]["figures"]["float32"]["logit_largest"] = 0.25
    measured["greedy"]["figures"]["server_equals_engine"] = 63
    del measured["killed"]
    rows = page.table("logits", measured["logits"]).splitlines()
    assert "| float32, largest difference of a logit | 0.25 | at most 0.001 | **does not hold** |" in rows
    assert "| 63 | 64 | **does not hold** |" in page.table("greedy", measured["greedy"])
    summary = page.summary(measured)
    assert "give-the-same-greedy-answers) | 2 of 3 |" in summary
    assert "| A run that was killed and resumed is the same run | not measured |" in summary
    assert page.parts(measured, {})["killed"] == "Not measured yet."


def test_memory_is_that_of_the_peers():
    step = {"jaxrlhf": {"peak_rss_mb": 4000.0, "step_s": 60.0}, "trl": {"peak_rss_mb": 8000.0, "step_s": 90.0}}
    text = page.memory({"smollm2_grpo": step, "machine": {"processor": "Abacus"}})
    assert "| TRL | 8000 | 90 |" in text and "That is 0.50 of TRL's memory. Abacus." in text
    assert page.memory({}).startswith("Not measured yet")


def test_pairs_and_sums():
    pairs = list(tasks.pairs(tasks.NOUNS, each=3))
    assert not {*tasks.NOUNS} & {*tasks.HELD_OUT_NOUNS}
    assert all(pair["chosen"] == pair["rejected"].lower() != pair["rejected"] for pair in pairs)
    assert tasks.lowercase("", "the Fox", None, {}) == pytest.approx(5 / 6)
    [record] = tasks.opening_sums(1)
    sums = tasks.Sums()
    sums.reset(record, 0)
    turns = [sums.step(Reply("14", "14")) for _ in range(tasks.TURNS)]
    assert [turn.done for turn in turns] == [False] * 9 + [True]
    assert [message["content"] for message in turns[1].messages] == ["21", "And what is 21+14?"]


@pytest.mark.seeds
def test_logits_are_measured_in_a_process_of_its_own(smollm2, tmp_path):
    records = [{"question": f"Tom has {n} apples and eats one. " * 12, "answer": f"#### {n - 1}"} for n in range(2, 30)]
    for split in ("train", "test"):
        (tmp_path / f"{split}.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    out = tmp_path / "figures.json"
    command = [sys.executable, "-m", "scripts.real_model", "--alone", "logits", "--out", str(out)]
    subprocess.run([*command, "--model", str(smollm2), "--gsm8k", str(tmp_path)], cwd=pages.ROOT, check=True)
    about = {"date": "", "commit": "", "seconds": 0.0, "machine": ""}
    assert "does not hold" not in page.table("logits", {"figures": json.loads(out.read_text()), **about})

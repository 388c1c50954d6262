"""Completions of a file of prompts: written with their records, all of them or the best by a reward; one command."""

import datetime
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow.parquet
import pytest
from tiny_runs import write_policy

from jaxrlhf.__main__ import COMMANDS, main
from jaxrlhf.config import Refusal, RepetitionReward, Rewards
from jaxrlhf.config import load as load_configuration
from jaxrlhf.generate import _answering
from jaxrlhf.trainer.served_policy.completions import best_of_groups
from jaxrlhf.trainer.served_policy.flags import EngineSizes
from jaxrlhf.trainer.served_policy.load import load_policy

pytestmark = pytest.mark.usefixtures("programs")

QUICK = "--rollout.max-response-tokens 4 --rollout.slots 4 --rollout.max-prompt-tokens 32 --rollout.prompts-per-step 2"
LONGER = """
def score(prompt, response, answer, record, question):
    assert question == "system: Brief.\\n\\nuser: " + record["prompt"]
    return None if record["id"] == 2 else float(len(response))
"""


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("generate")
    write_policy(folder / "model")
    (folder / "reward.py").write_text(LONGER)
    prompts = [{"prompt": "Tom has 3.", "id": 1}, {"prompt": "And 4?", "id": 2}, {"prompt": "Mia has 5.", "id": 3}]
    prompts[2]["hint"] = "Add."
    (folder / "prompts.jsonl").write_text("".join(json.dumps(prompt) + "\n" for prompt in prompts))
    return folder


def generate(monkeypatch, files: Path, out: str, words: str) -> None:
    """The command, as `jaxrlhf generate` runs it."""
    given = [str(files / "model"), str(files / "prompts.jsonl"), str(files / out), *QUICK.split(), *words.split()]
    monkeypatch.setattr(sys, "argv", ["jaxrlhf", "generate", *given])
    main()


@pytest.mark.slow
def test_completions_are_written_with_their_records(files, monkeypatch, capsys):
    generate(monkeypatch, files, "one.jsonl", "")
    rows = [json.loads(line) for line in (files / "one.jsonl").read_text().splitlines()]
    assert [(row["prompt"], row["id"], row["sample"]) for row in rows] == [
        ("Tom has 3.", 1, 0),
        ("And 4?", 2, 0),
        ("Mia has 5.", 3, 0),
    ]
    assert all(row["completion"] and "score" not in row for row in rows)
    said = capsys.readouterr().out
    assert said.splitlines()[-3:] == [
        "step 1/2  2 completions",
        "step 2/2  3 completions",
        f"wrote 3 completions to {files / 'one.jsonl'}",
    ]
    with pytest.raises(SystemExit):
        generate(monkeypatch, files, "one.jsonl", "")
    assert "already exists" in capsys.readouterr().err


def test_prompts_that_cannot_be_read_leave_no_file_in_the_way(files, monkeypatch, capsys):
    (files / "wrong.jsonl").write_text('{"prompt": 3}\n')
    given = [str(files / "model"), str(files / "wrong.jsonl"), str(files / "wrong_out.jsonl"), *QUICK.split()]
    monkeypatch.setattr(sys, "argv", ["jaxrlhf", "generate", *given])
    with pytest.raises(SystemExit):
        main()
    assert "wrong.jsonl, line 1" in capsys.readouterr().err
    assert not (files / "wrong_out.jsonl").exists()


@pytest.mark.slow
def test_the_best_of_several_is_the_one_of_the_highest_score(files, monkeypatch):
    words = f"--samples 6 --reward {files / 'reward.py'}:score --system-prompt Brief."
    generate(monkeypatch, files, "all.parquet", words)
    generate(monkeypatch, files, "best.jsonl", words + " --best")
    rows = pyarrow.parquet.read_table(files / "all.parquet").to_pylist()
    best = [json.loads(line) for line in (files / "best.jsonl").read_text().splitlines()]
    assert len(rows) == 18 and [row["sample"] for row in rows[:6]] == [*range(6)]
    assert [row["hint"] for row in rows[::6]] == [None, None, "Add."], "a field that the first record has not"
    assert len({row["completion"] for row in rows}) > 3
    assert all(np.isnan(row["score"]) for row in rows if row["id"] == 2)
    assert [row["id"] for row in best] == [1, 3], "a prompt without a score has no best answer"
    for row in best:
        assert row["score"] == max(other["score"] for other in rows if other["id"] == row["id"])
        assert {"hint": None, **row} in rows


def test_records_that_the_file_cannot_hold_are_refused_before_they_are_answered(files, monkeypatch, capsys):
    (files / "mixed.jsonl").write_text('{"prompt": "Tom", "n": 1}\n{"prompt": "Mia", "n": "one"}\n')
    pyarrow.parquet.write_table(
        pyarrow.table({"prompt": ["Tom"], "at": [datetime.datetime(2026, 1, 1)]}), files / "dated.parquet"
    )
    for prompts, out, words in (
        ("mixed.jsonl", "mixed.parquet", "choose a .jsonl file"),
        ("dated.parquet", "dated.jsonl", "choose a .parquet file"),
    ):
        given = [str(files / "model"), str(files / prompts), str(files / out), *QUICK.split()]
        monkeypatch.setattr(sys, "argv", ["jaxrlhf", "generate", *given])
        with pytest.raises(SystemExit):
            main()
        assert words in capsys.readouterr().err and not (files / out).exists()


def test_one_answer_is_greedy_and_else_as_the_settings_say(files, monkeypatch):
    given = {}
    place = "jaxrlhf.trainer.served_policy.completions.write_completions"
    monkeypatch.setattr(place, lambda *_, **how: given.update(how) or 0)
    generate(monkeypatch, files, "none.jsonl", "--rollout.sampling.min-tokens 3")
    assert (given["sampling"].greedy, given["sampling"].min_tokens) == (True, 3)


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        (EngineSizes(tensor=0), "--tensor 0"),
        (EngineSizes(context_tokens=0), "--context 0"),
        (EngineSizes(response_tokens=0), "max_response_tokens=0"),
    ],
)
def test_sizes_of_nothing_are_refused(files, sizes, words):
    with pytest.raises(Refusal, match=words):
        load_policy(str(files / "model"), sizes)


def test_settings_of_a_run_that_learns_from_late_responses_answer_prompts_too():
    run = replace(load_configuration("grpo_arithmetic"), rewards=Rewards((RepetitionReward(),)))
    rollout = replace(run.rollout, staleness=1, over_provision=1.5, quantize="int8")
    answering = _answering(replace(run, rollout=rollout), "prompts.jsonl")
    assert answering.rollout == run.rollout and answering.data.train == "prompts.jsonl"


def test_the_first_of_equals_is_the_best():
    nan = float("nan")
    assert best_of_groups(np.array([1.0, 3.0, 3.0, nan, nan, nan, nan, -1.0, nan]), 3) == [1, 7]


HELP = """
import sys
from jaxrlhf.__main__ import COMMANDS, main

for name in COMMANDS:
    sys.argv = ["jaxrlhf", name, "--help"]
    try:
        main()
    except SystemExit:
        print("\\f", end="")
    assert "jax" not in sys.modules, name
"""


def test_every_command_is_helped_with_examples_and_without_jax():
    shown = subprocess.run([sys.executable, "-c", HELP], capture_output=True, text=True, check=True).stdout
    for name, text in zip(COMMANDS, shown.split("\f")[:-1], strict=True):
        assert text.startswith(f"usage: jaxrlhf {name} ")
        assert f"examples:\n  jaxrlhf {name}" in text


def test_the_names_of_commands_are_told(monkeypatch, capsys):
    for words, code in ([], None), (["--help"], None), (["trian"], 2):
        monkeypatch.setattr(sys, "argv", ["jaxrlhf", *words])
        try:
            main()
        except SystemExit as end:
            assert end.code == code
        shown = capsys.readouterr()
        assert all(name in shown.out + shown.err for name in ("train", "evaluate", "generate", "chat"))

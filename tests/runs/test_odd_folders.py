"""Damaged folders of runs and of their models: one refusal with the path, whichever command reads them."""

import os
import shutil
import threading
import time
from pathlib import Path

import pytest
from made_runs import LORA, made_config, make_run

import jaxrlhf
from jaxrlhf.config import Refusal
from jaxrlhf.trainer.policy import evaluate_policy, export_policy, policy_roles
from jaxrlhf.viewer.run_files import RunFiles


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole") / "run"
    make_run(folder, LORA)
    return folder


@pytest.fixture
def run(whole, tmp_path):
    """A copy to damage."""
    return shutil.copytree(whole, tmp_path / "run")


def resume(run: Path) -> None:
    jaxrlhf.run(made_config(run, LORA))


def export(run: Path) -> None:
    assert export_policy(run, run.parent / "exported", merge=True) == 2


def evaluate(run: Path) -> None:
    evaluate_policy(made_config(run, LORA), policy=str(run), samples=1, show=0)


def view(run: Path) -> None:
    """Read what the pages of a run show."""
    files = RunFiles(run.parent)
    [listed] = files.runs()
    if "unreadable" in listed:
        raise Refusal(listed["unreadable"])
    assert files.settings("run")["name"] == "tiny"


COMMANDS = {"resume": resume, "export": export, "evaluate": evaluate, "view": view}


def replaced(make):
    """Return a damage that puts something else in a file's place."""

    def damage(file: Path) -> None:
        shutil.rmtree(file) if file.is_dir() else file.unlink()
        make(file)

    return damage


DAMAGES = {
    "a folder": replaced(Path.mkdir),
    "a pipe": replaced(os.mkfifo),
    "a file": replaced(Path.touch),
    "missing": replaced(lambda file: None),
    "empty": lambda file: file.write_bytes(b""),
    "cut": lambda file: file.write_bytes(file.read_bytes()[:-9]),
    "bytes": lambda file: file.write_bytes(b"\x80\xff"),
    "no JSON": lambda file: file.write_text("lora = 32"),
    "a list": lambda file: file.write_text("[]"),
    "deep": lambda file: file.write_text("[" * 100_000),
    "a number": lambda file: file.write_text("5"),
}
OF_JSON = ("a folder", "a pipe", "empty", "cut", "bytes", "no JSON", "a list", "deep", "a number")
ODD = ("a folder", "a pipe")
READ = {  # by file, with the damages that a command has to notice
    "config.json": dict.fromkeys(COMMANDS, OF_JSON),
    "lock": {"resume": ODD},
    "weights.json": {"resume": ODD},
    **{name: {"resume": ODD} for name in ("timeline.json", "curve.png", "timeline.png", "reward_output.log")},
    "metrics.jsonl": {"resume": ODD, "view": ODD},
    **{name: {"resume": ODD} for name in ("samples.jsonl", "evaluation.jsonl")},
    "model": {"resume": ("a file", "a pipe"), "export": ("missing", "a file"), "evaluate": ("missing", "a file")},
    "model/config.json": {"resume": ODD, "export": (*OF_JSON, "missing"), "evaluate": ODD},
    "model/generation_config.json": {"resume": ODD, "export": ODD, "evaluate": ODD},
    "model/tokenizer.json": {"resume": ODD, "export": ODD, "evaluate": (*OF_JSON, "missing")},
    "model/tokenizer_config.json": {"resume": ODD, "export": ODD, "evaluate": OF_JSON},
    "checkpoints": {"resume": ("a file", "a pipe"), "export": ("a file", "missing"), "evaluate": ("a file", "missing")},
    "checkpoints/step_2": dict.fromkeys(("export", "evaluate"), ("missing", "a file", "a pipe")),
    "checkpoints/step_2/host": dict.fromkeys(("export", "evaluate"), ("missing", "a file", "a pipe")),
    "checkpoints/step_2/host/metadata": {"export": (*OF_JSON, "missing"), "evaluate": ("a pipe", "cut")},
    "checkpoints/step_2/actor_adapters": dict.fromkeys(("export", "evaluate"), ("missing", "a file", "a pipe")),
    "checkpoints/step_2/actor_adapters/checksums.json": {
        "export": (*OF_JSON, "missing"),
        "evaluate": ("a pipe", "cut"),
    },
}
CASES = [
    (command, file, damage)
    for file, commands in READ.items()
    for command, damages in commands.items()
    for damage in damages
]


@pytest.mark.parametrize(("command", "file", "damage"), CASES, ids=[" ".join(case) for case in CASES])
def test_damage_is_one_refusal_with_the_path(run, command, file, damage):
    path = run / file
    if not path.exists():
        path.touch()  # a run writes it in other settings
    DAMAGES[damage](path)
    released = threading.Timer(60, lambda: os.close(os.open(path, os.O_RDWR)))  # ends a read or write that waits
    if damage == "a pipe":
        released.start()
    start = time.monotonic()
    with pytest.raises(Refusal) as refused:
        COMMANDS[command](run)
    released.cancel()
    assert time.monotonic() - start < 55
    # What is no folder is no checkpoint, and the files of a tokenizer are read as one.
    parts = file == "checkpoints/step_2" or file.startswith("model/tokenizer")
    named = path.parent if parts or damage in ("missing", "a file") else path
    assert str(named) in str(refused.value)
    assert "\n" not in str(refused.value)


def test_whole_folder_is_read_by_every_command(run, monkeypatch):
    monkeypatch.setattr("jaxrlhf.trainer.run.run_phase", lambda context, config, *_, **__: config.folder)
    resume(run)
    export(run)
    assert policy_roles(made_config(run, LORA), str(run)).saved.step == 2
    view(run)

"""docs/first_week.md: its files are written and its commands run as they stand, but for ports."""

import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import urllib.request
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

PAGE = (Path(__file__).parents[2] / "docs" / "first_week.md").read_text()
BLOCK = re.compile(r"(?P<before>[^\n]+)\n+```(?P<language>\w+)\n(?P<text>.*?)^```$", re.DOTALL | re.MULTILINE)


def steps(page: str) -> list[tuple[str, str]]:
    """Blocks of the page in order: `file NAME`, `run` or `until Ctrl-C`, and the text of each."""
    found = []
    for block in BLOCK.finditer(page):
        before, text = block["before"], block["text"]
        if block["language"] != "sh":
            [name] = re.findall(r"`([\w.]+)`", before)
            found.append((f"file {name}", text))
        elif before.startswith("<!-- "):
            found.append((before.removeprefix("<!-- ").removesuffix(" -->"), text))
    return found


def free_port() -> str:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return str(taken.getsockname()[1])


@contextmanager
def going_on(command: str, folder: Path, environment: dict[str, str]):
    """A command that runs until Ctrl-C; yields its first line."""
    with subprocess.Popen(shlex.split(command), cwd=folder, env=environment, stdout=subprocess.PIPE, text=True) as one:
        assert one.stdout is not None
        try:
            yield one.stdout.readline()
            one.send_signal(signal.SIGINT)
            assert one.wait(60) == 130
        finally:
            one.kill()


def test_the_page_has_files_and_commands():
    kinds = [kind for kind, _ in steps(PAGE)]
    files = ("tickets.csv", "prepare.py", "my_rewards.py", "tickets.py", "ask.py")
    assert [kind for kind in kinds if kind.startswith("file")] == [f"file {name}" for name in files]
    assert (kinds.count("run"), kinds.count("until Ctrl-C")) == (7, 2)
    commands = " ".join(text for kind, text in steps(PAGE) if not kind.startswith("file"))
    for name in ("train", "evaluate", "generate", "export", "serve", "view"):
        assert f"jaxrlhf {name} " in commands


@pytest.mark.slow
def test_the_page_runs_as_it_stands(tmp_path):
    script = tmp_path / "bin" / "jaxrlhf"  # as pip installs it
    script.parent.mkdir()
    script.write_text(f'#!/bin/sh\nexec {sys.executable} -m jaxrlhf "$@"\n')
    script.chmod(0o755)
    path = os.pathsep.join((str(script.parent), str(Path(sys.executable).parent), os.environ["PATH"]))
    compiled = {"JAX_ENABLE_COMPILATION_CACHE": "true", "JAX_COMPILATION_CACHE_DIR": str(tmp_path / "compiled")}
    environment = {**os.environ, **compiled, "PATH": path}
    page = PAGE
    for port in ("6060", "8000"):
        page = page.replace(port, free_port())
    folder, printed = tmp_path / "project", {}
    folder.mkdir()
    with ExitStack() as stack:
        for kind, text in steps(page):
            if kind.startswith("file "):
                (folder / kind.removeprefix("file ")).write_text(text)
            elif kind == "run":
                done = subprocess.run(
                    ["bash", "-euo", "pipefail", "-c", text],
                    cwd=folder,
                    env=environment,
                    stdout=subprocess.PIPE,
                    text=True,
                )
                assert done.returncode == 0, f"{text}{done.stdout}"
                printed[text.split()[1]] = done.stdout
            else:
                [address] = re.findall(r"http://[\w.:]+", stack.enter_context(going_on(text, folder, environment)))
                if " view " in text:
                    with urllib.request.urlopen(address) as answer:
                        assert b"<title>" in answer.read()
    assert len((folder / "train.jsonl").read_text().splitlines()) == 18
    metrics = [json.loads(line) for line in (folder / "runs/tickets/metrics.jsonl").read_text().splitlines()]
    assert [one["step"] for one in metrics] == [1, 2, 3, 4]
    assert "resuming after step 2 of 4" in printed["train"]
    assert "pass@4" in printed["evaluate"]
    best = [json.loads(line) for line in (folder / "best.jsonl").read_text().splitlines()]
    assert len(best) == 6 and all({"completion", "score", "answer"} <= set(one) for one in best)
    assert printed["ask.py"].strip()

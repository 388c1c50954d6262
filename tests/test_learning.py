"""README's main job and the notebook: a tiny model learns, start to end."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

ROOT = Path(__file__).parents[1]
pytestmark = pytest.mark.slow


def readme_block(mark: str) -> str:
    """The fenced block after a mark in README."""
    found = re.search(rf"<!-- {mark} -->\n```sh\n(.*?)\n```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert found is not None
    return found[1]


def accuracies(metrics: Path) -> tuple[float, float]:
    """Held-out greedy accuracy after the cold start and at the end."""
    records = [json.loads(line) for line in metrics.read_text().splitlines()]
    return records[0]["eval/accuracy_at_start"], records[-1]["eval/accuracy"]


def own_environment() -> dict[str, str]:
    """One CPU device, as a newcomer has it: what conftest sets for eight stays out."""
    return {name: value for name, value in os.environ.items() if name not in ("NPROC", "JAX_PLATFORMS")}


def test_readmes_main_job_learns(tmp_path: Path) -> None:
    *_, command = readme_block("train").split(" && ")
    program, *arguments = shlex.split(command)
    assert program == ".venv/bin/python"
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=tmp_path,
        env=own_environment(),
        capture_output=True,
        text=True,
        timeout=1200,
        check=True,
    )
    start, end = accuracies(tmp_path / "runs/ppo_arithmetic/metrics.jsonl")
    assert start <= 0.5
    assert end >= 0.9
    assert len(re.findall(r"^--- step 20 · score", done.stdout, re.MULTILINE)) == 5
    assert "learning curve: runs/ppo_arithmetic/curve.png" in done.stdout
    assert (tmp_path / "runs/ppo_arithmetic/curve.png").stat().st_size > 10_000


def test_the_notebook_learns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    notebook = nbformat.read(ROOT / "notebooks/quickstart.ipynb", as_version=4)
    assert len(notebook.cells) <= 15
    for name in ("NPROC", "JAX_PLATFORMS"):
        monkeypatch.delenv(name, raising=False)
    NotebookClient(notebook, timeout=1200, resources={"metadata": {"path": str(tmp_path)}}).execute()
    start, end = accuracies(tmp_path / "runs/quickstart/metrics.jsonl")
    assert start <= 0.5
    assert end >= 0.9
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    assert any("image/png" in output.get("data", {}) for output in outputs)
    assert (tmp_path / "runs/quickstart/policy/model.safetensors").is_file()

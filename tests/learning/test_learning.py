"""README's main job and the notebook: a tiny model learns, start to end."""

import functools
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

import jaxrlhf

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.usefixtures("programs")

OURS = ("NPROC", "JAX_PLATFORMS", "XLA_FLAGS", "JAX_DISABLE_MOST_OPTIMIZATIONS")
"""Environment that conftest sets; a newcomer has one CPU device and optimised programs."""


def readme_block(mark: str) -> str:
    """The fenced block after a mark in README."""
    found = re.search(rf"<!-- {mark} -->\n```sh\n(.*?)\n```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert found is not None
    return found[1]


def accuracies(metrics: Path) -> tuple[float, float]:
    """Held-out greedy accuracy after the cold start and at the end."""
    records = [json.loads(line) for line in metrics.read_text().splitlines()]
    return records[0]["eval/accuracy_at_start"], records[-1]["eval/accuracy"]


@pytest.fixture(scope="module")
def readmes_job(programs: None, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., tuple[Path, str]]:
    """Runs it with further arguments, once, and says its workdir and what it printed."""

    @functools.cache
    def job(*further: str) -> tuple[Path, str]:
        *_, command = readme_block("train").split(" && ")
        program, *arguments = shlex.split(command)
        assert program == ".venv/bin/python"
        folder = tmp_path_factory.mktemp("readme")
        done = subprocess.run(
            [sys.executable, *arguments, *further],
            cwd=folder,
            env={name: value for name, value in os.environ.items() if name not in OURS},
            capture_output=True,
            text=True,
            timeout=1200,
            check=True,
        )
        return folder / "runs/ppo_arithmetic", done.stdout

    return job


SHORT = ("--steps", "5", "--actor.optimizer.decay", "constant", "--algorithm.critic.optimizer.decay", "constant")
"""Arguments that leave README's job its cold start and the steps in which it learns most."""


@pytest.mark.parametrize(
    ("further", "steps", "learnt"),
    [
        pytest.param(SHORT, 5, 0.75, marks=pytest.mark.slow, id="five steps"),
        pytest.param((), 20, 0.9, marks=pytest.mark.seeds, id="whole"),
    ],
)
def test_readmes_main_job_learns(
    readmes_job: Callable[..., tuple[Path, str]], further: tuple[str, ...], steps: int, learnt: float
) -> None:
    """Held-out accuracy rises from at most a fifth to the bar, and the console says so."""
    workdir, printed = readmes_job(*further)
    start, end = accuracies(workdir / "metrics.jsonl")
    assert start <= 0.2
    assert end >= learnt
    assert len(re.findall(rf"^--- step {steps} · score", printed, re.MULTILINE)) == 5
    assert "learning curve: runs/ppo_arithmetic/curve.png" in printed
    assert (workdir / "curve.png").stat().st_size > 10_000


ONE_STEP = {"steps": 1, "evaluation.every_steps": 1, "evaluation.problems": 32, "rollout.prompts_per_step": 8}


def cold_start_of(name: str) -> tuple[object, ...]:
    """All that the cold start of a shipped configuration depends on."""
    config = jaxrlhf.load(name)
    longest = (config.rollout.max_prompt_tokens, config.rollout.max_response_tokens)
    return config.model, config.data, config.cold_start, config.actor, config.compute_dtype, config.seed, longest


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param(ONE_STEP, marks=pytest.mark.slow, id="one step"),
        pytest.param({}, marks=pytest.mark.seeds, id="whole"),
    ],
)
def test_the_notebook_runs_and_as_a_whole_learns(
    changes: dict[str, int],
    readmes_job: Callable[..., tuple[Path, str]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Its cold start equals that of README's job, which takes a minute: the notebook continues from a copy.
    assert cold_start_of("grpo_arithmetic") == cold_start_of("ppo_arithmetic")
    shutil.copytree(readmes_job(*SHORT)[0] / "cold_start", tmp_path / "runs/quickstart/cold_start")
    notebook = nbformat.read(ROOT / "notebooks/quickstart.ipynb", as_version=4)
    assert len(notebook.cells) <= 15
    [cell] = [cell for cell in notebook.cells if "jaxrlhf.override(" in cell.source]
    cell.source += f"\nconfig = jaxrlhf.override(config, {changes!r})"
    for name in OURS if not changes else ("NPROC", "XLA_FLAGS"):  # one step is compiling, most of all
        monkeypatch.delenv(name, raising=False)
    NotebookClient(notebook, timeout=1200, resources={"metadata": {"path": str(tmp_path)}}).execute()
    start, end = accuracies(tmp_path / "runs/quickstart/metrics.jsonl")
    assert start <= 0.5
    assert end >= 0.9 or changes
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    assert any("image/png" in output.get("data", {}) for output in outputs)
    assert (tmp_path / "runs/quickstart/policy/model.safetensors").is_file()


ONE_SMALL_STEP = {
    "ColdStart(steps=40,": "ColdStart(steps=2,",
    "prompts_per_step=16": "prompts_per_step=4",
    "responses_per_update=64": "responses_per_update=32",
    "steps=8,\n": "steps=1,\n",
    "Evaluation(every_steps=0, problems=64)": "Evaluation(every_steps=0, problems=8)",
}


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param(ONE_SMALL_STEP, marks=pytest.mark.slow, id="one step"),
        pytest.param({}, marks=pytest.mark.seeds, id="whole"),
    ],
)
def test_the_notebook_of_agents_runs_and_as_a_whole_learns(
    changes: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    notebook = nbformat.read(ROOT / "notebooks/agents.ipynb", as_version=4)
    assert len(notebook.cells) <= 15
    [cell] = [cell for cell in notebook.cells if "config = Config(" in cell.source]
    for old, new in changes.items():
        assert cell.source.count(old) == 1, old
        cell.source = cell.source.replace(old, new)
    for name in ("NPROC", "XLA_FLAGS"):
        monkeypatch.delenv(name, raising=False)
    NotebookClient(notebook, timeout=1200, resources={"metadata": {"path": str(tmp_path)}}).execute()
    metrics = [json.loads(line) for line in (tmp_path / "runs/path/metrics.jsonl").read_text().splitlines()]
    assert metrics[0]["score/mean"] <= 0.5
    said = "".join(output.get("text", "") for output in notebook.cells[-1]["outputs"])
    assert said.strip().endswith(("treasure", "lost"))
    if not changes:
        assert metrics[-1]["score/mean"] >= 0.9
        assert said.strip().endswith("treasure")

"""Every algorithm without a critic learns the smallest task there is, README's own too, and goes on after a kill."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from test_extending import readmes_algorithm
from tiny_runs import numbers, records

PROGRAM = Path(__file__).with_name("learning_run.py")
NAMES = (
    *("GRPO", "DrGRPO", "RLOO", "OPO", "GPG", "ReinforcePlusPlus", "ReinforcePlusPlusBaseline", "ReMax", "DAPO"),
    *("GSPO", "CISPO", "SAPO"),
)
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def environment(tmp_path_factory) -> dict[str, str]:
    """One device; the first run compiles, and the others load what they have in common with it."""
    ours = {name: value for name, value in os.environ.items() if name not in ("NPROC", "JAX_PLATFORMS")}
    return {
        **ours,
        "JAX_ENABLE_COMPILATION_CACHE": "true",
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path_factory.mktemp("compiled")),
    }


def run(environment: dict[str, str], name: str, workdir: Path, *last: int) -> subprocess.CompletedProcess:
    command = [sys.executable, str(PROGRAM), name, str(workdir), *map(str, last)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)


@pytest.mark.parametrize("name", NAMES)
def test_it_learns(name, environment, tmp_path):
    done = run(environment, name, tmp_path)
    assert done.returncode == 0, done.stderr
    logged = records(tmp_path / "metrics.jsonl")
    assert logged[0]["eval/accuracy_at_start"] <= 0.2
    assert logged[0]["score/format"] <= 0.3
    assert logged[-1]["eval/accuracy"] >= 0.9
    assert logged[-1]["score/format"] >= 0.9 or name == "DAPO"  # which trains where answers still differ
    assert len({record["compile/count"] for record in logged}) == 1
    if name == "DAPO":
        assert all(record["group/kept"] == 8 for record in logged[:5])
        assert max(record["group/generated"] for record in logged) > 8


@pytest.mark.parametrize("name", ["DAPO", "the file that README shows"])
def test_a_run_that_was_killed_goes_on_with_the_same_numbers(name, environment, tmp_path):
    name = name if name == "DAPO" else str(readmes_algorithm(tmp_path))
    assert run(environment, name, tmp_path, 5).returncode == 9
    before, samples = numbers(tmp_path / "metrics.jsonl"), (tmp_path / "samples.jsonl").read_bytes()
    assert len(before) == 5
    done = run(environment, name, tmp_path)
    assert done.returncode == 0, done.stderr
    assert re.search(r"step [24] of 24 is done", done.stdout)
    logged = numbers(tmp_path / "metrics.jsonl")
    assert logged[:5] == before
    assert (tmp_path / "samples.jsonl").read_bytes().startswith(samples)
    assert "kl/ref" not in logged[-1]
    if name == "DAPO":
        assert any(record["group/generated"] > 8 for record in before[:4]), "no step drew more than its own problems"
    else:
        assert json.loads((tmp_path / "config.json").read_text())["algorithm"]["class"] == "RAFT"
        assert logged[-1]["score/format"] > before[0]["score/format"] + 0.3

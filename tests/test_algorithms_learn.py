"""Every algorithm without a critic learns the smallest task there is."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tiny_runs import records

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


@pytest.mark.parametrize("name", NAMES)
def test_it_learns(name, environment, tmp_path):
    command = [sys.executable, str(PROGRAM), name, str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
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

"""A role that a user's file adds: built, placed, trained, saved, shown and planned like the built-in roles."""

import io
from contextlib import redirect_stdout
from pathlib import Path

import pytest
from tiny_runs import records

import jaxrlhf
from jaxrlhf.checkpoint import Checkpoints
from jaxrlhf.config import override
from jaxrlhf.planner.hardware import hardware
from jaxrlhf.planner.problem import question_of

FILE = Path(__file__).parents[1] / "support" / "own_role.py"


@pytest.mark.slow
@pytest.mark.usefixtures("programs", "undrawn")
def test_a_role_of_a_users_file_is_trained_on_a_pool_of_its_own(tmp_path):
    config = override(jaxrlhf.load(FILE), {"workdir": str(tmp_path)})
    shown = io.StringIO()
    with redirect_stdout(shown):
        jaxrlhf.run(config)
    steps = [record for record in records(tmp_path / "metrics.jsonl") if "rating/loss" in record]
    assert [record["step"] for record in steps] == [1, 2]
    assert steps[1]["rating/loss"] < steps[0]["rating/loss"]
    assert all(record["time/update_s"] > 0 for record in steps)
    assert (Checkpoints(tmp_path / "checkpoints", read_only=True).folder(2, "rater")).is_dir()
    assert "rater" in shown.getvalue()


def test_a_role_of_a_users_file_is_planned():
    problem = question_of(override(jaxrlhf.load(FILE), {"pools": ()}), hardware("h100x4")).problem
    rater = {role.name: role for role in problem.roles}["rater"]
    assert (rater.trained, rater.head, rater.passes) == (True, "value", 1)

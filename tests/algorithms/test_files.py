"""Algorithms that come as files: found by name, used from other files, listed on the page of algorithms."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from jaxrlhf.config import (
    Algorithm,
    CommandLine,
    FunctionReward,
    PolicyGradient,
    Refusal,
    load,
    load_module,
    shipped,
    to_json,
)
from jaxrlhf.config.named_functions import load as named

PAGE = (Path(__file__).parents[2] / "docs" / "algorithms.md").read_text()
FILES = {name: path for name, path in shipped().items() if path.parent.name == "algorithms"}
OWN = """
from dataclasses import replace

from jaxrlhf.config import load, load_module

GDPO = load_module("algorithms/gdpo").GDPO


def get_config():
    return replace(load("algorithms/gdpo"), name="own", algorithm=GDPO(responses_per_update=128))
"""


@pytest.mark.parametrize("name", FILES)
def test_a_file_has_its_algorithm_and_a_row_on_the_page(name):
    algorithm = load(f"algorithms/{name}").algorithm
    own = getattr(load_module(name), type(algorithm).__name__)
    assert issubclass(own, Algorithm) and own.__module__.endswith(f"module_{name}")
    assert f"[`{name}.py`](../configs/algorithms/{name}.py) |" in PAGE
    assert to_json(algorithm)["class"] == own.__name__


def test_a_file_is_found_by_name_and_run_once():
    found = {load_module(name) for name in ("maxrl", "maxrl.py", "algorithms/maxrl", str(FILES["maxrl"]))}
    assert len(found) == 1
    assert load("algorithms/maxrl").name == "maxrl"
    for wrong in ("recipes/maxrl", "algorithms/maxrll"):
        with pytest.raises(Refusal, match=f"no configuration '{wrong}'"):
            load_module(wrong)
    assert named("algorithms/maxrl.py:mean_relative", "reward function").__name__ == "mean_relative"
    assert FunctionReward("game_nim.py:games")


def test_another_file_uses_the_class_by_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("own.py").write_text(OWN)
    config, _ = CommandLine().parse_config(["--config", "own.py", "--algorithm.epochs-per-step", "2"])
    assert isinstance(config.algorithm, load_module("gdpo").GDPO)
    assert (config.algorithm.responses_per_update, config.algorithm.epochs_per_step) == (128, 2)


def test_the_classes_reach_processes_that_never_saw_their_files(tmp_path):
    cloudpickle = pytest.importorskip("ray.cloudpickle")
    from jaxrlhf.single_controller.ray_backend import carry_configuration_files

    (tmp_path / "own.py").write_text(OWN)
    files = (tmp_path / "own.py", "gigpo", "logit_distillation", "nash_md")  # two of these files use a further file
    configs = [load(file) for file in files]
    carry_configuration_files()
    (tmp_path / "configs.pickle").write_bytes(cloudpickle.dumps(configs))
    program = (
        "import pathlib, pickle, sys; configs = pickle.loads(pathlib.Path(sys.argv[1]).read_bytes()); "
        "print(*(type(one.algorithm).__name__ for one in configs), configs[0].algorithm.responses_per_update); "
        "print(*(role.worker_class.__name__ for one in configs[2:] for role in one.roles.values()))"
    )
    command = [sys.executable, "-c", program, str(tmp_path / "configs.pickle")]
    done = subprocess.run(command, capture_output=True, text=True)
    said = ["GDPO GiGPO LogitDistillation NashMD 128", "Actor NamingTeacher Reward MixtureActor Reference Reward", ""]
    assert (done.stdout, done.stderr) == ("\n".join(said), "")


MOVED = {
    "ClipCovLoss": "clip_cov",
    "GDPO": "gdpo",
    "GiGPO": "gigpo",
    "KLCovLoss": "kl_cov",
    "LUFFY": "luffy",
    "LogitDistillation": "logit_distillation",
    "MaxRL": "maxrl",
    "NashMD": "nash_md",
    "OptimalTokenBaseline": "otb",
    "ProcessRewardModel": "process_reward_model",
    "RAE": "rae",
    "SpanDistillation": "span_distillation",
    "TurnGRPO": "turn_grpo",
}
"""Names that `jaxrlhf.config` had once, and the files that have these algorithms now."""


@pytest.mark.parametrize("old", MOVED)
def test_an_old_name_is_refused_with_the_new_one(old, tmp_path):
    file, name = MOVED[old], old.removesuffix("Loss")
    (tmp_path / "old.py").write_text(f"from jaxrlhf.config import {old}\n")
    advice = f"jaxrlhf.config no longer has {old}; write {name} = load_module('algorithms/{file}').{name}"
    with pytest.raises(Refusal, match=re.escape(advice)):
        load(tmp_path / "old.py")
    assert hasattr(load_module(file), name)


def test_a_file_that_fails_is_run_again(tmp_path):
    file = tmp_path / "fails.py"
    file.write_text("1 / 0\n")
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            load_module(file)
    file.write_text("from jaxrlhf.config import PolicyGradient as Found\n")
    assert load_module(file).Found is PolicyGradient

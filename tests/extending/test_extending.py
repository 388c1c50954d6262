"""The algorithm of docs/algorithms.md in a file of the user's own, word for word: settings, plan, and refusals.

It learns in `dataflows/test_learn.py`; it is killed and resumed in `runs/test_resume_algorithms.py`.
"""

import re
import subprocess
import sys
from dataclasses import dataclass
from inspect import isabstract
from pathlib import Path

import numpy as np
import pytest
from made_plans import machines

import jaxrlhf
from jaxrlhf import algos, config
from jaxrlhf.config import GRPO, Algorithm, CommandLine, PolicyGradient, RatioLoss, function_of, to_json
from jaxrlhf.planner.problem import question_of

PAGE = (Path(__file__).parents[2] / "docs" / "algorithms.md").read_text()


def shown_algorithm(folder: Path) -> Path:
    """The file that the page shows, written to a folder."""
    found = re.search(r"<!-- algorithm -->\n```python\n(.*?)```", PAGE, re.DOTALL)
    assert found is not None
    assert len([line for line in found[1].splitlines() if line.strip()]) < 30
    (folder / "raft.py").write_text(found[1])
    return folder / "raft.py"


@pytest.fixture
def own_file(tmp_path) -> Path:
    return shown_algorithm(tmp_path)


def test_the_pages_algorithm_has_settings_like_any_other(own_file):
    config, _ = CommandLine().parse_config(["--config", str(own_file), "--algorithm.least-score", "1"])
    assert config.algorithm.least_score == 1.0
    saved = to_json(config)["algorithm"]
    assert (saved["class"], saved["least_score"], saved["responses_per_update"]) == ("RAFT", 1.0, 256)


def test_the_pages_algorithm_is_planned_with_its_own_roles(own_file):
    config = jaxrlhf.load(own_file)
    problem = question_of(config, machines(), vocabulary=100).problem
    assert [role.name for role in problem.roles] == ["actor"]
    assert (problem.roles[0].generates, problem.roles[0].trained) == (True, True)


def test_the_pages_algorithm_reaches_processes_that_never_saw_its_file(own_file, tmp_path):
    cloudpickle = pytest.importorskip("ray.cloudpickle")
    from jaxrlhf.single_controller.ray_backend import carry_configuration_files

    config = jaxrlhf.load(own_file)
    carry_configuration_files()
    (tmp_path / "config.pickle").write_bytes(cloudpickle.dumps(config))
    program = (
        "import pathlib, pickle, sys; from jaxrlhf.config import override, PolicyGradient; "
        "config = pickle.loads(pathlib.Path(sys.argv[1]).read_bytes()); "
        "config = override(config, {'algorithm.least_score': 1.0}); "
        "assert isinstance(config.algorithm, PolicyGradient); "
        "print(type(config.algorithm).__name__, config.algorithm.least_score, tuple(config.roles))"
    )
    command = [sys.executable, "-c", program, str(tmp_path / "config.pickle")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("RAFT 1.0 ('actor', 'reward')\n", "")


def test_an_algorithm_that_is_not_whole_says_what_it_lacks(own_file):
    text = own_file.read_text()
    wrong = {
        "    learn = learn\n": "",
        "    learn = learn": '    learn = "step"',
        "learn = learn": 'learn = "jaxrlhf.dataflows.grpo:raft"',
        "= learn\n": '= "no_such_module:step"\n',
    }
    said = [
        "RAFT.learn=None is not a function; give a function, or its name as 'module:function'",
        "RAFT.learn 'step' is not of the form 'module:function' or 'file.py:function'",
        "RAFT.learn 'jaxrlhf.dataflows.grpo:raft': jaxrlhf.dataflows.grpo has no 'raft'; its functions are ",
        "RAFT.learn 'no_such_module:step': importing no_such_module failed with ModuleNotFoundError: No module named",
    ]
    for (old, new), message in zip(wrong.items(), said, strict=True):
        own_file.write_text(text.replace(old, new))
        with pytest.raises(ValueError, match="^" + re.escape(message)):
            jaxrlhf.run(jaxrlhf.load(own_file))
    own_file.write_text(text.replace("PolicyGradient", "Algorithm"))
    with pytest.raises(TypeError, match=r"RAFT .* abstract methods '?roles'?, '?updates_per_step"):
        jaxrlhf.load(own_file)


def test_learn_is_a_function_or_the_name_of_one():
    @dataclass(frozen=True)
    class Own(PolicyGradient):
        learn = np.add

    assert function_of(Own(), "learn") is np.add
    with pytest.raises(TypeError, match="abstract"):
        Algorithm()


def test_the_page_of_algorithms_has_each_with_its_functions():
    table = [row for row in PAGE.splitlines() if row.startswith("|")]
    rows = {name: row for row in table for name in re.findall(r"`(\w+)`", row.rsplit("|", 2)[1])}
    algorithms = {kind for kind in vars(config).values() if isinstance(kind, type) and issubclass(kind, Algorithm)}
    whole = {kind for kind in algorithms if not isabstract(kind) and hasattr(kind, "learn")}
    whole.remove(config.ReferenceFree)  # a base
    losses = {kind for kind in vars(config).values() if isinstance(kind, type) and issubclass(kind, RatioLoss)}
    named = {kind.__name__: kind.learn for kind in whole}
    named |= {kind.__name__: kind.function for kind in losses - {RatioLoss}}
    assert rows.keys() == named.keys()
    for name, function in named.items():
        if not issubclass(getattr(config, name), GRPO) or name in ("GRPO", "DrGRPO"):  # others are GRPO with a loss
            assert function.removeprefix("jaxrlhf.") in rows[name], name
        for used in re.findall(r"`algos\.(\w+)`", rows[name]):
            assert hasattr(algos, used), used


def test_dataflows_are_read_without_workers():
    files = [path.stem for path in Path(jaxrlhf.__file__).parent.glob("dataflows/*.py") if path.stem != "__init__"]
    code = f"import sys, {', '.join(f'jaxrlhf.dataflows.{name}' for name in files)}; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.split()
    rooms = {name.split(".")[1] for name in loaded if name.startswith("jaxrlhf.")}
    assert {"ppo", "grpo", "dapo", "dpo"} <= set(files)
    assert not rooms & {"workers", "engine", "models", "single_controller", "trainer", "checkpoint", "planner"}

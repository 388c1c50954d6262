"""The house stands: floors, sizes, names, front doors, light imports, configurations as recorded."""

import ast
import json
import re
import subprocess
import sys
from pathlib import Path

import house_rules
import jaxtyping
import numpy as np
import pytest
import type_checks

from jaxrlhf.algos.masked import selected
from jaxrlhf.config import load, shipped, to_json

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "jaxrlhf"
GOLDENS = ROOT / "tests" / "golden" / "configs"
MODULES = sorted(PACKAGE.rglob("*.py"))
FRONT_DOORS = sorted(PACKAGE.glob("*/__init__.py"))
SCRIPTS = ROOT / "scripts"
PROGRAMS = [*sorted((ROOT / "configs").rglob("*.py")), *sorted(SCRIPTS.rglob("*.py"))]
PEERS = {*(SCRIPTS / "benchmarks" / "peers").rglob("*.py"), *(SCRIPTS / "real_model").rglob("*.py")}
"""Scripts that run or compare with models of torch."""
WORD_LISTS = [SCRIPTS / "real_model" / "tasks.py"]
"""Scripts whose data has nouns of all kinds."""
TESTS = sorted((ROOT / "tests").rglob("*.py"))
HEAVY = {
    *("jax", "jaxlib", "flax", "optax", "orbax", "tensorstore", "grain", "transformers", "tokenizers", "torch"),
    *("numpy", "pyarrow", "matplotlib", "tyro", "rich", "tensorboardX", "ray", "wandb", "mlflow", "datasets"),
}


def test_readme_shows_ppo_as_it_is():
    readme = (ROOT / "README.md").read_text()
    shown = re.search(r"From `jaxrlhf/dataflows/ppo\.py`:\n\n```python\n(def learn.*?\n)```", readme, re.DOTALL)[1]
    assert shown in (PACKAGE / "dataflows" / "ppo.py").read_text()


def written(folder: Path, files: dict[str, str]) -> Path:
    """A tiny repository, to show that a rule can be broken."""
    for name, source in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source)
    return folder


def loaded_by(statement: str) -> set[str]:
    """Top-level packages in a fresh interpreter after a statement."""
    code = f"{statement}\nimport sys\nprint(*(name for name in sys.modules if '.' not in name))"
    return set(subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.split())


def test_imports_point_down():
    assert house_rules.floors(PACKAGE) == []


RULES = {
    house_rules.sizes: [*MODULES, *PROGRAMS, *TESTS],
    house_rules.shadowing: [*MODULES, *PROGRAMS, *TESTS],
    house_rules.undocumented: [*MODULES, *PROGRAMS, *TESTS],
    house_rules.vague_names: [*MODULES, *PROGRAMS],
    house_rules.retired_words: [*MODULES, *(path for path in PROGRAMS if path not in WORD_LISTS)],
    house_rules.unclear_docstrings: [*MODULES, *PROGRAMS, *TESTS],
    house_rules.dialect: [*MODULES, *PROGRAMS, *TESTS],
    house_rules.front_door_logic: [PACKAGE / "__init__.py", *FRONT_DOORS],
}
"""Rules of single files, and the files that they are for."""


def test_every_file_keeps_the_rules():
    where = {rule: set(paths) for rule, paths in RULES.items()}
    paths = [*MODULES, *PROGRAMS, *TESTS]
    assert [broken for path in paths for rule in RULES if path in where[rule] for broken in rule(path)] == []


def test_no_files_import_each_other_in_a_circle():
    assert house_rules.circles(PACKAGE) == []


def test_rooms_are_no_wider_than_one_reads_through():
    assert [wide for folder in (PACKAGE, SCRIPTS) for wide in house_rules.widths(folder)] == []


def test_a_class_name_means_one_thing():
    assert house_rules.repeated_class_names(MODULES) == []


def test_sentences_are_not_chained():
    assert house_rules.chains(MODULES) == house_rules.chains(TESTS) == []


@pytest.mark.slow
def test_torch_is_not_a_dependency():
    ours = sorted({*MODULES, *PROGRAMS} - PEERS)
    assert [str(path) for path in ours if "torch" in house_rules.imported_packages(path)] == []


def test_loading_a_configuration_is_light():
    assert loaded_by("import jaxrlhf; jaxrlhf.load('ppo_gsm8k')") & HEAVY == set()


@pytest.mark.slow
def test_a_run_from_scratch_loads_no_torch():
    # Its import takes as many seconds as all that a run needs, in every process of it.
    tokenized = "import jaxrlhf.trainer.run, jaxrlhf.data.tokenizer; jaxrlhf.data.tokenizer.load_tokenizer(None)"
    assert "torch" not in loaded_by(tokenized)


def test_every_configuration_has_a_golden():
    assert sorted(shipped()) == sorted(path.stem for path in GOLDENS.glob("*.json"))


@pytest.mark.parametrize("name", sorted(shipped()))
def test_configuration_equals_its_golden(name):
    golden = json.loads((GOLDENS / f"{name}.json").read_text())
    assert to_json(load(name)) == golden, "if the change is meant: python -m scripts.tools.update_goldens"


@pytest.mark.parametrize("name", sorted(shipped()))
def test_configuration_says_how_to_run_it(name):
    text = shipped()[name].read_text()
    assert f"python -m jaxrlhf.train --config {name}.py" in text
    assert "arXiv:" in text


@pytest.mark.parametrize("name", ["ppo", "grpo", "dapo"])
def test_an_algorithm_is_one_screen(name):
    text = (PACKAGE / "dataflows" / f"{name}.py").read_text()
    steps = [node for node in ast.parse(text).body if isinstance(node, ast.FunctionDef) and "roles" in arguments(node)]
    assert steps
    for step in steps:
        assert step.end_lineno - step.lineno < 25, step.name
    assert len(text.splitlines()) <= 200


def arguments(function: ast.FunctionDef) -> list[str]:
    return [argument.arg for argument in function.args.args]


# What follows breaks each rule on purpose: a rule that cannot fail guards nothing.


def test_rule_floors_can_fail(tmp_path):
    package = written(
        tmp_path / "jaxrlhf",
        {
            "__init__.py": "",
            "algos/__init__.py": "",
            "algos/gae.py": "def f():\n    from jaxrlhf.models import decoder\n",
            "data/__init__.py": "import jaxrlhf.algos.gae",
            "models/__init__.py": "from jaxrlhf import algos, train\nfrom jaxrlhf.config import Config",
            "engine/__init__.py": "from .cache import Cache\nfrom jaxrlhf import __version__",
            "attic/__init__.py": "",
            "train.py": "import jaxrlhf.trainer\nimport jaxrlhf.evaluate",
        },
    )
    assert house_rules.floors(package) == [
        "attic/ is on no floor",
        "algos/gae.py (floor 1) imports models (floor 2)",
        "data/__init__.py (floor 1) imports algos (floor 1)",
        "engine/__init__.py imports .cache.Cache; write the whole name",
        "engine/__init__.py (floor 3) imports __version__ (floor 10)",
        "models/__init__.py (floor 2) imports train (floor 10)",
        "train.py (floor 10) imports evaluate (floor 10)",
    ]


@pytest.mark.parametrize(
    ("rule", "name", "source"),
    [
        (house_rules.sizes, "long.py", "x = 1\n" * 401),
        (house_rules.sizes, "long.py", "def f():\n" + "    x = 1\n" * 80),
        (house_rules.shadowing, "queue.py", ""),
        (house_rules.shadowing, "random/__init__.py", ""),
        (house_rules.vague_names, "batch_utils.py", ""),
        (house_rules.vague_names, "batch.py", "class BaseBatch: ..."),
        (house_rules.vague_names, "batch.py", "class Batch:\n    def pad_helper(self): ..."),
        (house_rules.undocumented, "batch.py", "x = 1"),
        (house_rules.unclear_docstrings, "batch.py", '"""Of a batch."""'),
        (house_rules.unclear_docstrings, "batch.py", 'def f():\n    """What a call costs."""'),
        (
            house_rules.unclear_docstrings,
            "batch.py",
            'class A:\n    """A batch.\n\n    Attributes:\n      rows: Of it.\n    """',
        ),
        (house_rules.retired_words, "batch.py", "def island_of(mesh): ...  # an island"),
        (house_rules.dialect, "batch.py", '"""Tokens that were drawn by an old policy."""'),
        (house_rules.dialect, "batch.py", "# the group is begun"),
        (house_rules.front_door_logic, "room/__init__.py", "import os\nx = os.getcwd()"),
        (house_rules.front_door_logic, "room/__init__.py", "def load(): ..."),
        (house_rules.front_door_logic, "room/__init__.py", "if True:\n    import os"),
    ],
)
def test_rule_can_fail(tmp_path, rule, name, source):
    written(tmp_path, {name: source})
    assert len(rule(tmp_path / name)) == 1


@pytest.mark.parametrize(
    ("rule", "source"),
    [
        (house_rules.sizes, '"""Fits."""\n' * 400),
        (house_rules.vague_names, "class Database: ..."),
        (house_rules.front_door_logic, '"""Room."""\nfrom a import b\n__all__ = ["b"]\ndef __getattr__(name): ...'),
    ],
)
def test_rule_can_pass(tmp_path, rule, source):
    written(tmp_path, {"batch.py": source})
    assert rule(tmp_path / "batch.py") == []


def test_rules_on_the_whole_package_can_fail(tmp_path):
    files = {
        "__init__.py": "",
        "a/__init__.py": "from pack.a.one import f",
        "a/one.py": "class Plan: ...\ndef f():\n    from pack.a import two",
        "a/two.py": "if TYPE_CHECKING:\n    from pack.a.one import f\nclass Plan: ...",
        "a/three.py": "from pack.a.one import f",
        **{f"b/file{n}.py": "" for n in range(17)},
    }
    package = written(tmp_path / "pack", files)
    assert house_rules.circles(package) == ["pack.a.one -> pack.a.two"]
    assert house_rules.widths(package) == ["pack/b/ has 17 files, over 16"]
    assert house_rules.repeated_class_names(sorted(package.rglob("*.py"))) == ["Plan: a/one.py, a/two.py"]


@pytest.mark.parametrize("source", ["import torch.nn", "def f():\n    from torch import Tensor"])
def test_rule_torch_can_fail(tmp_path, source):
    written(tmp_path, {"model.py": source})
    assert "torch" in house_rules.imported_packages(tmp_path / "model.py")


def test_rule_light_can_fail():
    assert loaded_by("import rich") & HEAVY == {"rich"}


def test_annotated_calls_are_checked():
    """The first of every test; what a run repeats is not."""
    type_checks.begin_test()
    for _ in range(type_checks.CALLS):
        with pytest.raises(jaxtyping.TypeCheckError, match="mask"):
            selected(np.zeros(3, np.float32), np.zeros((3, 1), bool))
    assert selected(np.zeros(3, np.float32), np.zeros(3, bool)).shape == (3,)
    type_checks.begin_test()
    with pytest.raises(jaxtyping.TypeCheckError, match="mask"):
        selected(np.zeros(3, np.float32), np.zeros((3, 1), bool))

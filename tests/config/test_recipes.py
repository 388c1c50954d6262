"""Recipes: planned as their page says, and read from data in the columns of the hub up to scores."""

import importlib
from functools import partial
from pathlib import Path

import pytest
import recipe_data
from tiny_runs import write_policy

from jaxrlhf.config import FromScratch, load, override, shipped
from jaxrlhf.config.cli.override import find, setting_names
from jaxrlhf.data.tokenizer import embedded_tokenizer
from jaxrlhf.environments.pool import EnvironmentPool
from jaxrlhf.episode import Reply, ToolCall
from jaxrlhf.rewards.parts import reward_function
from jaxrlhf.rewards.sandbox.interpreter import python
from jaxrlhf.trainer.phase import load_data
from jaxrlhf.trainer.run import run
from scripts import pages
from scripts.planning import plan_recipes

NAMES = [name for name, path in shipped().items() if path.parent.name == "recipes"]
BOXED = ("So it is \\boxed{42}.", "So it is \\boxed{41}.")
ANSWERS = {
    "gsm8k_grpo": ("6 * 7 = 42\n#### 42", "#### 41"),
    "deepcoder_14b": ("```python\nprint(int(input()) + 1)\n```", "```python\nprint(5)\n```"),
    "tldr_sft": (" It was long.", " It was long.\n\nVery long."),
}
"""A right and a wrong response; those of the others have their answer in a box."""


@pytest.fixture(scope="module")
def hub(tmp_path_factory) -> Path:
    """A folder in which hub ids are directories with files named as on the hub."""
    folder = tmp_path_factory.mktemp("hub")
    recipe_data.write(folder)
    return folder


@pytest.mark.slow
def test_page_and_docstrings_say_what_the_plans_are():
    planned = [plan_recipes.plan(recipe) for recipe in plan_recipes.RECIPES]
    assert {one.recipe.name for one in planned} == {*NAMES}
    assert all(0 < one.peak_bytes < one.memory_bytes for one in planned)
    page = plan_recipes.PAGE.read_text()
    table = plan_recipes.table(planned, plan_recipes.compiled())
    again = "python -m scripts.planning.plan_recipes --write"
    assert pages.written(page, {"recipes": table}) == page, again
    for name in NAMES:
        text = shipped()[name].read_text()
        assert plan_recipes.described(text, [one for one in planned if one.recipe.name == name]) == text, again
        assert "Planned: " in text and "Source: " in text


def function_of(reference: str):
    """The function of a reference."""
    module, _, name = reference.partition(":")
    return getattr(importlib.import_module(module), name)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_data_in_the_columns_of_the_hub_is_read_up_to_scores(name, hub, monkeypatch):
    monkeypatch.chdir(hub)
    config = override(load(name), {"model": FromScratch()})
    data = load_data(config, embedded_tokenizer())
    problem, *others = data.train.problems
    sources = getattr(config.data, "sources", (config.data,))
    assert data.train.total == 1 + len(others) == len(sources) and not data.train.malformed
    assert "6 times 7" in problem.prompt or name.startswith(("tldr", "deepcoder"))
    assert bool(problem.solution_tokens) == (name in ("gsm8k_grpo", "tldr_sft", "tldr_reward_model", "hh_reward_model"))
    assert bool(getattr(problem, "rejected_tokens", ())) == name.endswith("reward_model")
    assert (config.system_prompt or "") in problem.prompt
    held_out = [*data.held_out, *(one for held in data.sets for one in held.problems)]
    assert held_out
    if name.endswith(("_ppo", "_reward_model")):  # a model scores, or nothing
        return
    (part,) = config.rewards.parts
    asked = reward_function("part", part, workers=1)
    score = partial(function_of(asked.reference), **asked.settings)
    for one in (problem, *others, *held_out):
        scores = [score(one.prompt, text, one.answer, one.record) for text in ANSWERS.get(name, BOXED)]
        assert scores == [1.0, 0.0]


@pytest.mark.slow
def test_an_interpreter_prints_fails_and_ends():
    assert python("print(6 * 7)") == "42\n"
    assert python("x = 1") == "the program printed nothing"
    failed = python("print('before')\nprint(1 / 0)")
    assert failed.startswith("before\n") and "line 2" in failed and "ZeroDivisionError" in failed
    assert "SyntaxError" in python("print(")
    assert python("import os\nos._exit(3)") == "error: ended with status 3"
    with EnvironmentPool([load("retool_7b").environment], Path("/dev/null")) as pool:
        opening = pool.start(1, 0, {}, 7).result(20.0)
        assert opening.tools[0]["function"]["parameters"]["required"] == ["code"]
        reply = Reply("", "", calls=(ToolCall("python", {"code": "print(sum(range(10)))"}),), malformed=())
        seen = pool.step(1, reply).result(20.0)
        assert seen.messages[0]["content"] == "45\n" and seen.calls[0].failure is None
        pool.drop(1)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_is_dry_run(name, tmp_path, monkeypatch, capsys):
    """Read and checked as a run is, in a folder where the hub's models and data sets are small ones."""
    monkeypatch.chdir(tmp_path)
    recipe_data.write(tmp_path, copies=1024)
    config = load(name)
    paths = {find(config, setting)[0] for setting in setting_names(config) if setting.endswith(".path")}
    for path in {str(path) for path in paths if path} - {str(path.parent) for path in tmp_path.rglob("*.parquet")}:
        if not Path(path).exists():
            scores = {"task": "ForSequenceClassification", "num_labels": 1} if path.endswith("_reward_model") else {}
            write_policy(tmp_path / path, positions=40_960, **scores)
    here = {"placement": "given", "devices": 1, "cluster": None, "hardware": None}
    here |= {} if name.endswith("_reward_model") else {"rewards.workers": 1}
    result = run(override(config, here), dry_run=True)
    assert result.workdir == Path("runs") / name and not result.finished and not result.workdir.exists()
    assert f"{config.steps:,}".replace(",", "") in capsys.readouterr().out.replace(",", "")

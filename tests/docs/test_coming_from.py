"""Our side of docs/coming_from.md: every setting, command and metric that its tables name is there."""

import ast
import re
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest

import jaxrlhf.config
from jaxrlhf.__main__ import COMMANDS
from jaxrlhf.config import Config, Refusal, load, override
from jaxrlhf.config.cli.override import PEERS, find
from tests.docs.test_metrics import PATTERN

PAGE = (Path(__file__).parents[2] / "docs" / "coming_from.md").read_text()
CLASSES = [value for value in vars(jaxrlhf.config).values() if isinstance(value, type) and is_dataclass(value)]


def ours(page: str) -> list[str]:
    """Names in the first column."""
    firsts = [line.split("|")[1] for line in page.splitlines() if line.startswith("| `")]
    return [name for cell in firsts for name in re.findall("`(.+?)`", cell)]


def settings_in(annotation: Any) -> set[type]:
    """Settings classes that a field may hold, subclasses included."""
    members = [annotation, *(inner for member in get_args(annotation) for inner in settings_in(member))]
    named = tuple(member for member in members if isinstance(member, type) and is_dataclass(member))
    return {one for one in CLASSES if named and issubclass(one, named)}


def owners(path: str) -> set[type]:
    """Classes that have the last field of a dotted path from `Config`."""
    found: set[type] = {Config}
    *way, last = path.split(".")
    for name in way:
        found = {
            deeper for one in found if name in get_type_hints(one) for deeper in settings_in(get_type_hints(one)[name])
        }
    return {one for one in found if last in {field.name for field in fields(one)}}


def problem(name: str) -> str | None:
    """Complaint about a name on the page; None if it is a setting, with a value that it may have, or a command."""
    if name.startswith("jaxrlhf "):
        return None if name.split()[1] in COMMANDS else f"unknown command {name}"
    path, _, value = name.partition("=")
    found = owners(path)
    if not found:
        return f"there is no setting {path}"
    given = eval(compile(ast.parse(value, mode="eval"), name, "eval"), vars(jaxrlhf.config)) if value else None
    if is_dataclass(given):
        hints = [get_type_hints(one)[path.split(".")[-1]] for one in found]
        return None if any(type(given) in settings_in(hint) for hint in hints) else f"{path} takes no {given}"
    return None


def test_names_that_are_wrong_are_found():
    wrong = ["rollout.prompts", "algorithm.kl.lam", "actor.lora=KLInLoss()", "jaxrlhf fly"]
    assert [name for name in wrong if problem(name) is None] == []
    with pytest.raises(TypeError):
        problem("actor.lora=Lora(ranks=3)")


def test_our_settings_and_commands_are_there():
    settings, metrics = PAGE.split("## Metrics")
    names = ours(settings)
    assert len(names) > 80
    assert [said for name in names if (said := problem(name))] == []
    assert [name for name in ours(metrics) if not PATTERN.fullmatch(name)] == []


def test_names_of_others_lead_to_settings():
    config = load("grpo_arithmetic")
    for name, ours in PEERS.items():
        find(config, ours)
        assert re.search(rf"`(\w+\.)*{name}`", PAGE), name
        with pytest.raises(Refusal, match=rf"{name} of .* corresponds to {re.escape(ours)}, |did you mean {ours}"):
            override(config, {name: 1})

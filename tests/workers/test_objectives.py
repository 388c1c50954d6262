"""An update's program is compiled once for each objective, also for one that every call brings anew."""

from dataclasses import replace
from functools import partial, wraps
from types import FunctionType

import pytest
from built_workers import build
from tiny_runs import get_config

from jaxrlhf.algos import policy_objective


def own_objective(output, mask_BT, weight_BT, fields, settings):
    """Objective as a configuration file may define it."""
    return weight_BT * output.logp, {}


def other_objective(output, mask_BT, weight_BT, fields, settings):
    """Another one."""
    return -weight_BT * output.logp, {}


class Weighted:
    """Objectives that differ in what they belong to, and not in their name."""

    def __init__(self, by: float) -> None:
        self.by = by

    def objective(self, output, mask_BT, weight_BT, fields, settings):
        return self.by * weight_BT * output.logp, {}


def scaled(by: float):
    """Objectives that differ in what they close over."""

    @wraps(own_objective)
    def objective(output, mask_BT, weight_BT, fields, settings):
        return by * weight_BT * output.logp, {}

    return objective


def brought_anew(function: FunctionType) -> FunctionType:
    """Return the function as a host unpickles it, which cannot import the configuration file."""
    return FunctionType(function.__code__, function.__globals__, function.__name__)


@pytest.fixture(scope="module")
def actor():
    return build(replace(get_config(), devices=1), "actor")[1]["actor"]


def test_a_function_that_is_brought_anew_finds_its_program(actor) -> None:
    anew = brought_anew(own_objective)
    assert anew != own_objective
    assert actor.gradient_program(own_objective, None) is actor.gradient_program(anew, None)


def test_programs_of_other_objectives_and_settings_are_others(actor) -> None:
    chosen = [(own_objective, None), (other_objective, None), (own_objective, 1), (policy_objective, None)]
    unnamed = [partial(own_objective), partial(own_objective), lambda *_: None, lambda *_: None]
    unnamed += [Weighted(1.0).objective, Weighted(2.0).objective, scaled(1.0), scaled(2.0)]
    programs = {id(actor.gradient_program(*pair)) for pair in (*chosen, *((each, None) for each in unnamed))}
    assert len(programs) == len(chosen) + len(unnamed)

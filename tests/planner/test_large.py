"""A mixture of 235B, planned for a v5p-128 and machines of 8 H100 or H200: no array is made."""

from dataclasses import replace
from unittest import mock

import pytest

from jaxrlhf.config import load, override
from jaxrlhf.planner.hardware import hardware_of
from jaxrlhf.planner.plan import Infeasible
from jaxrlhf.planner.problem import question_of
from jaxrlhf.planner.search import layouts
from jaxrlhf.planner.search.mapping import search

QWEN = "Qwen/Qwen3-235B-A22B"


def a_run():
    """Return GRPO with a reference, with 1280 responses of up to 1024 tokens."""
    return override(load("grpo_gsm8k"), {"model.path": QWEN, "actor.tokens_per_microbatch": 131_072})


@pytest.mark.parametrize(
    ("machines", "usable", "generates", "slower"),
    [("h200x16x8", 0.7, True, 1.2), ("h100x32x8", 0.7, False, 1.01)],
)
def test_a_mixture_is_planned_with_its_experts_divided_and_is_slower_without(machines, usable, generates, slower):
    """Generation takes 470 GB, and while layers are unstacked a third of the experts twice: too much for eight H100.

    With experts whole, H200 split each layer by more ways than it has key-value heads, which takes a fifth longer.
    """
    config = a_run()
    problem = question_of(config, replace(hardware_of(config, machines), usable_memory=usable)).problem
    if not generates:
        actor, reference = problem.roles
        problem = replace(problem, roles=(replace(actor, generates=False), reference))
    divided = search(problem, keep=1).plans[0]
    layout = divided.pools[0].layouts["actor"]
    assert layout.expert > 1
    every_layout = layouts.training_layouts
    whole = mock.patch.object(
        layouts, "training_layouts", lambda *args, **kw: (one for one in every_layout(*args, **kw) if one.expert == 1)
    )
    with whole:
        assert search(problem, keep=1).plans[0].seconds > slower * divided.seconds


def test_copies_that_the_compiler_of_tpus_makes_leave_no_room_for_a_mixture_on_64_chips():
    """The cast weights of layers and the copied gradient take 22 GB of each chip."""
    config = a_run()
    problem = question_of(config, replace(hardware_of(config, "v5p-128"), usable_memory=0.8)).problem
    actor, reference = problem.roles
    problem = replace(problem, roles=(replace(actor, generates=False), reference))
    with pytest.raises(Infeasible, match="actor update needs"):
        search(problem, keep=1)
    plain = replace(problem.software, compiler=None)
    assert search(replace(problem, software=plain), keep=1).plans

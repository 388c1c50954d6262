"""Layouts that a run would refuse are not searched, and all passes of a run are counted."""

from dataclasses import replace

import jax
import numpy as np
from made_plans import a_config, machines

from jaxrlhf.config import (
    DPO,
    KTO,
    ArithmeticPairs,
    FromScratch,
    Layout,
    Lora,
    Rewards,
    Rollout,
    RolloutServer,
    Tower,
    load_module,
)
from jaxrlhf.models.config import LinearAttention, ModelConfig
from jaxrlhf.planner.plan import PlacementProblem
from jaxrlhf.planner.problem import question_of
from jaxrlhf.planner.search.layouts import generation_layouts, role_layouts
from jaxrlhf.planner.workload import Software, Workload
from jaxrlhf.sharding.mesh import factored_mesh
from jaxrlhf.workers.role_weights import RoleWeights
from tests.planner.test_layouts import MODELS, actor, factorisations, refused, sizes, trained
from tests.planner.test_problem import roles


def test_rows_of_a_model_that_sees_are_not_split_nor_layers_whose_inputs_wait_on_the_host():
    hardware, model = machines(machines=1, devices_per_machine=4), MODELS["even"]
    work = Workload(4, 4, 4096.0, 4096.0, longest_tokens=8192)
    for role, contexts, stages in [
        (actor(model), {1, 2, 4}, {1, 2, 4}),
        (actor(model, undivided=("rows",)), {1}, {1, 2, 4}),
        (actor(model, offloads=True), {1, 2, 4}, {1}),
    ]:
        found = list(role_layouts(PlacementProblem((role,), work, Software(), hardware), role, 4))
        assert {layout.context for layout in found} == contexts
        assert {layout.stage for layout in found} == stages


def test_kinds_of_layers_are_divided_by_their_repeats_and_their_key_heads():
    linear = LinearAttention(key_heads=2, value_heads=4, key_dim=4, value_dim=4, kernel=2)
    mixed = ModelConfig(
        "qwen3", 32, 16, 64, 4, 4, 4, 4, linear=linear, linear_layers=(True, False) * 2, attention_gate=True
    )
    hardware = machines(machines=1, devices_per_machine=4)
    assert {layout.stage for layout in trained(mixed, 4, hardware)} == {1, 2}  # of 4 layers in 2 pairs
    assert {tensor for _, tensor in generation_layouts(actor(mixed), 4, hardware)} == {1, 2}
    whole = actor(MODELS["even"], undivided=("stage",))
    assert {stage for stage, _ in generation_layouts(whole, 4, hardware)} == {1}


def test_numbers_that_share_a_scale_are_not_parted():
    devices = 8
    model, lora = ModelConfig("llama", 64, 96, 128, 2, 8, 8, 12), Lora(quantize="nf4")
    weights = RoleWeights("actor", model, "lm", np.float32, lora)
    accepted = set()
    for data, fsdp, stage, tensor in factorisations(devices):
        mesh = factored_mesh(Layout(data, fsdp, stage, tensor), jax.devices()[:devices])
        if not refused(weights.frozen_params, mesh):
            accepted.add((data, fsdp, stage, tensor))
    hardware = machines(machines=1, devices_per_machine=8)
    work = Workload(4, 4, 10.0, 10.0, longest_tokens=20)
    role = actor(model, lora=lora)
    found = role_layouts(PlacementProblem((role,), work, Software(), hardware), role, devices)
    assert {sizes(layout) for layout in found} == accepted
    # Nor do matrices that are quantized only for generation.
    role, work = actor(model), replace(work, quantize="int8")
    found = role_layouts(PlacementProblem((role,), work, Software(), hardware), role, devices)
    assert {sizes(layout) for layout in found} == accepted


def test_what_a_step_reads_once_more_than_others_is_one_more_pass():
    baseline = load_module("otb").OptimalTokenBaseline
    energies = roles(a_config(algorithm=baseline(responses_per_update=32)))
    assert energies["actor"].passes == 2
    assert roles(a_config(algorithm=baseline(responses_per_update=128)))["actor"].passes == 1
    pairs = {"data": ArithmeticPairs(), "rewards": Rewards()}
    for algorithm, passes in ((DPO(), (0, 1)), (KTO(), (1, 2))):  # KTO also reads answers after other prompts
        found = roles(a_config(algorithm=algorithm, **pairs))
        assert (found["actor"].passes, found["reference"].passes) == passes


def test_a_run_says_what_is_not_divided_while_it_generates():
    for settings, undivided in [
        ({}, ()),
        ({"model": FromScratch(vision=Tower())}, ("rows",)),
        ({"rollout": Rollout(prompts_per_step=32, cache="pages")}, ("stage", "context")),
    ]:
        assert roles(a_config(**settings))["actor"].undivided == undivided


def test_servers_that_generate_take_no_time_of_the_devices_that_learn():
    server = Rollout(prompts_per_step=32, responses_per_prompt=4, server=RolloutServer(("http://here:8000",)))
    question = question_of(a_config(rollout=server), machines(), vocabulary=100)
    assert not any(role.generates for role in question.problem.roles)
    assert [role.passes for role in question.problem.roles] == [1, 1, 1, 1]
    assert any("rollout.server" in note for note in question.notes)

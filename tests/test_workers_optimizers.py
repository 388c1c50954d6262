"""Optimizers by name: equal numbers on one device and on eight, states as they were, matrices as Muon means them."""

import math
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_workers_gradient import ALGORITHM, POLICY, build, config, experience, part_of

from jaxrlhf.algos import policy_objective
from jaxrlhf.config import Layout, Optimizer, Refusal
from jaxrlhf.models.config import Experts, ModelConfig
from jaxrlhf.models.parameters import Param, declare, init_params
from jaxrlhf.workers.trained_model import optimizer_of, state_bytes_per_weight, state_layout

MUON = Optimizer(
    factory="optax.contrib:muon",
    arguments=("consistent_rms=0.2", "eps=1e-4"),  # Adam turns rounding of tiny slopes into whole steps
    learning_rate=1e-2,
)
FACTORED = ("min_dim_size_to_factor=8", "multiply_by_parameter_scale=False")
ADAFACTOR = Optimizer(factory="optax:adafactor", arguments=FACTORED, learning_rate=1e-2)
MODEL = ModelConfig(
    family="qwen3_moe",
    vocab_size=32,
    hidden_size=16,
    intermediate_size=32,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    experts=Experts(6, 2, 8),
)


def shapes_of(declared):
    is_param = {"is_leaf": lambda node: isinstance(node, Param)}
    return jax.tree.map(lambda param: jax.ShapeDtypeStruct(param.shape, jnp.float32), declared, **is_param)


def orthogonalised(matrix: np.ndarray) -> np.ndarray:
    """Five Newton-Schulz iterations of Jordan et al. 2024, in float64."""
    x = matrix.astype(np.float64) / (np.linalg.norm(matrix) + 1e-8)
    turned = x.shape[0] > x.shape[1]
    x = x.T if turned else x
    for _ in range(5):
        square = x @ x.T
        x = 3.4445 * x + (-4.775 * square + 2.0315 * square @ square) @ x
    return x.T if turned else x


def test_muon_orthogonalises_each_matrix_of_the_stacks_and_leaves_the_rest_to_adam():
    declared = declare(MODEL, "lm")
    params = init_params(MODEL, "lm", jax.random.key(0))
    settings = Optimizer(factory="optax.contrib:muon", arguments=("nesterov=False",), learning_rate=1.0)
    optimizer = optimizer_of(replace(settings, max_grad_norm=1e9), declared, total_updates=1)
    gradient = jax.tree.map(lambda x: jax.random.normal(jax.random.key(x.size), x.shape), params)
    changes, _ = jax.jit(optimizer.update)(gradient, jax.jit(optimizer.init)(params), params)
    layers, own = changes["layers"], gradient["layers"]
    for room, name, rows, batch in (
        ("attention", "query", 16, (2,)),
        ("attention", "key", 16, (2,)),
        ("attention", "output", 32, (2,)),
        ("mlp", "router", 16, (2,)),
    ):
        for layer in np.ndindex(*batch):
            expected = orthogonalised(np.asarray(own[room][name])[layer].reshape(rows, -1))
            expected *= max(1, expected.shape[1] / expected.shape[0]) ** 0.5
            np.testing.assert_allclose(layers[room][name][layer].reshape(rows, -1), -expected, atol=1e-3)
    experts, own_experts = layers["mlp"]["experts"], own["mlp"]["experts"]
    for layer, expert in np.ndindex(2, 6):
        expected = orthogonalised(np.asarray(own_experts["down"])[layer, expert])
        expected *= max(1, expected.shape[1] / expected.shape[0]) ** 0.5
        np.testing.assert_allclose(experts["down"][layer, expert], -expected, atol=1e-3)
    for change, slope in ((changes["embed"], gradient["embed"]), (layers["mlp_norm"], own["mlp_norm"])):
        np.testing.assert_allclose(change, -np.sign(slope), atol=1e-3)  # the first step of Adam


def test_a_state_lies_as_its_parameter_where_it_has_its_shape_and_else_whole():
    declared = declare(MODEL, "lm")
    shapes = shapes_of(declared)
    layout = jax.tree.map(lambda leaf: f"as {leaf.shape}", shapes)
    for settings, kept in ((Optimizer(), 2), (Optimizer(factory="optax:lion"), 1), (ADAFACTOR, 0)):
        state = jax.eval_shape(optimizer_of(settings, declared, total_updates=1).init, shapes)
        lies = jax.tree.leaves(state_layout(state, shapes, layout, "whole"))
        held = [leaf.shape for leaf in jax.tree.leaves(state)]
        assert all(own in ("whole", f"as {shape}") for shape, own in zip(held, lies, strict=True))
        assert lies.count(f"as {shapes['embed'].shape}") == 2 * kept  # a head has that shape, too
        assert all(own != "whole" for shape, own in zip(held, lies, strict=True) if math.prod(shape) > 1) or not kept


def test_bytes_of_a_weight_are_those_of_the_state():
    declared = declare(MODEL, "lm")
    assert state_bytes_per_weight(Optimizer(), declared) == pytest.approx(8, abs=0.01)
    assert state_bytes_per_weight(Optimizer(factory="optax:lion"), declared) == pytest.approx(4, abs=0.01)
    assert state_bytes_per_weight(ADAFACTOR, declared) < 2
    assert 4 < state_bytes_per_weight(MUON, declared) < 5.5


@pytest.mark.parametrize(
    "settings",
    [
        Optimizer(factory="optax:no_such"),
        Optimizer(factory="no_such_module:adam"),
        Optimizer(factory="optax:lion", arguments=("gamma=1",)),
    ],
)
def test_a_factory_that_makes_no_optimizer_is_refused(settings):
    with pytest.raises(Refusal, match=r"Optimizer\.factory"):
        optimizer_of(settings, declare(MODEL, "lm"), total_updates=1)


def test_settings_that_the_factory_or_adamw_would_not_read_are_refused(refused):
    for settings in (
        {"factory": "optax:lion", "weight_decay": 0.1},
        {"arguments": ("b1=0.9",)},
        {"factory": "optax:lion", "arguments": ("b1",)},
        {"factory": "optax:lion", "arguments": ("learning_rate=0.1",)},
    ):
        with refused():
            Optimizer(**settings)


def actor_of(settings: Optimizer, *, devices: int):
    plain = config(layout=Layout(fsdp=2, tensor=2) if devices > 1 else None, devices=devices)
    return build(replace(plain, actor=replace(plain.actor, optimizer=settings)))[1]["actor"]


def updated(actor, updates: int = 2):
    batch = part_of(experience(), (*POLICY, "kl_weight", "entropy_weight"))
    actor.update([batch] * updates, policy_objective, ALGORITHM)
    return jax.tree.map(np.asarray, (actor.trained.tree, actor.optimizer.tree))


@pytest.mark.slow
@pytest.mark.parametrize("settings", [MUON, ADAFACTOR], ids=["muon", "adafactor"])
def test_one_device_and_eight_learn_alike_and_resume_bitwise(settings, tmp_path):
    alone, eight = actor_of(settings, devices=1), actor_of(settings, devices=8)
    before = jax.tree.map(np.asarray, alone.trained.tree)
    (expected, _), (found, _) = updated(alone), updated(eight)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=2e-4), found, expected)
    assert (
        max(float(np.abs(a - b).max()) for a, b in zip(*map(jax.tree.leaves, (expected, before)), strict=True)) > 5e-3
    )

    for name, item in eight.items().items():
        (tmp_path / name).mkdir()
        item.save(tmp_path / name)
        item.finish()
        item.merge()
    resumed = actor_of(settings, devices=8)
    for name, item in resumed.items().items():
        item.restore(tmp_path / name)
    further, again = updated(eight), updated(resumed)
    jax.tree.map(np.testing.assert_array_equal, further, again)

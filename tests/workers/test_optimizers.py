"""Optimizers by name: equal numbers on one device and on eight, states as they were, matrices as Muon means them."""

import math
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxrlhf.algos import policy_objective
from jaxrlhf.config import Layout, Lora, Optimizer, ParameterGroup, Refusal, Training
from jaxrlhf.models.config import Experts, ModelConfig
from jaxrlhf.models.parameters import Param, declare, init_params, path_name
from jaxrlhf.optimizers import optimizer as optimizers
from jaxrlhf.optimizers.groups import ParameterGroups, layers_of
from jaxrlhf.optimizers.rounded import rounded, stochastically_rounded
from jaxrlhf.optimizers.state import state_bytes_per_weight, state_layout
from jaxrlhf.trainer.policy import average_of
from tests.workers.test_gradient import ALGORITHM, POLICY, build, config, experience, part_of

pytestmark = pytest.mark.usefixtures("programs")

MUON = Optimizer(
    factory="optax.contrib:muon",
    arguments=("consistent_rms=0.2", "eps=1e-4"),  # Adam turns rounding of tiny slopes into whole steps
    learning_rate=1e-2,
)
SMALL = Optimizer(state_dtype="bfloat16", learning_rate=1e-2, eps=1e-4)
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


def optimizer_of(settings, declared, *, total_updates):
    groups = ParameterGroups.of(settings, declared, layers_of(MODEL))
    return optimizers.optimizer_of(settings, declared, groups, total_updates=total_updates)


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
    layers = layers_of(MODEL)
    assert state_bytes_per_weight(Optimizer(), declared, layers) == pytest.approx(8, abs=0.01)
    assert state_bytes_per_weight(Optimizer(factory="optax:lion"), declared, layers) == pytest.approx(4, abs=0.01)
    assert state_bytes_per_weight(SMALL, declared, layers) == pytest.approx(4, abs=0.01)
    assert state_bytes_per_weight(ADAFACTOR, declared, layers) < 2
    assert 4 < state_bytes_per_weight(MUON, declared, layers) < 5.5
    frozen = Optimizer(groups=(ParameterGroup("^layers"), ParameterGroup("^embed$", layers=None)))
    weights = {name: sum(leaf.size for leaf in jax.tree.leaves(tree)) for name, tree in shapes_of(declared).items()}
    trained = weights["head"] + weights["final_norm"]
    expected = 8 * trained / sum(weights.values())
    assert state_bytes_per_weight(frozen, declared, layers) == pytest.approx(expected, rel=0.01)


def test_moments_in_bfloat16_are_rounded_to_a_neighbour_and_on_average_not_at_all():
    exact = np.float32([1.001, -1.001, 3.0, 0.0, 1e-30, 255.7])
    bits = jnp.arange(2**16, dtype=jnp.uint16)[:, None] + jnp.zeros((1, 6), jnp.uint16)  # each as often as the others
    found = np.float32(stochastically_rounded(jnp.tile(exact, (2**16, 1)), bits))
    assert all(len(set(column)) == (1 if float(jnp.bfloat16(number)) == number else 2)
               for column, number in zip(found.T, exact, strict=True))  # fmt: skip
    assert (np.abs(found - exact) < 2**-7 * np.abs(exact) + 1e-38).all()
    np.testing.assert_allclose(found.mean(axis=0, dtype=np.float64), exact, rtol=1e-6)


def test_a_second_moment_in_bfloat16_follows_gradients_that_rounding_to_the_nearest_would_lose():
    params = {"weight": jnp.zeros(4096)}
    optimizer = rounded(optax.adamw(1.0))

    @jax.jit
    def moments_after(size, state, first, last):
        def step(_, state):
            return optimizer.update({"weight": jnp.full(4096, size)}, state, params)[1]

        return jax.lax.fori_loop(first, last, step, state)

    large = moments_after(1.0, optimizer.init(params), 0, 500)
    nu = np.float32(large.state[0].nu["weight"])
    assert large.state[0].nu["weight"].dtype == large.state[0].mu["weight"].dtype == jnp.bfloat16
    assert nu.mean() == pytest.approx(1 - 0.999**500, rel=5e-3)
    assert len(set(nu)) > 1, "entries are sampled apart"
    small = moments_after(0.01, large, 0, 500)
    np.testing.assert_allclose(np.float32(small.state[0].nu["weight"]).mean(), nu.mean() * 0.999**500, rtol=1e-2)


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
        {"factory": "optax:lion", "state_dtype": "bfloat16"},
        {"arguments": ("b1=0.9",)},
        {"factory": "optax:lion", "arguments": ("b1",)},
        {"factory": "optax:lion", "arguments": ("learning_rate=0.1",)},
    ):
        with refused():
            Optimizer(**settings)


def actor_of(settings: Optimizer, *, devices: int):
    plain = config(layout=Layout(fsdp=2, tensor=2) if devices > 1 else None, devices=devices)
    return build(replace(plain, actor=replace(plain.actor, optimizer=settings)), roles=("actor",))[1]["actor"]


def updated(actor, updates: int = 2):
    batch = part_of(experience(), (*POLICY, "kl_weight", "entropy_weight"))
    actor.update([batch] * updates, policy_objective, ALGORITHM)
    return jax.tree.map(np.asarray, (actor.trained.tree, actor.optimizer.tree))


def test_groups_have_the_rates_of_the_first_that_names_a_parameter():
    groups = (
        ParameterGroup(r"attention\.query", learning_rate=5e-3, layers=(1, 2)),
        ParameterGroup("attention", layers=(-1, 2)),
        ParameterGroup("^(embed|head)$"),
        ParameterGroup("norm", learning_rate=2e-2),
    )
    settings, declared = Optimizer(learning_rate=1e-2, groups=groups), declare(MODEL, "lm")
    params = init_params(MODEL, "lm", jax.random.key(0))
    slopes = jax.tree.map(lambda x: jax.random.normal(jax.random.key(x.size), x.shape), params)

    def changes(settings):
        optimizer = optimizer_of(settings, declared, total_updates=1)
        state = jax.jit(optimizer.init)(params)
        return jax.tree.map(np.asarray, jax.jit(optimizer.update)(slopes, state, params)[0]), state

    (own, state), (plain, _) = changes(settings), changes(Optimizer(learning_rate=1e-2))
    for name, shares in {"query": (1, 0.5), "key": (1, 0), "output": (1, 0)}.items():
        for layer, share in enumerate(shares):
            found, expected = (tree["layers"]["attention"][name][layer] for tree in (own, plain))
            np.testing.assert_allclose(found, share * expected, rtol=1e-6)
    np.testing.assert_allclose(own["layers"]["mlp_norm"], 2 * plain["layers"]["mlp_norm"], rtol=1e-6)
    np.testing.assert_array_equal(own["layers"]["mlp"]["router"], plain["layers"]["mlp"]["router"])
    assert not own["embed"].any() and not own["head"].any()
    assert not [leaf for leaf in jax.tree.leaves(state) if leaf.shape == params["embed"].shape]


def test_layers_of_several_stacks_are_counted_as_the_model_runs_them():
    mixed = replace(MODEL, num_layers=4, dense_layers=1)
    declared = declare(mixed, "lm")
    settings = Optimizer(groups=(ParameterGroup("^(dense_)?layers", layers=(0, 2)),))
    share = ParameterGroups.of(settings, declared, layers_of(mixed)).share
    assert share["dense_layers"]["attention_norm"].ravel().tolist() == [0]
    assert share["layers"]["attention_norm"].ravel().tolist() == [0, 1, 1]
    assert {share["embed"].item(), share["final_norm"].item()} == {1}


def test_what_only_chooses_experts_stays_while_others_train():
    """Its gradient is zero, and a decay of weights would wear it away."""
    biased = replace(MODEL, experts=replace(MODEL.experts, scores="sigmoid", bias=True))
    share = ParameterGroups.of(Optimizer(weight_decay=0.1), declare(biased, "lm"), layers_of(biased)).share
    assert not share["layers"]["mlp"]["router_bias"].any() and share["layers"]["mlp"]["router"].all()


@pytest.mark.parametrize(
    ("group", "said"),
    [
        (ParameterGroup("attn"), r"'attn' matches no name; the parameters are embed, .*layers\.attention\.query"),
        (ParameterGroup("attention", layers=(2, 3)), r"of layers \(2, 3\), where the model has 2"),
        (ParameterGroup("embed", layers=(0, 1)), "matches no name of layers"),
        (ParameterGroup(""), "freezes every parameter"),
    ],
)
def test_groups_that_name_nothing_or_all_are_refused(group, said):
    with pytest.raises(Refusal, match=said):
        ParameterGroups.of(Optimizer(groups=(group,)), declare(MODEL, "lm"), layers_of(MODEL))
    with pytest.raises(Refusal, match="is not a regular expression"):
        ParameterGroup("(")


@pytest.fixture(scope="module")
def frozen():
    """An actor whose embedding and first layer are frozen, and which keeps an average of its weights."""
    groups = (ParameterGroup("^embed$"), ParameterGroup("layers", layers=(0, 1)))
    return actor_of(Optimizer(learning_rate=1e-2, groups=groups, average_decay=0.9), devices=1)


def test_what_is_frozen_stays_and_takes_no_part_in_the_norm_of_the_gradient(frozen):
    before = jax.tree.map(np.asarray, frozen.trained.tree)
    batch = part_of(experience(), (*POLICY, "kl_weight", "entropy_weight"))
    slopes, _ = frozen.gradient(batch, policy_objective, ALGORITHM)
    assert not slopes["embed"].any()
    for leaf in jax.tree.leaves(slopes["layers"]):
        assert not leaf[0].any() and leaf[1].any()
    after, _ = updated(frozen)
    np.testing.assert_array_equal(after["embed"], before["embed"])
    for old, new in zip(*map(jax.tree.leaves, (before["layers"], after["layers"])), strict=True):
        np.testing.assert_array_equal(new[0], old[0])
        assert (new[1] != old[1]).any()


def test_the_average_of_the_weights_is_saved_with_the_optimizer_and_exported_from_there(frozen, tmp_path):
    frozen.optimizer = type(frozen.optimizer)(frozen._initial_state)
    expected = jax.tree.map(np.asarray, frozen.trained.tree)
    for _ in range(3):
        weights, state = updated(frozen, updates=1)
        expected = jax.tree.map(lambda old, new: 0.9 * old + 0.1 * new, expected, weights)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7), state[-1].average, expected)
    assert (expected["layers"]["mlp"]["up"] != weights["layers"]["mlp"]["up"]).any()
    item = frozen.items()["actor_optimizer"]
    item.save(tmp_path)
    item.finish()
    item.merge()
    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), weights)
    read = dict(average_of(tmp_path, shapes))
    assert {path_name(path): array.shape for path, array in jax.tree.leaves_with_path(expected)} == {
        name: array.shape for name, array in read.items()
    }
    np.testing.assert_array_equal(read["layers.mlp.up"], state[-1].average["layers"]["mlp"]["up"])
    with pytest.raises(Refusal, match="holds no average of the weights"):
        average_of(tmp_path / "none", shapes)
    with pytest.raises(Refusal, match="averages whole weights"):
        Training(optimizer=Optimizer(average_decay=0.9), lora=Lora())


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param(MUON, marks=pytest.mark.slow, id="muon"),
        pytest.param(ADAFACTOR, marks=pytest.mark.seeds, id="adafactor"),
        pytest.param(SMALL, marks=pytest.mark.slow, id="bfloat16"),
    ],
)
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

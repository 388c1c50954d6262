"""Quantised matrices against arithmetic of NumPy's own, and models of them against the same weights as floats."""

import functools
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_checkpoints
from scipy.stats import norm
from tiny_checkpoints import tokens
from tiny_models import decoded, logits

from jaxrlhf import models
from jaxrlhf.config import Lora
from jaxrlhf.models.linear import Adapted, Adapter, project
from jaxrlhf.models.lora import quantized as module
from jaxrlhf.models.lora.lora import adapted, declare_adapters, quantized
from jaxrlhf.models.lora.quantized import Quantized
from jaxrlhf.models.parameters import draw

KINDS = ("int8", "nf4")
quantize = jax.jit(module.quantize, static_argnums=1)


def levels_of(kind):
    """Return the levels of 8 bits, or the quantiles of QLoRA: 8 below zero, 7 above, the last at 1."""
    if kind == "int8":
        return np.arange(-128, 128) / 127.5
    last = 0.9677083
    above, below = (norm.ppf(np.linspace(last, 0.5, count)[:-1]) for count in (9, 8))
    return np.sort(np.concatenate([-below, [0.0], above])) / norm.ppf(last)


@jax.jit
def floats_of(tree):
    def one(node):
        return node.astype(jnp.float32) if isinstance(node, Quantized) else node

    return jax.tree.map(one, tree, is_leaf=lambda node: isinstance(node, Quantized))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [(2, 3, 5, 16), (7, 96)], ids=str)
def test_a_quantised_matrix_is_the_nearest_of_its_tiles_levels(kind, shape):
    weight = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    made = quantize(weight, kind)
    assert made.shape == shape
    tiles, ours = (np.asarray(array, np.float64).reshape(-1, min(32, shape[-1])) for array in (weight, floats_of(made)))
    largest = np.abs(tiles).max(axis=1, keepdims=True)
    levels, tiles, ours = levels_of(kind), tiles / largest, ours / largest
    assert np.abs(ours[..., None] - levels).min(axis=-1).max() < 1e-6, "each is a level"
    least = np.abs(tiles[..., None] - levels).min(axis=-1)
    np.testing.assert_allclose(np.abs(ours - tiles), least, atol=1e-6, err_msg="and the nearest")
    assert 1e-3 < least.max() < {"int8": 0.5 / 127, "nf4": 0.16}[kind]


@pytest.mark.parametrize(("kind", "bits"), [("int8", 8), ("nf4", 4)])
def test_a_weight_takes_its_bits_and_a_scale_for_each_tile(kind, bits):
    made = quantize(jnp.ones((48, 64)), kind)
    assert sum(leaf.nbytes for leaf in jax.tree.leaves(made)) == 48 * 64 * bits // 8 + 48 * 2 * 4
    scale = quantize(jnp.ones((48, 64), jnp.bfloat16), kind).scale
    assert scale.dtype == jnp.bfloat16


@pytest.mark.parametrize("kind", KINDS)
def test_small_weights_of_float16_keep_their_scale(kind):
    weight = jnp.asarray(1e-5 * np.random.default_rng(0).normal(size=(4, 64)), jnp.float16)
    wide = weight.astype(jnp.float32)
    np.testing.assert_array_equal(floats_of(quantize(weight, kind)), floats_of(quantize(wide, kind)))


def test_a_tile_of_zeros_stays_zero():
    weight = jnp.zeros((2, 64)).at[1, 40].set(3.0)
    np.testing.assert_array_equal(floats_of(quantize(weight, "nf4")), weight)


@pytest.mark.parametrize("kind", KINDS)
def test_weights_that_are_split_over_devices_are_quantised_and_used_where_they_are(kind):
    mesh = jax.sharding.Mesh(np.array(jax.devices()).reshape(2, 4), ("rows", "columns"))
    split = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("rows", "columns"))
    weight = jax.device_put(np.random.default_rng(0).normal(size=(64, 256)).astype(np.float32), split)
    there = jax.jit(functools.partial(module.quantize, kind=kind), out_shardings=Quantized(split, split, kind))
    there = there.lower(weight)
    back = jax.jit(lambda made: made.astype(jnp.float32), out_shardings=split)
    made = there.compile()(weight)
    for program in (there, back.lower(made)):
        text = program.compile().as_text()
        assert not any(name in text for name in ("all-gather", "all-reduce", "all-to-all", "collective-permute"))
    np.testing.assert_array_equal(back(made), floats_of(quantize(np.asarray(weight), kind)))


def test_a_matrix_whose_codes_do_not_pair_is_refused():
    with pytest.raises(ValueError, match=r"even last dimension, got \(4, 33\)"):
        quantize(jnp.ones((4, 33)), "nf4")


def test_without_qwix_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "qwix", None)
    with pytest.raises(
        ValueError, match=r"lora\.quantize and rollout\.quantize require qwix .*pip install 'jaxrlhf\[quantized\]'"
    ):
        quantize(jnp.ones((2, 32)), "int8")


# Whole models.


class Case:
    """A checkpoint, its weights quantised, and those as floats again."""

    def __init__(self, kind: str, quantization: str, folder) -> None:
        path = tiny_checkpoints.write(folder, tiny_checkpoints.build(kind))
        self.config = models.read_config(path)
        self.whole = models.load_params(path, self.config, "lm")
        self.few_bits = jax.jit(functools.partial(quantized, kind=quantization))(self.whole)
        self.floats = floats_of(self.few_bits)


@pytest.fixture(scope="module")
def dense(tmp_path_factory):
    return Case("qwen2", "nf4", tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def mixture(tmp_path_factory):
    """Experts, one that all tokens share, a first layer without, and heads over latents."""
    return Case("deepseek-v3-halves", "int8", tmp_path_factory.mktemp("model"))


@pytest.fixture(params=["dense", pytest.param("mixture", marks=pytest.mark.slow)])
def case(request):
    return request.getfixturevalue(request.param)


def test_logits_are_those_of_the_dequantised_weights(case):
    token_RW = tokens((3, 20))
    ours = logits(case.few_bits, case.config, token_RW)
    np.testing.assert_allclose(ours, logits(case.floats, case.config, token_RW), atol=2e-5)
    assert np.abs(ours - logits(case.whole, case.config, token_RW)).max() > 1e-3, "nothing was quantised"


def test_what_is_quantised_are_the_matrices_of_layers(case):
    names = {True: set(), False: set()}
    for path, node in jax.tree.leaves_with_path(case.few_bits, is_leaf=lambda node: isinstance(node, Quantized)):
        names[isinstance(node, Quantized)].add(path[-1].key)
    assert names[True] == set(Lora.MATRICES) - ({"key", "value"} if case.config.latent else set())
    assert {"embed", "final_norm", "mlp_norm"} < names[False]
    assert not names[False] & set(Lora.MATRICES)


def test_changes_through_a_frozen_matrix_are_those_of_its_floats():
    sampled = (jax.random.normal(jax.random.key(place), shape) for place, shape in enumerate([(5, 6, 4), (6, 4, 64)]))
    input_TNH, weight = sampled
    few_bits = quantize(weight, "nf4")

    def change(weight):
        return jax.grad(lambda array: jnp.sum(jnp.square(project(array, weight, dims=2))))(input_TNH)

    np.testing.assert_allclose(change(few_bits), change(few_bits.astype(jnp.float32)), rtol=1e-5, atol=1e-4)


@pytest.mark.slow
def test_tokens_decoded_one_by_one_have_the_logits_of_the_whole_sequence(dense):
    config, token_PS = dense.config, tokens((2, 12))
    declared = declare_adapters(config, "lm", Lora(rank=2, targets=("query", "output")))
    params = adapted(dense.few_bits, jax.jit(lambda: draw(declared, jax.random.key(0)))())
    layers = jax.eval_shape(lambda params: models.unstack_layers(params, config), params)
    assert isinstance(layers[0]["attention"]["qkv"].weight, Quantized)
    whole_PSV = logits(params, config, token_PS)
    np.testing.assert_allclose(decoded(params, config, token_PS, first=6), whole_PSV[:, 5:], atol=5e-5)


def test_no_floats_of_a_frozen_matrix_wait_for_the_backward_pass():
    weight = quantize(jnp.ones((96, 128)), "nf4")
    adapter = Adapter(jnp.ones((96, 2)), jnp.ones((2, 128)), 2.0)
    input_TD = jnp.ones((4, 96))
    _, pull = jax.vjp(lambda input_TD, adapter: project(input_TD, Adapted(weight, adapter)), input_TD, adapter)
    kept = {(leaf.dtype.name, leaf.shape) for leaf in jax.tree.leaves(pull)}
    assert ("uint8", (96, 64)) in kept
    assert not any(shape == (96, 128) for _, shape in kept)

"""Layers that only lie apart: the same numbers, and no stack of them beside."""

import functools
import math

import jax
import numpy as np
import pytest
from compiled import most_compilations
from jax.sharding import NamedSharding, PartitionSpec
from tiny_models import same_responses, sharp

from jaxrlhf import models
from jaxrlhf.engine import Request
from jaxrlhf.engine.weights import Weights
from jaxrlhf.sharding.mesh import SLOT_AXES, mesh_of
from jaxrlhf.sharding.rules import GENERATE, shardings
from tests.engine.test_stages import DIMS, MODEL, SAMPLING, engine_of
from tests.models.test_chunks import CHUNK, CONFIGS, LENGTHS, TOKENS, of_tokens, prefill
from tests.models.test_families import GEMMA, close, random_params

REQUESTS = [Request(3 * group + i, (4 + group, 7, 9 - group)) for group in range(3) for i in range(3)]


def layers_apart(config, params, execution=models.ONE_DEVICE):
    """Each part of the stack by itself, and the layers that the parts make up."""
    parts = [models.unstack_layers(part, config, execution=execution) for part in models.layer_parts(params)]
    return models.joined_parts(parts)


def without_stacks(params):
    return {name: tree for name, tree in params.items() if "layers" not in name}


@functools.partial(jax.jit, static_argnums=0, static_argnames="execution")
def both_ways(config, params, token_PS, length_P, execution=models.ONE_DEVICE):
    """Prompts run whole and in chunks by layers that lie apart."""
    how = {"layers": layers_apart(config, params, execution), "execution": execution}
    run = functools.partial(models.prefill, **how)
    rest = without_stacks(params)
    return run(rest, config, token_PS, length_P), run(rest, config, token_PS, length_P, chunk_tokens=CHUNK)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name == "latents and experts")) for name in CONFIGS]
)
def test_prompts_run_by_layers_that_lie_apart_give_what_their_stack_gives(name):
    params = random_params(CONFIGS[name])
    expected = of_tokens(prefill(CONFIGS[name], params, TOKENS, LENGTHS))
    for found in both_ways(CONFIGS[name], params, TOKENS, LENGTHS):
        close(of_tokens(found), expected)


@pytest.mark.slow
def test_stages_run_their_own_layers_that_lie_apart():
    mesh, params = mesh_of({"data": 2, "stage": 2, "tensor": 2}, jax.devices()), random_params(GEMMA)
    expected = of_tokens(prefill(GEMMA, params, TOKENS, LENGTHS))
    rows = jax.device_put((TOKENS, LENGTHS), NamedSharding(mesh, PartitionSpec(SLOT_AXES)))
    execution = models.Execution(pipeline=models.pipeline_over(mesh, ("stage",), row_axes=SLOT_AXES))
    on_devices = jax.device_put(params, shardings(mesh, models.param_dims(GEMMA, "lm"), GENERATE))
    for found in both_ways(GEMMA, on_devices, *rows, execution=execution):
        close(of_tokens(found), expected)


@pytest.mark.parametrize("name", CONFIGS)
def test_parts_of_a_stack_make_up_its_layers(name):
    params = random_params(CONFIGS[name])
    jax.tree.map(
        np.testing.assert_array_equal,
        layers_apart(CONFIGS[name], params),
        models.unstack_layers(params, CONFIGS[name]),
    )


def new_engine(sizes):
    return engine_of(mesh_of(sizes, jax.devices()[: math.prod(sizes.values())]))


def weights_on(engine, seed=3):
    """Fresh arrays in the engine's layout."""
    return jax.device_put(sharp(MODEL, seed), shardings(engine.mesh, DIMS, GENERATE))


def held_bytes(tree):
    return sum(leaf.nbytes for leaf in jax.tree.leaves(tree))


def donated_but(weights, *kept):
    return jax.tree_util.tree_map_with_path(lambda path, _: path[-1].key not in kept, weights)


@pytest.fixture(scope="module")
def expected():
    """Completions with two versions of the weights, each in a stack."""
    engine, found = new_engine({}), []
    for version in range(2):
        engine.load(weights_on(engine, seed=version), version)
        found.append(engine.generate(REQUESTS, SAMPLING, seed=11))
    return found


@pytest.mark.parametrize(
    "sizes", [{}, pytest.param({"data": 2, "stage": 2, "tensor": 2}, marks=pytest.mark.slow)], ids=str
)
def test_weights_that_only_the_engine_reads_lie_apart_and_generate_the_same(expected, sizes):
    engine = new_engine(sizes)
    for version in range(2):
        weights = weights_on(engine, seed=version)
        engine.load(weights, version, donated=donated_but(weights, "mlp_norm"))
        gone = jax.tree.map(lambda leaf: leaf.is_deleted(), weights)
        assert not gone["layers"].pop("mlp_norm")
        assert all(jax.tree.leaves(gone["layers"]))
        assert not gone["embed"] and not gone["final_norm"]  # the engine reads them where they are
        for _ in range(2):  # a generation frees the cache, not the weights
            same_responses(engine.generate(REQUESTS, SAMPLING, seed=11), expected[version])
    assert len(engine.compiled) <= most_compilations(engine)
    compiled = len(engine.compiled)
    engine.load((again := weights_on(engine)), 2, donated=donated_but(again, "mlp_norm"))
    engine.generate(REQUESTS, SAMPLING, seed=12)
    assert len(engine.compiled) == compiled


def test_only_a_part_of_the_layers_exists_twice_at_a_time(monkeypatch):
    """The largest are the projections of attention, which go first."""
    engine = new_engine({})
    weights = weights_on(engine)
    stack = jax.tree.leaves(weights["layers"])
    whole, attention = held_bytes(stack), held_bytes(weights["layers"]["attention"])
    apart, alive, unstacked = [], [], Weights._unstacked

    def watched(self, params, part):
        apart.append(unstacked(self, params, part))
        alive.append(held_bytes([leaf for leaf in stack if not leaf.is_deleted()]) + held_bytes(apart))
        return apart[-1]

    monkeypatch.setattr(Weights, "_unstacked", watched)
    engine.load(weights, 0, donated=donated_but(weights))
    assert len(alive) == 5  # attention, three matrices of the MLP, norms
    assert alive[0] == whole + attention == max(alive)
    assert all(leaf.is_deleted() for leaf in stack)
    assert held_bytes(engine.weights.layers()) == held_bytes(apart) == whole


def test_programs_for_a_stack_do_not_take_layers_that_lie_apart():
    engine = new_engine({})
    engine.load(weights_on(engine), 0)
    weights = weights_on(engine)
    with pytest.raises(ValueError, match="layout than those loaded before"):
        engine.load(weights, 1, donated=donated_but(weights))
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(weights))

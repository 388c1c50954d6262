"""Counts of weights and cache bytes of every family, compared with the arrays of a cache."""

import math
from dataclasses import replace

import jax
import pytest
import tiny_checkpoints
import transformers

from jaxrlhf.config import Layout
from jaxrlhf.models import Execution, empty_cache, read_config
from jaxrlhf.models.counts import weight_counts
from jaxrlhf.planner.cost.memory import cache_bytes

every_kind = pytest.mark.parametrize("kind", tiny_checkpoints.KINDS)


def shape_of(kind, directory):
    """Shape of a family's tiny model, read from its config.json."""
    name, fields = tiny_checkpoints.KINDS[kind]
    config = getattr(transformers, f"{name}Config")(**{**tiny_checkpoints._SIZES, **fields})
    config.architectures = [tiny_checkpoints.model_class(kind, "ForCausalLM").__name__]
    config.save_pretrained(directory)
    return read_config(directory)


@every_kind
def test_parts_of_layers_are_counted_once(kind, tmp_path):
    config = shape_of(kind, tmp_path)
    weights, experts = weight_counts(config), config.experts
    assert weights.attention + weights.mlp <= weights.layers < weights.total
    assert weights.experts + weights.down <= weights.layers - weights.attention
    assert weights.layers_with(None) == weights.layers
    if experts is not None:
        assert weights.layers_with(experts.count) == weights.layers
        assert weights.layers_with(0) == weights.layers - weights.experts


@every_kind
def test_a_token_takes_of_the_cache_what_the_cache_has_for_it(kind, tmp_path):
    config = shape_of(kind, tmp_path)
    cache = jax.eval_shape(lambda: empty_cache(config, slots=3, capacity=32))
    held = sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(cache))
    assert cache_bytes(config, Layout(), tokens=32, itemsize=4) * 3 == held


@pytest.mark.parametrize("kind", ["deepseek-v3", "glm4-moe", "qwen3-next", "qwen3.5"])
def test_the_layer_that_drafts_has_a_cache_too(kind, tmp_path):
    config, drafts = replace(shape_of(kind, tmp_path), mtp="output"), Execution(mtp_slots=1)
    cache = jax.eval_shape(lambda: empty_cache(config, slots=3, capacity=32, execution=drafts))
    held = sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(cache))
    assert cache_bytes(config, Layout(), tokens=32, itemsize=4) * 3 == pytest.approx(held)

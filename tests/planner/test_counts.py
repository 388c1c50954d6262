"""Counts of weights, operations and cache bytes of every family, compared with transformers' models and our arrays."""

import math
from functools import cache
from typing import Any

import jax
import pytest
import tiny_checkpoints
import torch
import transformers

from jaxrlhf.config import Layout
from jaxrlhf.models import empty_cache, read_config
from jaxrlhf.models.counts import weight_counts
from jaxrlhf.models.huggingface.families import FAMILIES
from jaxrlhf.planner.cost.memory import cache_bytes

TASKS = {"lm": "ForCausalLM", "score": "ForSequenceClassification"}


def on_no_device(kind: str, head: str, directory) -> torch.nn.Module:
    """A transformers model without memory, its config.json in a directory."""
    name, fields = tiny_checkpoints.KINDS[kind]
    labels = {"num_labels": 1} if head == "score" else {}
    config = getattr(transformers, f"{name}Config")(**{**tiny_checkpoints._SIZES, **fields, **labels})
    with torch.device("meta"):
        model = tiny_checkpoints.model_class(kind, TASKS[head])(config)
    config.architectures = [type(model).__name__]
    config.save_pretrained(directory)
    return model


def heads_of(kind: str) -> list[str]:
    """Heads that transformers has a model with."""
    return [head for head, task in TASKS.items() if tiny_checkpoints.model_class(kind, task) is not None]


@pytest.fixture(scope="module")
def known(tmp_path_factory):
    """Function of a kind and a head: its shape as read, and the weights of transformers' model; each made once."""

    @cache
    def of(kind: str, head: str = "lm") -> tuple[Any, int]:
        directory = tmp_path_factory.mktemp(f"{kind}_{head}")
        model = on_no_device(kind, head, directory)
        saved = model.state_dict()
        weights = sum(weight.numel() for weight in model.parameters())
        weights += sum(buffer.numel() for name, buffer in model.named_buffers() if name in saved)
        return read_config(directory), weights

    return of


@pytest.mark.parametrize(("kind", "head"), [(kind, head) for kind in tiny_checkpoints.KINDS for head in heads_of(kind)])
def test_a_family_has_as_many_weights_as_transformers(kind, head, known):
    config, weights = known(kind, head)
    assert weight_counts(config, head).total == weights


def test_every_family_is_counted(known):
    assert {known(kind)[0].family for kind in tiny_checkpoints.KINDS} == set(FAMILIES)


@pytest.mark.parametrize("kind", tiny_checkpoints.KINDS)
def test_parts_of_layers_are_counted_once(kind, known):
    config, _ = known(kind)
    weights, experts = weight_counts(config), config.experts
    assert weights.attention + weights.mlp <= weights.layers < weights.total
    assert weights.experts + weights.down <= weights.layers - weights.attention
    assert weights.layers_with(None) == weights.layers
    if experts is not None:
        assert weights.layers_with(experts.count) == weights.layers
        assert weights.layers_with(0) == weights.layers - weights.experts


@pytest.mark.parametrize("kind", tiny_checkpoints.KINDS)
def test_a_token_takes_of_the_cache_what_the_cache_has_for_it(kind, known):
    config, _ = known(kind)
    cache = jax.eval_shape(lambda: empty_cache(config, slots=3, capacity=32))
    held = sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(cache))
    assert cache_bytes(config, Layout(), tokens=32, itemsize=4) * 3 == held

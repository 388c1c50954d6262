"""What plans count by, held against the parameters that each family declares and against transformers' own."""

import math
from functools import cache
from typing import Any

import jax
import pytest
import tiny_checkpoints
import torch
import transformers

from jaxrlhf.config import Layout
from jaxrlhf.models import declare, empty_cache, read_config
from jaxrlhf.models.config import STACKS
from jaxrlhf.models.huggingface.families import FAMILIES
from jaxrlhf.planner.cost.cost import layer_flops
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


def leaves(config, head: str) -> list[tuple[str, int]]:
    """Every declared parameter, and how many numbers it has, without the rows that pad a table."""
    found = []
    for path, param in jax.tree.leaves_with_path(declare(config, head)):
        name, shape = jax.tree_util.keystr(path, simple=True, separator="."), param.shape
        if param.dims[0] == "vocab":
            rows = config.layer_inputs.vocab_size if name.startswith("layer_inputs") else config.vocab_size
            assert rows <= shape[0] < rows + 64
            shape = (rows, *shape[1:])
        found.append((name, math.prod(shape)))
    return found


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
def test_a_family_has_as_many_weights_as_it_declares_and_as_transformers_has(kind, head, known):
    config, weights = known(kind, head)
    assert sum(size for _, size in leaves(config, head)) == weights
    assert config.num_parameters(head) == weights


def test_every_family_is_counted(known):
    assert {known(kind)[0].family for kind in tiny_checkpoints.KINDS} == set(FAMILIES)


@pytest.mark.parametrize("kind", tiny_checkpoints.KINDS)
def test_operations_are_two_for_each_weight_that_a_token_is_multiplied_with(kind, known):
    config, _ = known(kind)
    experts = config.experts
    met = 0.0
    for path, size in leaves(config, "lm"):
        if path.partition(".")[0] in STACKS:
            routed = ".experts." in path
            met += size * (experts.per_token / experts.count if routed else 1)
    # Norm scales and biases are a few more, which only multiply or add.
    assert layer_flops(config, tokens=3, context=0) * config.num_layers == pytest.approx(2 * 3 * met, rel=0.02)


@pytest.mark.parametrize("kind", tiny_checkpoints.KINDS)
def test_a_token_takes_of_the_cache_what_the_cache_has_for_it(kind, known):
    config, _ = known(kind)
    cache = jax.eval_shape(lambda: empty_cache(config, slots=3, capacity=32))
    held = sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(cache))
    assert cache_bytes(config, Layout(), tokens=32, itemsize=4) * 3 == held

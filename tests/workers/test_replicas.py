"""Replicas of the weights: what they tell each other in a microbatch, and in an update."""

import math
from collections.abc import Callable
from dataclasses import replace
from unittest import mock

import jax
import numpy as np
import pytest
from built_workers import build, of_many_lengths, weighted
from compiled import Collective, collectives

from jaxrlhf.algos import nll_objective
from jaxrlhf.batching.ragged import Experience
from jaxrlhf.config import SFT, Arithmetic, Config, FromScratch, Layout, Rollout, Training
from jaxrlhf.models.attention.attention import ROWS, attend_blocks

pytestmark = pytest.mark.usefixtures("programs")

WIDTH, REPLICAS = 40, 2
SETTINGS = SFT(examples_per_update=16)
DENSE = FromScratch(hidden_size=16, intermediate_size=32, num_layers=2, num_heads=2, num_kv_heads=2, head_dim=8)
MIXTURE = replace(DENSE, intermediate_size=16, experts=4)


def actor(model: FromScratch, layout: Layout, *, devices: int):
    settings = Config(
        name="replicas",
        model=model,
        data=Arithmetic(difficulty=1, train_problems=16, eval_problems=4),
        algorithm=SETTINGS,
        actor=Training(tokens_per_microbatch=WIDTH * 8, remat="none", layout=layout),
        rollout=Rollout(max_prompt_tokens=WIDTH - 16, max_response_tokens=16),
        steps=1,
        devices=devices,
    )
    return build(settings, "actor")[1]["actor"]


def experience(rows: int = 24) -> Experience:
    """Sequences of many lengths: more than one microbatch, and unlike numbers of tokens on every device."""
    sequences = of_many_lengths(np.random.default_rng(0), rows=rows, width=WIDTH, shortest=6)
    return weighted(sequences, aggregation="seq-mean-token-mean")


def gradient(worker) -> tuple[list[np.ndarray], dict[str, float], int]:
    """Its leaves, the sums of metrics, and how many microbatches there were."""
    found, sums = worker.gradient(experience(), nll_objective, SETTINGS)
    totals = {name: sum(float(part[name]) for part in sums) for name in sums[0]}
    return [np.asarray(leaf) for leaf in jax.tree.leaves(found)], totals, len(sums)


@pytest.fixture(scope="module")
def of_one_device() -> Callable[[FromScratch], tuple[list[np.ndarray], dict[str, float], int]]:
    known = {}

    def get(model: FromScratch):
        if model not in known:
            known[model] = gradient(actor(model, Layout(), devices=1))
        return known[model]

    return get


def assert_same(found, expected) -> None:
    """Gradients, and metrics but for those of a microbatch's routers, to float32 sums in another order."""
    assert found[2] > 1 and any(np.abs(leaf).max() > 1e-3 for leaf in expected[0])
    for one, other in zip(found[0], expected[0], strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-5, atol=2e-6)
    for name in ("tokens", "loss", "supervised/loss"):
        assert found[1][name] == pytest.approx(expected[1][name], rel=1e-5), name


def between_replicas(found: list[Collective], worker) -> list[Collective]:
    """Return the collectives that move anything between replicas."""
    assert worker.mesh.axis_names[0] == "data"
    devices = worker.mesh.devices.size // REPLICAS
    return [each for each in found if any(len({at // devices for at in group}) > 1 for group in each.groups)]


@pytest.mark.parametrize(
    ("model", "layout", "devices"),
    [
        pytest.param(DENSE, Layout(fsdp=2), 4, marks=pytest.mark.seeds),
        pytest.param(MIXTURE, Layout(expert=2), 4, marks=pytest.mark.slow),
        pytest.param(DENSE, Layout(stage=2, tensor=2), 8, marks=pytest.mark.seeds),
        pytest.param(DENSE, Layout(), 2, marks=pytest.mark.seeds),
        pytest.param(MIXTURE, Layout(fsdp=2, expert=2), 8, marks=pytest.mark.seeds),
        pytest.param(MIXTURE, Layout(tensor=2), 4, marks=pytest.mark.seeds),
    ],
    ids=str,
)
def test_gradients_are_summed_over_replicas_once_in_an_update(
    model, layout, devices, of_one_device, monkeypatch
) -> None:
    worker, programs = actor(model, layout, devices=devices), {}
    assert worker.mesh.shape["data"] == REPLICAS

    def seen(name: str, program):
        def call(*arguments):
            programs.setdefault(name, program.lower(*arguments))
            return program(*arguments)

        return call

    def accumulator(*key):
        return seen("microbatch", original(*key))

    original = worker.gradient_program
    if model is MIXTURE:  # whose attention may as well be a kernel that runs on each device
        worker._execution = replace(worker._execution, rows_kernel="flash")
        monkeypatch.setitem(ROWS, "flash", attend_blocks)
    with mock.patch.multiple(worker, gradient_program=accumulator, _sum=seen("sum", worker._sum)):
        found = gradient(worker)
    assert_same(found, of_one_device(model))
    told = sum(each.received_bytes for each in between_replicas(collectives(programs["microbatch"]), worker))
    assert told <= 2 * 4 * len(found[1]), "more than a number for each metric"
    # Around a ring of two a device is sent a half twice.
    held = sum(math.prod(leaf.sharding.shard_shape(leaf.shape)) * 4 for leaf in jax.tree.leaves(worker.params))
    told = sum(each.received_bytes for each in between_replicas(collectives(programs["sum"]), worker))
    assert told == held


@pytest.mark.seeds
def test_where_weights_are_split_both_ways_the_numbers_are_the_same(of_one_device) -> None:
    worker = actor(DENSE, Layout(fsdp=2, tensor=2), devices=8)
    assert worker.mesh.shape["data"] == REPLICAS
    assert_same(gradient(worker), of_one_device(DENSE))

"""Parts in host memory, by role and by phase: counted as live bytes on the devices."""

import gc
from dataclasses import replace

import jax
import numpy as np
import pytest
from built_workers import build, halves, weighted
from tiny_runs import get_config, training

from jaxrlhf.algos import policy_objective
from jaxrlhf.batching.ragged import Experience
from jaxrlhf.config import Config
from jaxrlhf.tracking import bytes_in_use
from jaxrlhf.workers.offloadable import Offloadable

pytestmark = pytest.mark.usefixtures("programs")


def config_of(devices: int, dtype: str, offload: tuple[str, ...], **layout: int) -> Config:
    config = get_config()
    critic = training(**{name: size for name, size in layout.items() if not name.startswith("generation")})
    return replace(
        config,
        devices=devices,
        compute_dtype=dtype,
        offload=offload,
        actor=training(**layout),
        algorithm=replace(config.algorithm, critic=critic),
        cold_start=None,
    )


def on_devices(worker, part: str) -> int:
    """Bytes of a part of a model in the memory of one device; all devices hold as much."""
    leaves = jax.tree.leaves(worker.trees[part].tree)
    return sum(leaf.addressable_shards[0].data.nbytes for leaf in leaves if leaf.sharding.memory_kind == "device")


def experience(rows: int = 8, width: int = 80) -> Experience:
    one_BT = np.ones((rows, width), np.float32)
    sequences = halves(np.random.default_rng(0), rows=rows, width=width)
    return weighted(sequences, {"advantage": one_BT, "old_logp": -6 * one_BT})


@pytest.mark.parametrize(
    ("devices", "dtype", "layout"),
    [
        (1, "float32", {}),  # every weight is shared between the layouts
        pytest.param(2, "float32", {"tensor": 2}, marks=pytest.mark.slow),  # some move in place, some are shared
        (2, "bfloat16", {"tensor": 2}),  # matrices are cast, norms are shared
        pytest.param(4, "bfloat16", {"stage": 2, "fsdp": 2}, marks=pytest.mark.slow),  # matrices are cast, norms move
    ],
)
def test_masters_wait_while_the_actor_generates(devices: int, dtype: str, layout: dict[str, int]) -> None:
    builder, workers = build(config_of(devices, dtype, ("actor.parameters",), **layout), "actor")
    actor, used = workers["actor"], jax.devices()[:devices]
    assert on_devices(actor, "parameters") == 0
    gc.collect()
    idle = bytes_in_use(used)
    with actor.parameters.on_devices():
        before = [np.asarray(leaf) for leaf in jax.tree.leaves(actor.params)]
    with actor.generating():
        grown = [now - then for now, then in zip(bytes_in_use(used), idle, strict=True)]
        wanted = builder.hybrid.generation_bytes_per_device
        if dtype == "bfloat16":  # layers lie apart, but the norms of both have a stack as well
            wanted += 2 * 32 * 4 * 2
        assert max(grown) == wanted, "the weights that generate, and no masters"
    assert bytes_in_use(used) == idle
    with actor.parameters.on_devices():
        after = [np.asarray(leaf) for leaf in jax.tree.leaves(actor.params)]
    for old, new in zip(before, after, strict=True):
        np.testing.assert_array_equal(old, new)


@pytest.mark.slow
def test_the_optimizer_is_on_the_devices_only_while_it_updates() -> None:
    _, workers = build(config_of(1, "float32", ("actor.optimizer",)), "actor")
    _, plain = build(config_of(1, "float32", ()), "actor")
    update = {"objective": policy_objective, "settings": get_config().algorithm}
    for _ in range(2):
        metrics = workers["actor"].update_actor([experience()], **update)
        expected = plain["actor"].update_actor([experience()], **update)
        assert metrics == expected, "offloading changed the numbers"
        assert on_devices(workers["actor"], "optimizer") == 0
        assert on_devices(workers["actor"], "parameters") > 0
        assert on_devices(plain["actor"], "optimizer") > 0
    moved = workers["actor"].take_metrics()
    adam = 2 * on_devices(plain["actor"], "parameters")
    # Away when it was made, there and away in each of two updates; its counters are a few bytes more.
    assert 5 * adam <= moved["offload/actor_bytes"] < 5.01 * adam
    assert "offload/actor_bytes" not in plain["actor"].take_metrics()


def test_an_update_that_fails_says_why_and_not_what_it_left_behind() -> None:
    held = Offloadable({"w": jax.device_put(np.ones(4), jax.devices()[0])}, offload=True)
    with pytest.raises(MemoryError, match="no room"), held.on_devices():
        held.tree["w"].delete()  # as what is donated to a program that then fails
        raise MemoryError("no room")


def test_a_frozen_role_waits_between_its_calls() -> None:
    _, workers = build(config_of(1, "float32", ("reference",)), "reference")
    _, plain = build(config_of(1, "float32", ()), "reference")
    reference, batch = workers["reference"], experience().sequences
    assert on_devices(reference, "parameters") == 0
    got, wanted = (worker.forward(batch).logp for worker in (reference, plain["reference"]))
    np.testing.assert_array_equal(got, wanted)
    assert on_devices(reference, "parameters") == 0
    assert on_devices(plain["reference"], "parameters") > 0

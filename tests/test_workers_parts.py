"""An update whose gradient is taken in parts, as those of its sequences come, is the update at once."""

import weakref
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_workers_gradient import ALGORITHM, POLICY, agree, build, config, experience, part_of

from jaxrlhf.algos import policy_objective
from jaxrlhf.workers.offloadable import Offloadable

pytestmark = pytest.mark.usefixtures("programs")


def updated(actor, parts: int) -> tuple[list[np.ndarray], dict[str, float]]:
    """Moments and metrics of an update, at once or in parts whose weights are times 5, as if 5 were the count."""
    batch = part_of(experience(), (*POLICY, "kl_weight", "entropy_weight"))
    before = jax.tree.map(jnp.copy, actor.params)
    if parts == 1:
        report = actor.update([batch], policy_objective, ALGORITHM)
    else:
        of_count = {name: 5 * value for name, value in batch.fields.items() if name.endswith("_weight")}
        undivided = replace(batch, weight_BT=5 * batch.weight_BT, fields=batch.fields | of_count)
        for part in range(parts):
            own = jax.tree.map(lambda leaf, part=part: leaf[part::parts], undivided)
            actor.add_part(own, policy_objective, ALGORITHM, temperature=1.0)
        report = actor.update_by_parts(5)
    moments = [np.asarray(leaf) for leaf in jax.tree.leaves(actor.optimizer.tree)]
    actor.trained.tree, actor.optimizer, actor.updates = before, Offloadable(actor._initial_state), 0
    return moments, report.metrics


@pytest.fixture(scope="module")
def actor():
    """Two replicas, each of which has a gradient of its own."""
    return build(config(devices=2), roles=("actor",))[1]["actor"]


@pytest.mark.slow
def test_an_update_in_parts_is_that_of_the_whole(actor) -> None:
    whole, metrics = updated(actor, 1)
    parts, told = updated(actor, 2)
    agree(parts, whole)
    assert told == pytest.approx(metrics, rel=1e-5, abs=1e-6)


def test_a_gradient_is_gone_when_that_of_the_next_minibatch_is_begun(actor, monkeypatch) -> None:
    batch = part_of(experience(), (*POLICY, "kl_weight", "entropy_weight"))
    made: list[weakref.ref] = []
    alive: list[int] = []
    zeros, gradient = actor._zeros, actor.gradient

    def begun(trained):
        alive.append(sum(leaf() is not None for leaf in made))
        return zeros(trained)

    def ended(*arguments, **options):
        whole, sums = gradient(*arguments, **options)
        made.extend(map(weakref.ref, jax.tree.leaves(whole)))
        return whole, sums

    monkeypatch.setattr(actor, "_zeros", begun)
    monkeypatch.setattr(actor, "gradient", ended)
    actor.update([batch] * 3, policy_objective, ALGORITHM)
    assert alive == [0] * 3 and len(made) == 3 * len(jax.tree.leaves(actor.trained.tree))

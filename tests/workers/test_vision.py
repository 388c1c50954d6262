"""Policies with a vision tower: it is frozen by default, or has a learning rate of its own; and what hosts answer."""

import json
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrlhf.batch import Image, Problem
from jaxrlhf.batching.transfer_protocol import join
from jaxrlhf.config import Optimizer, Sampling
from jaxrlhf.engine import Completion
from jaxrlhf.models.parameters import Param
from jaxrlhf.models.vision.rows import StripShape
from jaxrlhf.optimizers.groups import ParameterGroups
from jaxrlhf.optimizers.optimizer import optimizer_of
from jaxrlhf.workers.sampler import CompletionFeed, Sampler
from jaxrlhf.workers.trained_model import TrainedWorker

DECLARED = {"layers": {"up": Param((3,), (None,))}, "vision": {"patch": Param((5, 2), (None, None))}}


def updated(rate):
    settings = Optimizer(learning_rate=0.1, vision_learning_rate=rate, weight_decay=0.5)
    params = {"layers": {"up": jnp.ones(3)}, "vision": {"patch": jnp.ones((5, 2))}}
    optimizer = optimizer_of(settings, DECLARED, ParameterGroups.of(settings, DECLARED, {}), total_updates=10)
    state = optimizer.init(params)
    changes, _ = optimizer.update(jax.tree.map(jnp.ones_like, params), state, params)
    return changes, state


@pytest.mark.parametrize("rate", [None, 0.01])
def test_a_tower_moves_by_its_own_learning_rate(rate):
    changes, state = updated(rate)
    assert float(jnp.abs(changes["layers"]["up"]).min()) > 0.1
    expected = changes["layers"]["up"][0] * (rate or 0) / 0.1
    np.testing.assert_allclose(changes["vision"]["patch"], expected, rtol=1e-4)
    moments = [leaf for leaf in jax.tree.leaves(state) if leaf.shape == (5, 2)]
    assert len(moments) == (0 if rate is None else 2), "a frozen tower has no moments"


def test_room_for_images_is_in_a_checkpoint():
    """A picture in a strip of other room is rounded otherwise, so a resumed run needs the same strips."""

    def worker(role, *room):
        made = object.__new__(TrainedWorker)
        made.role, made.updates, made._patch_capacity = role, 3, [*room]
        return made

    saved = json.loads(json.dumps(worker("actor", StripShape(3, 60)).counters() | worker("critic").counters()))
    for role, expected in (("actor", [StripShape(3, 60)]), ("critic", [])):
        resumed = worker(role)
        resumed.updates = 0
        resumed.set_counters(saved)
        assert (resumed.updates, resumed._patch_capacity) == (3, expected)


def test_hosts_with_and_without_pictures_answer_one_batch():
    def answer(requests, *_, **__):
        return [Completion(one.request_id, (5,), (-0.5,), False, version=0) for one in requests]

    places = SimpleNamespace(vision="a tower"), SimpleNamespace(generate=answer), None, None
    host = Sampler(*places, 4, lambda *_: None, CompletionFeed())
    image = Image("drawn", "digest", (1, 2, 2), 0, 1)
    given = Problem(0, "", (1, 2)), Problem(1, "", (3,), images=(image,))
    parts = [host.generate([one], Sampling(), responses_per_prompt=2, seed=0) for one in given]
    rollout = join(parts)
    assert rollout.sequences.images_B.tolist() == [(), (), (image,), (image,)]
    assert rollout.sequences.token_BT.tolist() == 2 * [[1, 2, 5, 0]] + 2 * [[3, 5, 0, 0]]

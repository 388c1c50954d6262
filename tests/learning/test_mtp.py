"""A layer for the second next token that has learned drafts what the model says, several tokens deep."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tiny_models import SMALL, same_responses

from jaxrlhf import models
from jaxrlhf.config import Sampling
from jaxrlhf.engine import Engine, Request
from jaxrlhf.engine.speculation.drafts import Draft
from jaxrlhf.models.attention.attention import Segments
from jaxrlhf.models.mtp.loss import mtp_logp
from jaxrlhf.sharding.mesh import SLOT_AXES, mesh_of

MODEL = replace(SMALL, vocab_size=32, tie_embeddings=True, mtp="output")
WIDTH, STEPS = 24, 150


def texts(rng, rows):
    """Each token follows from the one before it: four times the token, plus seven, modulo 31."""
    token_RW = rng.integers(0, 31, (rows, WIDTH)).astype(np.int32)
    for at in range(1, WIDTH):
        token_RW[:, at] = (4 * token_RW[:, at - 1] + 7) % 31
    return token_RW


def learned():
    params = models.init_params(MODEL, "lm", jax.random.key(0))
    optimizer = optax.adam(1e-2)
    place_RW = jnp.broadcast_to(jnp.arange(WIDTH), (32, WIDTH))
    given, how = (place_RW, jnp.ones_like(place_RW)), {"chunk_tokens": 4096, "execution": models.ONE_DEVICE}

    def loss(params, token_RW):
        hidden_RWD = models.hidden_states(params, MODEL, token_RW, *given).hidden_RWD
        own = models.token_logp(params, MODEL, hidden_RWD, token_RW).logp
        chosen_RW, mask = place_RW >= 2, Segments(given[1])
        further, _ = mtp_logp(params, MODEL, hidden_RWD, token_RW, place_RW, chosen_RW, mask, temperature=1.0, **how)
        return -(own.mean() + further.mean())

    @jax.jit
    def step(params, state, token_RW):
        changes, state = optimizer.update(jax.grad(loss)(params, token_RW), state)
        return optax.apply_updates(params, changes), state

    rng, state = np.random.default_rng(0), optimizer.init(params)
    for _ in range(STEPS):
        params, state = step(params, state, texts(rng, 32))
    return params


@pytest.mark.slow
def test_three_drafts_of_a_trained_layer_are_accepted(monkeypatch):
    params, mesh = learned(), mesh_of({}, jax.devices()[:1])
    asked = [Request(row, tuple(prompt[:6].tolist())) for row, prompt in enumerate(texts(np.random.default_rng(1), 4))]
    found = []
    for speculation in (None, "auto"):
        sizes = {"max_prompt_tokens": 8, "max_response_tokens": 32, "decode_tokens_per_dispatch": 4}
        engine = Engine(MODEL, mesh, slots=4, stop_tokens=(31,), slot_axes=SLOT_AXES, speculation=speculation, **sizes)
        engine.load(params, version=0)
        monkeypatch.setattr(engine.speculation, "_width", lambda rows, active: 4)
        monkeypatch.setattr(engine.speculation._index, "draft", lambda *_: Draft((), 0))
        found.append(engine.generate(asked, Sampling(temperature=0.7), seed=3))
    same_responses(*found)
    counts = engine.speculation.take_counts()
    assert counts.accepted > 0.8 * counts.drafted
    assert counts.tokens > 3 * counts.rows

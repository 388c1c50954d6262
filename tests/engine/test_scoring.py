"""Log-probabilities of given tokens, compared with the logits of whole sequences."""

import time
from dataclasses import replace

import jax
import numpy as np
import pytest
from tiny_models import SMALL, gaussian

from jaxrlhf import models
from jaxrlhf.batch import Diverged
from jaxrlhf.config import Refusal, Sampling
from jaxrlhf.engine import EngineService, Request
from jaxrlhf.sharding.rules import GENERATE, shardings
from tests.engine import test_rings, test_routing, test_states
from tests.engine.test_turns import LATENT, MODEL, SEED, build, prompts

pytestmark = pytest.mark.usefixtures("programs")


def expected(model, tokens, temperature=1.0):
    """Log-probabilities of all tokens of the vocabulary in each place but the first, by numpy."""
    row = np.asarray(tokens)[None]
    place = np.arange(row.shape[1], dtype=np.int32)[None]
    params = gaussian(model)
    hidden = models.hidden_states(params, model, row.astype(np.int32), place, np.ones_like(place)).hidden_RWD
    logit_TV = np.asarray(models.logits(params, model, hidden), np.float64)[0, :-1] / temperature
    peak_T1 = logit_TV.max(axis=-1, keepdims=True)
    return logit_TV - peak_T1 - np.log(np.exp(logit_TV - peak_T1).sum(axis=-1, keepdims=True))


@pytest.mark.parametrize(
    ("model", "sizes"),
    [
        pytest.param(MODEL, {}, id="rings"),
        pytest.param(MODEL, {"data": 2, "tensor": 2}, id="sharded"),
        pytest.param(LATENT, {}, id="latent", marks=pytest.mark.slow),
        pytest.param(MODEL, {"stage": 2}, id="stages", marks=pytest.mark.slow),
    ],
)
def test_scores_are_log_probabilities_of_the_tokens(model, sizes):
    engine = build(model, **sizes)
    sequences = [*prompts(), (5,), (9, 4) * 30]
    for temperature in (1.0, 0.7):
        for tokens, scores in zip(sequences, engine.score(sequences, temperature=temperature), strict=True):
            assert scores.logp_T.shape == (len(tokens),) and scores.logp_T[0] == 0
            if len(tokens) == 1:
                continue
            logp_TV = expected(model, tokens, temperature)
            own_T = np.take_along_axis(logp_TV, np.asarray(tokens[1:])[:, None], axis=1)[:, 0]
            np.testing.assert_allclose(scores.logp_T[1:], own_T, atol=2e-5)
            best_TK = np.sort(logp_TV, axis=1)[:, ::-1][:, : scores.likely_TK.shape[1]]
            np.testing.assert_allclose(scores.likely_logp_TK[1:], best_TK, atol=2e-5)
            named_TK = np.take_along_axis(logp_TV, scores.likely_TK[1:], axis=1)
            np.testing.assert_allclose(named_TK, scores.likely_logp_TK[1:], atol=2e-5)
            np.testing.assert_array_equal(scores.is_greedy_T[1:], own_T > best_TK[:, 0] - 1e-9)


KINDS = {"experts": test_routing.MODEL}
FURTHER = {"apart": test_rings.APART, "borrowing": test_rings.BORROWING, "rings": MODEL, "latent": LATENT}
FURTHER |= dict(zip(("states", "spaces", "states borrowed"), test_states.PARAMS, strict=True))


@pytest.mark.parametrize(
    "model",
    [*KINDS.values(), *(pytest.param(model, marks=pytest.mark.slow) for model in FURTHER.values())],
    ids=[*KINDS, *FURTHER],
)
def test_unstacked_layers_score_alike(model):
    """An engine that serves has deleted the stacks of its layers."""
    engine = build(model, window=2)
    engine.unload()
    engine._signature = None
    params = jax.tree.map(jax.numpy.array, gaussian(model))
    layout = shardings(engine.mesh, models.param_dims(model, "lm"), GENERATE)
    engine.load(jax.device_put(params, layout), version=1, donated=jax.tree.map(lambda _: True, params))
    assert engine.weights.stackless is not None
    for tokens, scores in zip(prompts(), engine.score(prompts()), strict=True):
        own_T = np.take_along_axis(expected(model, tokens), np.asarray(tokens[1:])[:, None], axis=1)[:, 0]
        np.testing.assert_allclose(scores.logp_T[1:], own_T, atol=5e-5)


def test_lengths_share_programs():
    engine = build(replace(SMALL, num_layers=1), window=5)
    engine.score([(4,) * length for length in range(1, 49)])
    assert len(engine.compiled) == 1
    engine.score([(4,) * 20])
    engine.score([(4,) * 33])
    assert len(engine.compiled) == 2, "a single sequence has fewer rows"
    engine.score([(4,) * 60, (5,) * 50])
    assert len(engine.compiled) == 3


def test_what_cannot_be_scored_is_refused(refused):
    engine = build()
    for tokens in ((), (4,) * 65, (4, SMALL.vocab_size), (-1, 4)):
        with refused():
            engine.score([tokens])


def test_sequences_are_scored_while_others_are_sampled():
    engine = build()
    alone = engine.score(prompts(), temperature=0.9)
    sampled = engine.generate([Request(0, prompts()[0], max_tokens=12)], Sampling(), seed=SEED)[0]
    with EngineService(engine) as service:
        response = service.submit(Request(0, prompts()[0], max_tokens=12), Sampling(), seed=SEED)
        futures = [service.score(tokens, temperature=0.9) for tokens in prompts()]
        other = service.score(prompts()[0])
        service.score(prompts()[1]).cancel()
        for future, scores in zip(futures, alone, strict=True):
            np.testing.assert_allclose(future.result(60).logp_T, scores.logp_T, atol=1e-5)
        assert response.result(60) == sampled
        assert not np.allclose(other.result(60).logp_T, alone[0].logp_T, atol=1e-3)
        service.hold()
        held = service.score(prompts()[0], temperature=0.9)
        time.sleep(0.1)
        assert not held.done(), "other weights may be loaded meanwhile"
        service.resume()
        np.testing.assert_allclose(held.result(60).logp_T, alone[0].logp_T, atol=1e-5)
        with pytest.raises(Refusal):
            service.score(())


def test_logits_that_are_not_finite_are_an_error():
    engine = build(MODEL, window=6)
    broken = jax.tree.map(lambda leaf: leaf * np.nan, engine.weights.params)
    engine.load(broken, version=1)
    with pytest.raises(Diverged):
        engine.score(prompts())
    with EngineService(engine) as service, pytest.raises(Diverged):
        service.score(prompts()[0]).result(60)

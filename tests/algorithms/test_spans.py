"""Distillation by distributions over spans: TRL's numbers, from logits to the loss and back, and its limits."""

import json
import math
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_models import DECODER

from jaxrlhf.config import load_module
from jaxrlhf.models.heads import token_logp

by_logits = load_module("logit_distillation")
event_divergence, span_objective = by_logits.event_divergence, by_logits.span_objective
LogitDistillation = by_logits.LogitDistillation
GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "zoo.json").read_text())["distillation/spans"]
SPANS = GOLDEN["spans"]
MOST = 3
"""Named tokens that the golden numbers are of."""


def read(logits, ids, **more):
    """Reading of tokens behind one without a logit, by a head whose hidden states are logits; `[1, W]` and wider."""
    logits, width = np.asarray(logits, np.float32), len(ids) + 1
    config = replace(DECODER, vocab_size=logits.shape[1], hidden_size=logits.shape[1], tie_embeddings=False)
    token_RW = np.array([[0, *ids]], np.int32)
    hidden_RWD = np.concatenate([logits, np.zeros_like(logits[:1])])[None]
    wanted_RW = np.arange(width)[None] > 0
    table_VD = jnp.eye(logits.shape[1])
    run = jax.jit(lambda hidden_RWD: token_logp({"head": table_VD}, config, hidden_RWD, token_RW, wanted_RW, **more))
    return run, hidden_RWD, wanted_RW


def of_teacher():
    """The teacher's log-probability of each span; its likeliest tokens, by the student's ids, and theirs."""
    logits = np.asarray(GOLDEN["teacher_logits"])
    own_id = dict(GOLDEN["pairs"])
    among_V = np.isin(np.arange(logits.shape[1]), [*own_id])
    run, hidden, _ = read(logits, GOLDEN["teacher_ids"], among_V=jnp.asarray(among_V))
    output = run(hidden)
    logp, names, named = (np.asarray(array)[0, 1:] for array in (output.logp, output.names, output.named))
    names, named = names[:, :MOST], named[:, :MOST]
    spans = [logp[span].sum() for span in SPANS[1]]
    return spans, [[own_id[int(one)] for one in names[span[0]]] for span in SPANS[1]], [named[s[0]] for s in SPANS[1]]


@pytest.mark.slow
@pytest.mark.parametrize("beta", [0.0, 0.9, 1.0])
def test_a_span_is_compared_as_trl_compares_merged_probabilities(beta):
    ids = GOLDEN["student_ids"]
    teacher, names, named = of_teacher()
    width = len(ids) + 1
    fields = {name: np.zeros((1, width), np.float32) for name in ("to_last", "teacher_logp", "advantage", "old_logp")}
    fields |= {"named": np.full((1, width, MOST), -1.0, np.float32), "teacher_named": np.zeros((1, width, MOST))}
    for number, members in enumerate(SPANS[0]):
        last = members[-1] + 1
        for one in members:
            fields["to_last"][0, one + 1], fields["teacher_logp"][0, one + 1] = last - one - 1, teacher[number]
        if len(members) == len(SPANS[1][number]) == 1:
            kept = [place for place, token in enumerate(names[number]) if token != ids[members[0]]]
            assert [names[number][place] for place in kept] == GOLDEN["names"][number]
            fields["named"][0, last, kept] = GOLDEN["names"][number]
            fields["teacher_named"][0, last, kept] = named[number][kept]
    settings = LogitDistillation(beta=beta, named=MOST)
    named_RWK = jnp.asarray(fields["named"], jnp.int32)
    run, hidden, mask = read(GOLDEN["student_logits"], ids, named_RWK=named_RWK, chunk_tokens=3)

    def loss(hidden_RWD):
        terms = span_objective(run(hidden_RWD), mask, jnp.ones((1, width)), fields, settings)
        return terms.loss.sum(), terms

    (total, terms), slope = jax.value_and_grad(loss, has_aux=True)(hidden)
    wanted = GOLDEN[f"beta {beta}"]
    ends = [members[-1] + 1 for members in SPANS[0]]
    np.testing.assert_allclose(terms.metrics["spans/divergence"][0, ends], wanted["divergence"], rtol=2e-5, atol=1e-7)
    assert total == pytest.approx(sum(wanted["divergence"]), rel=1e-5)
    np.testing.assert_allclose(slope[0, :-1], wanted["gradient"], rtol=1e-4, atol=2e-6)


def test_events_that_are_not_there_are_none_and_what_is_left_is_one():
    rng = np.random.default_rng(0)
    own, other = (np.log(rng.dirichlet(np.ones(6))[:4]).astype(np.float32) for _ in range(2))
    padded = [np.append(one, np.float32(-1e9)) for one in (own, other)]
    for beta in (0.0, 0.3, 1.0):
        whole = [np.append(np.exp(one), 1 - np.exp(one).sum()).astype(float) for one in (own, other)]
        m = beta * whole[1] + (1 - beta) * whole[0]
        to = [whole[0] if beta == 0 else m, whole[1] if beta == 1 else m]
        parts = [(1 - beta + (beta == 1)) * _kl(whole[0], to[1]), (beta + (beta == 0)) * _kl(whole[1], to[0])]
        naive = parts[1] if beta == 0 else parts[0] if beta == 1 else sum(parts)
        assert event_divergence(own, other, beta=beta) == pytest.approx(naive, rel=1e-5)
        assert event_divergence(*padded, beta=beta) == event_divergence(own, other, beta=beta)
        assert event_divergence(own, own, beta=beta) == pytest.approx(0, abs=1e-6)
        certain = jnp.array([0.0, -1e9])  # the rest of either has no chance
        slope = jax.grad(lambda x, b=beta: event_divergence(x, jnp.array([-0.5, -2.0]), beta=b))(certain)
        assert np.isfinite(slope).all()


def _kl(p, q):
    return sum(a * math.log(a / b) for a, b in zip(p, q, strict=True))

"""Routers of a trained policy: their loss is part of the one sum, and what they do is reported."""

from dataclasses import replace

import jax
import numpy as np
import pytest
from built_workers import builder_of, of_many_lengths, weighted

from jaxrlhf.algos import PairRewards, PairSettings, nll_objective, pair_objective
from jaxrlhf.batching.ragged import Experience
from jaxrlhf.config import SFT, Arithmetic, Config, FromScratch, Rollout, Training
from jaxrlhf.dataflows.batches.preference_pairs import pair_experience
from jaxrlhf.workers.build import Builder, Phase
from jaxrlhf.workers.summary import pool_rows

pytestmark = pytest.mark.usefixtures("programs")

EXPERTS, EACH, WIDTH = 4, 2, 72


def built(*, tokens: int = 2048, router_loss: float | None = 0.5, experts: int = EXPERTS) -> Builder:
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_layers": 1, "num_heads": 2, "num_kv_heads": 2}
    settings = Config(
        name="routers",
        model=FromScratch(**sizes, head_dim=8, experts=experts, experts_per_token=EACH),
        data=Arithmetic(difficulty=1, train_problems=16, eval_problems=4),
        algorithm=SFT(examples_per_update=16),
        actor=Training(tokens_per_microbatch=tokens, remat="none", router_loss=router_loss),
        rollout=Rollout(max_prompt_tokens=56, max_response_tokens=16),
        steps=1,
        devices=1,
    )
    return builder_of(settings, ["actor"])


def actor(**changes):
    builder = built(**changes)
    return builder.workers(Phase(builder.config, ("actor",), total_updates=1))["actor"]


def experience() -> Experience:
    """Responses of many lengths, the weights of their tokens all alike."""
    return weighted(of_many_lengths(np.random.default_rng(0), rows=8, width=WIDTH, shortest=8))


@pytest.fixture(scope="module")
def balanced():
    return actor()


@pytest.fixture(scope="module")
def indifferent():
    return actor(router_loss=0.0)


SETTINGS = SFT(examples_per_update=16)


def gradient(worker, batch=None, objective=nll_objective, settings=SETTINGS):
    """Return the gradient as arrays by path, and the sums of all microbatches."""
    found, sums = worker.gradient(batch or experience(), objective, settings)
    totals = {name: sum(float(part[name]) for part in sums) for name in sums[0]}
    leaves = {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in jax.tree.leaves_with_path(found)}
    return leaves, totals


@pytest.mark.slow
def test_the_loss_that_balances_experts_is_weighed_as_the_main_loss(balanced, indifferent):
    (with_loss, sums), (without, plain) = gradient(balanced), gradient(indifferent)
    # All weights are one over the number of tokens, so the sum is the mean.
    balance = sums["router/actor_loss"] / sums["tokens"]
    assert EACH <= balance < EXPERTS
    np.testing.assert_allclose(sums["loss"] - plain["loss"], 0.5 * balance, rtol=1e-5)
    router = "['layers']['mlp']['router']"
    assert np.abs(with_loss[router] - without[router]).max() > 1e-4
    np.testing.assert_array_equal(with_loss["['final_norm']"], without["['final_norm']"])  # nothing flows back to it


def apart(_, sums) -> PairRewards:
    """A loss whose slopes are opposite for the two answers of a pair, and others for each pair."""
    chosen_P, rejected_P = sums["value"].T
    return PairRewards(np.linspace(0.01, 0.07, 4) * (rejected_P - chosen_P), chosen_P, rejected_P)


@pytest.mark.slow
def test_the_balance_of_pairs_is_over_their_tokens_whatever_their_slopes(balanced, indifferent):
    # A slope is below 0 for one answer of a pair and above for the other, so by those experts would be unbalanced.
    pairs, settings = pair_experience(experience().sequences, {}), PairSettings(apart, None, 4)
    router, moved = "['layers']['mlp']['router']", []
    for how in ((replace(experience(), together=2),), (pairs, pair_objective, settings)):
        (with_loss, _), (without, _) = gradient(balanced, *how), gradient(indifferent, *how)
        moved.append(with_loss[router] - without[router])
    assert np.abs(moved[0]).max() > 1e-4
    np.testing.assert_allclose(moved[1], moved[0], atol=1e-7)


@pytest.mark.slow
def test_microbatches_do_not_change_it(balanced):
    (whole, sums), (parts, of_parts) = gradient(balanced), gradient(actor(tokens=WIDTH))
    for name, leaf in whole.items():
        np.testing.assert_allclose(parts[name], leaf, rtol=2e-5, atol=2e-6, err_msg=name)
    np.testing.assert_allclose(of_parts["router/actor_loss"], sums["router/actor_loss"], rtol=1e-5)


def test_an_update_reports_what_routers_did(indifferent):
    metrics = indifferent.update([experience()], nll_objective, SFT(examples_per_update=16)).metrics
    assert 0 < metrics["router/actor_entropy"] < np.log(EXPERTS)
    assert 1 <= metrics["router/actor_imbalance"] <= EXPERTS / EACH


def test_a_model_without_experts_has_nothing_to_balance():
    with pytest.raises(ValueError, match=r"actor\.router_loss=0\.5 balances experts, but this model has no experts"):
        pool_rows(built(experts=0))

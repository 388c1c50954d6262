"""Steps on preference pairs: without a reference, and KTO."""

from dataclasses import replace
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from made_steps import done

from jaxrlhf.algos import pair_objective
from jaxrlhf.algos.objectives import TokenOutput
from jaxrlhf.batch import Pair
from jaxrlhf.config import (
    CPO,
    KTO,
    ORPO,
    Arithmetic,
    ArithmeticPairs,
    Config,
    FromScratch,
    Rewards,
    Rollout,
    SimPO,
)
from jaxrlhf.dataflows import dpo
from jaxrlhf.dataflows.step import StepInput


def config(algorithm, **changes) -> Config:
    settings = {"data": Arithmetic(), "rollout": Rollout(2, 3, max_prompt_tokens=4, max_response_tokens=6), **changes}
    return Config(name="zoo", algorithm=algorithm, steps=1, model=FromScratch(), **settings)


PAIRS = [Pair(n, "", (1, 2), solution_tokens=(3,) * (n + 1), rejected_tokens=(4,) * (4 - n)) for n in range(3)]


class Policies:
    """Log-probabilities that are known of every token, and the loss of an update by log-probabilities."""

    def __init__(self):
        self.seen = []

    def compute_log_prob(self, sequences, *, temperature):
        self.seen.append(sequences)
        return done(np.where(sequences.mask_BT, -0.1 * sequences.token_BT, np.nan).astype(np.float32))

    def compute_ref_log_prob(self, sequences, *, temperature):
        return done(np.where(sequences.mask_BT, -0.2, np.nan).astype(np.float32))

    def update_actor(self, minibatches, *, objective, settings, temperature):
        [self.batch] = minibatches

        def terms(logp_BT):
            logp_BT = jnp.where(self.batch.sequences.mask_BT, logp_BT, jnp.nan)
            experience = self.batch.weight_BT, self.batch.fields
            return objective(TokenOutput(logp_BT), self.batch.sequences.mask_BT, *experience, settings)

        assert objective is pair_objective
        self.loss = lambda logp_BT: terms(logp_BT).loss.sum()
        mask_BT = self.batch.sequences.mask_BT
        metrics = terms(-0.1 * self.batch.sequences.token_BT).metrics
        return done({name: float(value_BT.sum() / mask_BT.sum()) for name, value_BT in metrics.items()})


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


@pytest.mark.parametrize("algorithm", [SimPO(), CPO(nll_coefficient=0.5), ORPO(odds_coefficient=0.3), KTO(beta=0.2)])
def test_a_step_on_pairs_has_the_loss_as_written(algorithm):
    roles = SimpleNamespace(actor=Policies())
    if isinstance(algorithm, KTO):
        roles.reference = roles.actor  # others have none
    algorithm = replace(algorithm, pairs_per_update=3)
    settings = config(algorithm, data=ArithmeticPairs(), rewards=Rewards())
    assert ("reference" in settings.roles) == isinstance(algorithm, KTO)
    result = dpo.learn(roles, StepInput(settings, PAIRS, 0, {}), PAIRS)
    counts = np.array([[n + 1, 4 - n] for n in range(3)])
    logp = counts * np.array([-0.3, -0.4])

    def loss(logp):
        mean = logp / counts
        match algorithm:
            case SimPO():
                return -np.log(sigmoid(2 * (mean[:, 0] - mean[:, 1]) - 1)).mean()
            case CPO():
                likelihood = -0.5 * logp[:, 0].sum() / counts[:, 0].sum()
                return -np.log(sigmoid(0.1 * (logp[:, 0] - logp[:, 1]))).mean() + likelihood
            case ORPO():
                odds = np.log(np.exp(mean) / (1 - np.exp(mean)))
                likelihood = -logp[:, 0].sum() / counts[:, 0].sum()
                return -0.3 * np.log(sigmoid(odds[:, 0] - odds[:, 1])).mean() + likelihood
        good, bad = (logp + 0.2 * counts).T
        return np.concatenate([1 - sigmoid(0.2 * good), 1 - sigmoid(-0.2 * bad)]).mean()

    assert result.metrics["preference/loss"] == pytest.approx(loss(logp), rel=1e-5)
    slopes = np.zeros((3, 2))
    for place in np.ndindex(3, 2):
        moved = np.zeros((3, 2))
        moved[place] = 1e-5
        slopes[place] = (loss(logp + moved) - loss(logp - moved)) / 2e-5
    mask = roles.actor.batch.sequences.mask_BT
    np.testing.assert_array_equal(mask.sum(axis=1), counts.ravel())
    gradient_BT = jax.grad(roles.actor.loss)(jnp.asarray(-0.1 * roles.actor.batch.sequences.token_BT))
    np.testing.assert_allclose(gradient_BT, np.where(mask, slopes.reshape(-1, 1), 0), rtol=1e-3, atol=1e-6)
    if isinstance(algorithm, KTO):  # all answers are less likely than by the reference
        assert result.metrics["preference/distance"] == 0
        assert roles.actor.seen[0].token_BT[0].tolist()[:5] == [1, 2, 3, 3, 3], "the answer of another pair"

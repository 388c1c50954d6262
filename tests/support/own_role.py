"""A configuration file with a role of its own: a rater, trained beside the actor on a pool of its own.

The rater is a value model that learns the reward of a response from its last token; what it expects is subtracted
from what came, as in REINFORCE with a learned baseline.
"""

from dataclasses import dataclass, field, replace

import numpy as np
import tiny_runs

from jaxrlhf.algos import policy_objective, value_objective
from jaxrlhf.batching.transfer_protocol import THREE_D_PROTO, worker_method
from jaxrlhf.config import Config, Pool, RoleSpec, Training, ValueLoss
from jaxrlhf.config.algorithms.algorithm import PolicyGradient
from jaxrlhf.dataflows.batches.minibatches import minibatches, policy_minibatches
from jaxrlhf.dataflows.step import StepResult, value_of
from jaxrlhf.workers.trained_model import TrainedWorker


class Rater(TrainedWorker):
    """A value model whose value of a whole response is the reward that it expects."""

    @worker_method(THREE_D_PROTO)
    def compute_ratings(self, rollout):
        """`rating_BT` of every prefix."""
        return self.forward(rollout.sequences)

    @worker_method(THREE_D_PROTO, part="update")
    def update_rater(self, minibatches, *, objective, settings):
        """Update once per minibatch."""
        return {
            name.replace("value", "rating"): x
            for name, x in self.update(minibatches, objective, settings).metrics.items()
        }


def learn(roles, work, batch):
    rating_BT = roles.rater.compute_ratings(batch.rollout).result()
    rollout, scores = value_of(batch.rollout), value_of(batch.scores)
    sequences, score_B = rollout.sequences, scores.score_B
    advantage_BT = np.where(sequences.mask_BT, score_B[:, None] - rating_BT, 0.0).astype(np.float32)
    policy, metrics = policy_minibatches(work, sequences, rollout, advantage_BT, None, None)
    fields = {"returns": np.broadcast_to(score_B[:, None], rating_BT.shape).astype(np.float32), "old_value": rating_BT}
    rated = minibatches(work, sequences, fields, aggregation="token-mean")
    rater = roles.rater.update_rater(rated, objective=value_objective, settings=ValueLoss())
    actor = roles.actor.update_actor(policy, objective=policy_objective, settings=work.settings)
    return StepResult(metrics | batch.metrics, dict(work.state), updates=(rater, actor))


@dataclass(frozen=True)
class Rated(PolicyGradient):
    rater: Training = field(default_factory=tiny_runs.training)
    learn = learn

    def roles(self, training):
        return (*super().roles(training), RoleSpec("rater", Rater, head="value", training=self.rater))


def get_config() -> Config:
    return replace(
        tiny_runs.get_config(),
        algorithm=Rated(responses_per_update=16),
        steps=2,
        devices=None,
        pools=(Pool("policy", 1, ("actor", "reward")), Pool("rating", 1, ("rater",))),
    )

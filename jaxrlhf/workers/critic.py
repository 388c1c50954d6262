"""Critic: a model that estimates the value of every prefix."""

from collections.abc import Hashable, Sequence

from jaxrlhf.batch import Array, RolloutBatch, Sequences
from jaxrlhf.batching.ragged import Experience
from jaxrlhf.batching.transfer_protocol import THREE_D_PROTO, worker_method
from jaxrlhf.workers.model import Metrics, sequences_of
from jaxrlhf.workers.trained_model import Objective, TrainedWorker


class Critic(TrainedWorker):
    """Trained value model; also the worker class of the cost critic, and of reward models in training."""

    @worker_method(THREE_D_PROTO)
    def compute_values(self, rollout: RolloutBatch | Sequences) -> Array:
        """Return the value of the prefix before each token, `[B, T]`."""
        return self.forward(sequences_of(rollout))

    @worker_method(THREE_D_PROTO, part="update")
    def update_critic(self, minibatches: Sequence[Experience], *, objective: Objective, settings: Hashable) -> Metrics:
        """Update the value model once per minibatch."""
        return self.update(minibatches, objective, settings).metrics

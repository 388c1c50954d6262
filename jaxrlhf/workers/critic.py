"""The critic: a model that estimates the value of every prefix."""

from collections.abc import Hashable, Sequence

from jaxrlhf.batch import Array, Experience, RolloutBatch, Sequences
from jaxrlhf.batching.transfer_protocol import THREE_D_PROTO, worker_method
from jaxrlhf.workers.model import Metrics, sequences_of
from jaxrlhf.workers.trained_model import Objective, TrainedWorker


class Critic(TrainedWorker):
    """A value model; with it also the cost critic, and reward models while they are trained."""

    @worker_method(THREE_D_PROTO)
    def compute_values(self, rollout: RolloutBatch | Sequences) -> Array:
        """`value_BT` of the prefix before each token."""
        return self.forward(sequences_of(rollout))

    @worker_method(THREE_D_PROTO, part="update")
    def update_critic(self, minibatches: Sequence[Experience], *, objective: Objective, settings: Hashable) -> Metrics:
        """Update the values once per minibatch."""
        return self.update(minibatches, objective, settings).metrics

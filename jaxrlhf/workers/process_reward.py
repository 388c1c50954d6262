"""Implicit process reward: a language model whose log-ratio to the reference is the reward of each token (PRIME)."""

from collections.abc import Hashable, Sequence

from jaxrlhf.batch import Array, RolloutBatch
from jaxrlhf.batching.ragged import Experience
from jaxrlhf.batching.transfer_protocol import THREE_D_PROTO, worker_method
from jaxrlhf.workers.model import Metrics
from jaxrlhf.workers.trained_model import Objective, TrainedWorker


class ProcessReward(TrainedWorker):
    """Implicit process reward model; log-probabilities are at the rollout's temperature."""

    keeps_sampled = True

    @worker_method(THREE_D_PROTO)
    def compute_log_prob(self, rollout: RolloutBatch) -> Array:
        """Return log pi of every response token under the process reward model."""
        return self.log_prob(rollout)

    @worker_method(THREE_D_PROTO, part="update")
    def update_process_reward(
        self, minibatches: Sequence[Experience], *, objective: Objective, settings: Hashable
    ) -> Metrics:
        """Update the model once per minibatch."""
        return self.update(minibatches, objective, settings, temperature=self.setup.temperature).metrics

"""The reference: the frozen policy that the actor is kept close to."""

from dataclasses import replace

from jaxrlhf.batch import Array, Params, RolloutBatch, Sequences
from jaxrlhf.batching.transfer_protocol import THREE_D_PROTO, worker_method
from jaxrlhf.workers.actor import Actor
from jaxrlhf.workers.model import ModelWorker, sequences_of


class Reference(ModelWorker):
    """A policy that is not trained."""

    keeps_sampled = True

    @worker_method(THREE_D_PROTO)
    def compute_ref_log_prob(self, rollout: RolloutBatch | Sequences, *, temperature: float | None = None) -> Array:
        """log pi_ref of every response token. `temperature=None` is the rollout's."""
        return self.log_prob(rollout, temperature=temperature)


class FrozenActor:
    """A reference that is the actor's own frozen weights: it takes no memory for any.

    Args:
      adapters: Adapters that the actor started from; empty where it started from the weights alone.
    """

    def __init__(self, actor: Actor, adapters: Params) -> None:
        self.place = actor.place
        self._actor, self._adapters = actor, adapters

    @worker_method(THREE_D_PROTO)
    def compute_ref_log_prob(self, rollout: RolloutBatch | Sequences, *, temperature: float | None = None) -> Array:
        """log pi_ref of every response token. `temperature=None` is the rollout's."""
        # Other weights than those that sampled; their routers choose for themselves.
        sequences = replace(sequences_of(rollout), choice_BTLk=None)
        return self._actor.log_prob(sequences, temperature=temperature, adapters=self._adapters)

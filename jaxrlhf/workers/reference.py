"""Reference policy: the frozen policy that the actor is kept close to."""

from dataclasses import replace

from jaxrlhf.batch import ROUTING, Array, Params, RolloutBatch, Sequences
from jaxrlhf.batching.transfer_protocol import THREE_D_PROTO, worker_method
from jaxrlhf.workers.actor import Actor
from jaxrlhf.workers.model import ModelWorker, sequences_of


class Reference(ModelWorker):
    """Frozen policy that scores the actor's tokens."""

    keeps_sampled = True

    @worker_method(THREE_D_PROTO)
    def compute_ref_log_prob(self, rollout: RolloutBatch | Sequences, *, temperature: float | None = None) -> Array:
        """Return log pi_ref of every response token. `temperature=None` takes the rollout's temperature."""
        return self.log_prob(rollout, temperature=temperature)


class SharedWeightsReference:
    """Reference policy that reads the actor's own frozen weights, so it needs no memory for weights.

    Args:
      adapters: Adapters that the actor started from; empty if the actor started from the weights alone.
    """

    def __init__(self, actor: Actor, adapters: Params) -> None:
        self.place = actor.place
        self._actor, self._adapters = actor, adapters

    @worker_method(THREE_D_PROTO)
    def compute_ref_log_prob(self, rollout: RolloutBatch | Sequences, *, temperature: float | None = None) -> Array:
        """Return log pi_ref of every response token. `temperature=None` takes the rollout's temperature."""
        # No router replay: these weights did not sample the tokens, so their routers choose the experts.
        sequences = sequences_of(rollout)
        recorded = {name: column for name, column in sequences.recorded.items() if name != ROUTING}
        sequences = replace(sequences, recorded=recorded)
        return self._actor.log_prob(sequences, temperature=temperature, adapters=self._adapters)

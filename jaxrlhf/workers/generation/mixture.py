"""Generation from a mixture of the policy and the reference."""

from dataclasses import dataclass
from typing import Any

from jaxrlhf.batch import Params
from jaxrlhf.engine.rollout_engine import PolicyWeights
from jaxrlhf.models.mixture import GeometricMixture
from jaxrlhf.sharding.submesh import hand_over
from jaxrlhf.workers.sampler import Sampler


@dataclass(frozen=True, kw_only=True)
class MixtureSampler(Sampler):
    """Sampler of a mixture of the policy and the reference; its `config` is the mixture's.

    Attributes:
      reference: Weights of the reference in the generation layout, over the whole mesh.
    """

    reference: Params

    def load(self, weights: Any, version: int, *, donated: Any) -> None:
        """Set the engine's weights from the policy's weights, given as in `Sampler.load`; no weights are deleted."""
        assert isinstance(self.config, GeometricMixture)
        policy, reference = (hand_over(tree, self.submesh) for tree in (weights["parameters"], self.reference))
        self.engine.update_weights(PolicyWeights(self.config, self.config.joined(policy, reference), version))

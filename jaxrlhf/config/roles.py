"""Roles of a dataflow: declarations of the models that a step calls."""

from dataclasses import dataclass
from typing import Literal

from jaxrlhf.config.named_functions import imported
from jaxrlhf.config.placement import ROLLOUT
from jaxrlhf.config.sources import Pretrained
from jaxrlhf.config.training import Training


@dataclass(frozen=True)
class RoleSpec:
    """Role of a dataflow: its worker class, initial model and training.

    Attributes:
      name: Name of the role in a dataflow, such as `critic` in `roles.critic`.
      worker: Class with the worker methods that a dataflow calls, or its name as `module:class`. A trained model is a
        `TrainedWorker`, a frozen model a `ModelWorker`.
      head: Head applied to the model's last hidden state; None is a role without a model.
      training: Training settings; None is a frozen model. To change the role's layout, a plan changes the field of the
        algorithm that has the role's name.
      model: Checkpoint that the model starts from; None starts from a copy of the policy.
      max_expansion: Largest number of tokens that the model's own tokenizer makes of one token of the policy, for
        models whose worker tokenizes texts again (`ModelSetup.tokenizers`). None reads the policy's tokens.
    """

    name: str
    worker: type | str
    head: Literal["lm", "value"] | None = "lm"
    training: Training | None = None
    model: Pretrained | None = None
    max_expansion: float | None = None

    @property
    def worker_class(self) -> type:
        """Worker class.

        Raises:
          Refusal: The class does not exist, or its module cannot be imported.
        """
        return imported(self.worker, f"the worker of role {self.name!r}")


def actor(training: Training) -> RoleSpec:
    """Return the role of the policy, which is trained and generates."""
    return RoleSpec("actor", "jaxrlhf.workers.actor:Actor", training=training)


def reference(model: Pretrained | None = None) -> RoleSpec:
    """Return the role of the frozen reference policy, or of another model that judges the actor's tokens."""
    return RoleSpec("reference", "jaxrlhf.workers.reference:Reference", model=model)


def critic(training: Training, model: Pretrained | None = None, *, name: str = "critic") -> RoleSpec:
    """Return the role of a model that estimates the value of every prefix."""
    return RoleSpec(name, "jaxrlhf.workers.critic:Critic", "value", training, model)


def process_reward(training: Training) -> RoleSpec:
    """Return the role of a model whose log-ratio to the reference is the reward of each token."""
    return RoleSpec("process_reward", "jaxrlhf.workers.process_reward:ProcessReward", training=training)


REWARD = RoleSpec("reward", "jaxrlhf.workers.reward:Reward", head=None)
"""Role of the parts of `Config.rewards`, which score responses."""

ROLLOUT_COPY = RoleSpec(ROLLOUT, "jaxrlhf.workers.generation.worker:RolloutWorker", head=None)
"""Role of the actor's copy on another pool, which generates there."""

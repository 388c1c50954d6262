"""Roles of a dataflow: every model that a step calls, declared once."""

from dataclasses import dataclass
from typing import Literal

from jaxrlhf.config.named_functions import imported
from jaxrlhf.config.placement import ROLLOUT
from jaxrlhf.config.sources import Pretrained
from jaxrlhf.config.training import Training


@dataclass(frozen=True)
class RoleSpec:
    """One role: what computes it, what it starts from and how it is trained.

    Attributes:
      name: What a dataflow calls it, as in `roles.critic`.
      worker: Class whose worker methods a dataflow calls, or its name as `module:class`. A trained model is a
        `TrainedWorker`, a frozen one a `ModelWorker`.
      head: Head that the model's last hidden state is read with; None is a role without a model of its own.
      training: Settings of its training; None is a frozen model. A plan that lays the role out anew changes the
        algorithm's field of the role's name.
      model: Checkpoint that it starts from; None starts it as a copy of the policy.
      room: Tokens at most that the model's own tokenizer makes of one of the policy's, for models that read texts in
        theirs (`ModelSetup.retokenizer`); None reads the policy's tokens, and has its tokenizer.
    """

    name: str
    worker: type | str
    head: Literal["lm", "value"] | None = "lm"
    training: Training | None = None
    model: Pretrained | None = None
    room: float | None = None

    @property
    def worker_class(self) -> type:
        """The class itself.

        Raises:
          Refusal: There is no such class, or its module does not import.
        """
        return imported(self.worker, f"the worker of role {self.name!r}")


def actor(training: Training) -> RoleSpec:
    """The policy, which is trained and generates."""
    return RoleSpec("actor", "jaxrlhf.workers.actor:Actor", training=training)


def reference(model: Pretrained | None = None) -> RoleSpec:
    """The frozen policy that the actor is kept close to, or another model that judges its tokens."""
    return RoleSpec("reference", "jaxrlhf.workers.reference:Reference", model=model)


def teacher(model: Pretrained, *, room: float) -> RoleSpec:
    """A frozen policy with a tokenizer of its own, which judges spans of text."""
    return RoleSpec("reference", "jaxrlhf.workers.reference:Teacher", model=model, room=room)


def critic(training: Training, model: Pretrained | None = None, *, name: str = "critic") -> RoleSpec:
    """A model that estimates the value of every prefix."""
    return RoleSpec(name, "jaxrlhf.workers.critic:Critic", "value", training, model)


def process_reward(training: Training) -> RoleSpec:
    """A model whose log-ratio to the reference is the reward of each token."""
    return RoleSpec("process_reward", "jaxrlhf.workers.process_reward:ProcessReward", training=training)


REWARD = RoleSpec("reward", "jaxrlhf.workers.reward:Reward", head=None)
"""The parts of `Config.rewards`, which score responses."""

ROLLOUT_COPY = RoleSpec(ROLLOUT, "jaxrlhf.workers.generation.worker:RolloutWorker", head=None)
"""The actor's copy on another pool, which generates there."""

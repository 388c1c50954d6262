"""Roles on one resource pool: model, mesh, training settings, execution and weights of each role."""

import math
from collections.abc import Collection, Sequence
from dataclasses import replace

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from transformers import PreTrainedTokenizerBase

from jaxrlhf.batching.microbatch import packed_row_tokens
from jaxrlhf.config import Config, Pretrained, Refusal, RoleSpec, Training
from jaxrlhf.data.tokenizer import load_tokenizer
from jaxrlhf.models.attention.kernel_choice import choose_execution
from jaxrlhf.models.causal_lm import AnyModel
from jaxrlhf.models.execution import Execution
from jaxrlhf.models.from_config import model_config
from jaxrlhf.models.huggingface.config import read_stop_tokens
from jaxrlhf.models.huggingface.hub import resolve
from jaxrlhf.models.vision.reader import image_reader
from jaxrlhf.models.vision.rows import Pixels, no_pixels
from jaxrlhf.sharding.mesh import TRAINING_AXES, factored_mesh
from jaxrlhf.sharding.pool import ResourcePool
from jaxrlhf.workers.role_weights import RoleWeights


def compute_dtype(config: Config, devices: Sequence[jax.Device]) -> jnp.dtype:
    """Return the dtype of activations and of generation weights."""
    if config.compute_dtype == "auto":
        return jnp.dtype(jnp.float32 if devices[0].platform == "cpu" else jnp.bfloat16)
    return jnp.dtype(config.compute_dtype)


class PoolRoles:
    """Roles on one pool, as configured.

    Args:
      roles: Names of the roles that are placed on the pool in any phase.

    Attributes:
      reader: Image reader for prompts; None if the policy reads text only.
      width: T, number of columns of a rollout's arrays.
    """

    def __init__(
        self, config: Config, tokenizer: PreTrainedTokenizerBase, pool: ResourcePool, roles: Collection[str]
    ) -> None:
        self.config, self.tokenizer, self.pool, self.roles = config, tokenizer, pool, tuple(roles)
        self.model = model_config(config.model, tokenizer)
        check_vocabulary(tokenizer, self.model, role="actor")
        self.reader = image_reader(config, self.model, tokenizer)
        self.pixels: Pixels = no_pixels if self.reader is None else self.reader.patches
        self.dtype = compute_dtype(config, pool.devices)
        self.width = config.rollout.width

    @property
    def trained(self) -> list[str]:
        """Names of the trained roles."""
        return [role for role in self.roles if role in self.config.trained]

    @property
    def frozen(self) -> list[str]:
        """Names of the roles with a frozen model."""
        return [role for role in self.roles if role not in self.config.trained and self.spec(role).head is not None]

    @property
    def slots(self) -> int:
        """Responses decoded at once on the whole pool; a pool that lost devices keeps the number per device."""
        rollout, there = self.config.rollout, len(self.pool.devices)
        configured = next((pool.devices for pool in self.config.pools if pool.name == self.pool.name), there)
        return (rollout.slots or rollout.responses_per_step) * there // max(there, configured)

    def spec(self, role: str) -> RoleSpec:
        """Return the specification of a role."""
        return self.config.all_roles[role]

    def mesh(self, role: str) -> Mesh:
        """Return the training mesh of a role."""
        return factored_mesh(self.training(role).layout, self.pool.devices, role=role)

    def execution(self, role: str, *, remat: str = "none") -> Execution:
        """Return the execution of a role in its training layout; `remat` is resolved (not `auto`)."""
        how = {**TRAINING_AXES, "remat": remat != "none", "wanted": self.config.attention}
        execution = choose_execution(self.model_of(role), self.dtype, self.mesh(role), **how)
        return replace(execution, offloads=remat == "offload")

    def model_of(self, role: str) -> AnyModel:
        """Return the model configuration of a role."""
        own = self.spec(role).model
        return self.model if own is None else model_config(own, self.tokenizer)

    def tokenizer_of(self, role: str) -> PreTrainedTokenizerBase:
        """Return the tokenizer of a role's model: its own if the role tokenizes texts again, else the policy's."""
        spec = self.spec(role)
        if spec.max_expansion is None or spec.model is None:
            return self.tokenizer
        return load_tokenizer(str(resolve(spec.model.path)))

    def tokenizers(self, role: str) -> tuple[PreTrainedTokenizerBase, PreTrainedTokenizerBase] | None:
        """Return the tokenizers of the policy and of a role's model; None if they are the same."""
        own = self.tokenizer_of(role)
        return None if own is self.tokenizer else (self.tokenizer, own)

    def widest_row(self, role: str) -> int:
        """Return the number of tokens that a packed row of a role has space for."""
        return self.config.algorithm.together * self.expanded(self.width, role)

    def expanded(self, tokens: int, role: str) -> int:
        """Return the number of tokens of a role's own tokenizer to reserve for `tokens` tokens of the policy."""
        return math.ceil(tokens * (self.spec(role).max_expansion or 1.0))

    def training(self, role: str) -> Training:
        """Return the training settings of a role; a frozen role has the actor's, except for the reference's layout.

        A frozen role has no token budget of its own. If the actor's budget holds less than one row on each of the
        role's devices, the budget is raised to one row.
        """
        if (own := self.spec(role).training) is not None:
            return own
        actor = self.config.actor
        layout = (self.config.reference_layout if role == "reference" else None) or actor.layout
        shards = len(self.pool.devices) // (layout.stage * layout.tensor * layout.context)
        least = shards * packed_row_tokens(self.widest_row(role), budget=0, token_shards=layout.context)
        return replace(actor, layout=layout, tokens_per_microbatch=max(actor.tokens_per_microbatch, least))

    def weights(self, role: str) -> RoleWeights:
        """Return the shapes, dtypes and shardings of a role's weights."""
        spec = self.spec(role)
        assert spec.head is not None, f"{role} has no weights"
        copies = spec.training is not None or spec.model is None  # else no copy of the actor, so no adapters
        lora = self.training(role).lora if copies else None
        return RoleWeights(role, self.model_of(role), spec.head, self.dtype, lora)


def check_vocabulary(tokenizer: PreTrainedTokenizerBase, model: AnyModel, *, role: str) -> None:
    """Raise `Refusal` if the tokenizer has ids that the model has no embedding for."""
    last = max(tokenizer.get_vocab().values())  # may exceed the number of tokens, as ids may have gaps
    if last >= model.vocab_size:
        raise Refusal(
            f"{role}: the tokenizer has ids up to {last}, but the model embeds {model.vocab_size} tokens; use the "
            "tokenizer of the model"
        )


def check_same_tokens(tokenizer: PreTrainedTokenizerBase, path: str, *, role: str) -> None:
    """Raise `Refusal` if the checkpoint at a path has another vocabulary than the policy's tokenizer."""
    if load_tokenizer(str(resolve(path))).get_vocab() != tokenizer.get_vocab():
        raise Refusal(
            f"{role}_model={path!r} has a different tokenizer from the policy, so it cannot score the policy's "
            "tokens; choose a model with the same tokenizer"
        )


def stop_tokens(config: Config, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Return the stop token ids: the tokenizer's EOS, those of the checkpoint's files, and single-token stop texts."""
    if config.rollout.sampling.ignore_eos:
        return ()
    stops = [tokenizer.eos_token_id]
    if isinstance(config.model, Pretrained):
        stops += read_stop_tokens(config.model.path)
    for text in config.rollout.sampling.stop_tokens:
        ids = tokenizer.encode(text, add_special_tokens=False)
        stops += ids if len(ids) == 1 else []
    return tuple(dict.fromkeys(stops))


def stop_texts(config: Config, tokenizer: PreTrainedTokenizerBase) -> tuple[str, ...]:
    """Return the configured stop texts of several tokens, which are searched in the sampled text."""
    texts = config.rollout.sampling.stop_tokens
    return tuple(text for text in texts if len(tokenizer.encode(text, add_special_tokens=False)) > 1)

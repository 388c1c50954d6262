"""Builds the groups of a run: models on meshes over a resource pool."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from transformers import PreTrainedTokenizerBase

from jaxrlhf.architecture import Head, ModelConfig
from jaxrlhf.batch import Params
from jaxrlhf.checkpoint import Item
from jaxrlhf.config import PPO, Config, FromScratch, Model, ModelReward, Optimizer, Pretrained, Training
from jaxrlhf.engine import Engine
from jaxrlhf.models.hf_config import read_config, read_stop_tokens, scratch_config
from jaxrlhf.models.hf_load import load_params
from jaxrlhf.models.parameters import init_params, param_dims, param_shapes
from jaxrlhf.parallel import SLOT_AXES, HybridEngine, ResourcePool, factored_mesh, generation_mesh
from jaxrlhf.rewards.scorer import Scorer
from jaxrlhf.workers.group import Group, Lane, Timeline
from jaxrlhf.workers.model import Progress, TrainedWorker, layout_of
from jaxrlhf.workers.roles import Actor, Critic, Reference, Reward

_VOCABULARY_MULTIPLE = 64
"""From-scratch vocabularies are rounded up to this, so that they split over devices."""


def compute_dtype(config: Config, devices: Sequence[jax.Device]) -> jnp.dtype:
    """Dtype of activations and of the generation copy."""
    if config.compute_dtype == "auto":
        return jnp.dtype(jnp.float32 if devices[0].platform == "cpu" else jnp.bfloat16)
    return jnp.dtype(config.compute_dtype)


def model_config(model: Model, tokenizer: PreTrainedTokenizerBase) -> ModelConfig:
    """The decoder that a run trains."""
    if isinstance(model, FromScratch):
        rounded = -(-len(tokenizer) // _VOCABULARY_MULTIPLE) * _VOCABULARY_MULTIPLE
        return scratch_config(model, vocab_size=rounded)
    return read_config(model.path)


def check_vocabulary(tokenizer: PreTrainedTokenizerBase, model: ModelConfig, *, role: str) -> None:
    """Raise `ValueError` if the tokenizer has ids that the model has no embedding for."""
    if len(tokenizer) > model.vocab_size:
        raise ValueError(
            f"{role}: the tokenizer has {len(tokenizer)} tokens and the model embeds {model.vocab_size}; "
            f"use the tokenizer that belongs to the model"
        )


def initial_params(model: Model, config: ModelConfig, head: Head, layout: Any, *, seed: int) -> Params:
    """Float32 parameters as the run starts with them, in the given layout."""
    if isinstance(model, FromScratch):
        build = jax.jit(lambda key: init_params(config, head, key), out_shardings=layout)
        return build(jax.random.key(seed))
    return load_params(model.path, config, head, layout)


def stop_tokens(config: Config, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """The tokenizer's EOS, those of the checkpoint's generation_config.json, and the configured texts.

    Raises:
      ValueError: A configured text is not one token.
    """
    stops = [tokenizer.eos_token_id]
    if isinstance(config.model, Pretrained):
        stops += read_stop_tokens(config.model.path)
    for text in config.rollout.sampling.stop_tokens:
        ids = tokenizer.encode(text, add_special_tokens=False)
        if len(ids) != 1:
            raise ValueError(
                f"rollout.sampling.stop_tokens: {text!r} is {len(ids)} tokens in this tokenizer; a stop token is one"
            )
        stops += ids
    return tuple(dict.fromkeys(stops))


class Roles:
    """The groups that a step calls, by role.

    Args:
      workers: By role.
      lanes: Of the pool that each role is placed on.

    Attributes:
      timeline: When each call ran.
    """

    actor: Group
    critic: Group
    reference: Group
    reward: Group

    def __init__(self, workers: Mapping[str, Any], lanes: Mapping[str, Lane], timeline: Timeline) -> None:
        self.timeline = timeline
        self._workers, self._lanes = dict(workers), set(lanes.values())
        for role, worker in workers.items():
            setattr(self, role, Group(role, worker, lanes[role]))

    def _trained(self) -> list[Any]:
        return [worker for worker in self._workers.values() if isinstance(worker, TrainedWorker)]

    def items(self) -> dict[str, Item]:
        """Every array that a checkpoint of the run holds."""
        return {name: item for worker in self._trained() for name, item in worker.items().items()}

    def counters(self) -> dict[str, int]:
        """Updates made so far, by role, and the policy's version."""
        return {worker.role: worker.updates for worker in self._trained()} | {"version": self._workers["actor"].version}

    def load_counters(self, counters: Mapping[str, int]) -> None:
        """Take over a checkpoint's counters."""
        for worker in self._trained():
            worker.updates = counters[worker.role]
        self._workers["actor"].version = counters["version"]

    def close(self) -> None:
        """Wait for running calls and let the threads end."""
        for lane in self._lanes:
            lane.close()


class Builder:
    """Builds roles on one pool; the engine is built once and serves every stage of a run.

    Args:
      config: Of the run.
      tokenizer: The policy's.
      pool: Where all roles are placed.
      progress: Told how far generation and rewards are.
      reward_output: File that takes what reward functions print; None is the standard error stream.
    """

    def __init__(
        self,
        config: Config,
        tokenizer: PreTrainedTokenizerBase,
        pool: ResourcePool,
        *,
        progress: Progress,
        reward_output: Path | None = None,
    ) -> None:
        self.config, self.tokenizer, self.pool, self._progress = config, tokenizer, pool, progress
        self.model = model_config(config.model, tokenizer)
        check_vocabulary(tokenizer, self.model, role="actor")
        self.dtype = compute_dtype(config, pool.devices)
        rollout = config.rollout
        self.width = rollout.max_prompt_tokens + rollout.max_response_tokens
        self.mesh = factored_mesh(config.actor.layout, pool.devices)
        self.layout = layout_of(self.mesh, self.model, "lm", role="actor")
        dims = param_dims(self.model, "lm")
        generation = generation_mesh(config.actor.layout, pool.devices)
        shapes = param_shapes(self.model, "lm", jnp.float32)
        self.hybrid = HybridEngine.by_rules(self.mesh, generation, dims, shapes, dtype=self.dtype)
        self.engine = Engine(
            self.model,
            generation,
            slots=rollout.slots or rollout.responses_per_step,
            max_prompt_tokens=rollout.max_prompt_tokens,
            max_response_tokens=rollout.max_response_tokens,
            stop_tokens=stop_tokens(config, tokenizer),
            decode_tokens_per_dispatch=rollout.decode_tokens_per_dispatch,
            dtype=self.dtype,
            slot_axes=SLOT_AXES,
            kv_head_axis="tensor",
        )
        models = self._reward_models()
        self.scorer = Scorer(config.rewards, models=models, output=reward_output)
        # Functions score beside the models' work; a reward model computes on the pool's devices, in turn.
        self._reward_lane = "pool" if models else "reward"

    def _reward_models(self) -> dict[str, Callable[..., Any]]:
        parts = [part for part in self.config.rewards.parts if isinstance(part, ModelReward)]
        if not parts:
            return {}
        from jaxrlhf.workers.score_model import ScoreModel

        return {part.path: ScoreModel(part.path, mesh=self.mesh, dtype=self.dtype).score for part in parts}

    def initial_actor(self) -> Params:
        """The policy's parameters before any training."""
        return initial_params(self.config.model, self.model, "lm", self.layout, seed=self.config.seed)

    def roles(
        self, names: Sequence[str], start: Params, *, optimizer: Optimizer, total_updates: int, seed: int
    ) -> Roles:
        """The named groups, all starting from the policy `start`, which the actor takes over and trains.

        Args:
          optimizer: Of the actor.
          total_updates: Of the stage.
        """
        timeline = Timeline()
        lanes = {"pool": Lane("pool", timeline), "reward": Lane("reward", timeline)}
        make = {
            "actor": lambda: self._actor(start, optimizer, total_updates),
            "critic": lambda: self._critic(start, total_updates, seed),
            "reference": lambda: self._reference(start),
            "reward": lambda: Reward(self.scorer, self._decode, self._progress),
        }
        # The actor comes last: the others copy the policy that it takes over.
        workers = {name: make[name]() for name in sorted({*names, "reward"}, key=lambda name: name == "actor")}
        placement = dict.fromkeys(workers, lanes["pool"]) | {"reward": lanes[self._reward_lane]}
        return Roles(workers, placement, timeline)

    def _decode(self, tokens: Sequence[int]) -> str:
        return str(self.tokenizer.decode(list(tokens), skip_special_tokens=True))

    def _actor(self, start: Params, optimizer: Optimizer, total_updates: int) -> Actor:
        return Actor(
            "actor",
            self.model,
            "lm",
            self.mesh,
            start,
            self.config.actor,
            width=self.width,
            dtype=self.dtype,
            optimizer=optimizer,
            total_updates=total_updates,
            engine=self.engine,
            hybrid=self.hybrid,
            temperature=self.config.rollout.sampling.temperature,
            progress=self._progress,
        )

    def _reference(self, start: Params) -> Reference:
        return Reference(
            "reference",
            self.model,
            "lm",
            self.mesh,
            _copy(start, self.layout, self.hybrid.generation_shapes),
            self.config.actor,
            width=self.width,
            dtype=self.dtype,
            progress=self._progress,
            temperature=self.config.rollout.sampling.temperature,
        )

    def _critic(self, start: Params, total_updates: int, seed: int) -> Critic:
        settings = self.config.algorithm
        assert isinstance(settings, PPO)
        training: Training = settings.critic
        mesh: Mesh = factored_mesh(training.layout, self.pool.devices, role="critic")
        own = settings.critic_model
        config = self.model if own is None else model_config(own, self.tokenizer)
        check_vocabulary(self.tokenizer, config, role="critic")
        layout = layout_of(mesh, config, "value", role="critic")
        if own is None:
            head = jnp.zeros(config.hidden_size, jnp.float32)
            params = _copy({**start, "head": head}, layout, param_shapes(config, "value", jnp.float32))
        else:
            params = initial_params(own, config, "value", layout, seed=seed)
        return Critic(
            "critic",
            config,
            "value",
            mesh,
            params,
            training,
            width=self.width,
            dtype=self.dtype,
            progress=self._progress,
            optimizer=training.optimizer,
            total_updates=total_updates,
        )

    def close(self) -> None:
        """End the reward workers."""
        self.scorer.close()


def _copy(params: Params, layout: Any, shapes: Any) -> Params:
    """New buffers in the given layout and dtypes: what is trained is donated, so nothing is shared."""

    def copy(tree: Params) -> Params:
        return jax.tree.map(lambda x, shape: jnp.array(x, shape.dtype, copy=True), tree, shapes)

    return jax.jit(copy, out_shardings=layout)(params)

"""Builds the workers of one process: its share of models on meshes over a resource pool."""

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from transformers import PreTrainedTokenizerBase

from jaxrlhf.batch import Params
from jaxrlhf.batching.transfer_protocol import Place
from jaxrlhf.config import CRITICS, ROLLOUT, Config, Lora, ModelReward, Pretrained, Training, offloaded
from jaxrlhf.data import decoder
from jaxrlhf.engine import Engine
from jaxrlhf.models.attention.attention import Attention
from jaxrlhf.models.attention.kernel_choice import choose_attention
from jaxrlhf.models.causal_lm import AnyModel
from jaxrlhf.models.config import Head
from jaxrlhf.models.from_config import model_config
from jaxrlhf.models.huggingface.config import read_config
from jaxrlhf.models.lora.lora import adapter_shapes
from jaxrlhf.models.parameters import param_dims, param_shapes
from jaxrlhf.resharding.hybrid import HybridEngine
from jaxrlhf.resharding.transfer import Exchange
from jaxrlhf.rewards.scorer import Scorer
from jaxrlhf.sharding.mesh import (
    BATCH_AXES,
    EXPERT_AXES,
    SLOT_AXES,
    STAGE_AXES,
    TENSOR_AXES,
    factored_mesh,
    generation_mesh,
    replica_mesh,
)
from jaxrlhf.sharding.pool import ResourcePool
from jaxrlhf.sharding.rules import GENERATE, cast_shapes, check_divisible, laid_out, shardings
from jaxrlhf.sharding.submesh import local_island
from jaxrlhf.workers.model import Progress
from jaxrlhf.workers.remat import choose_remat
from jaxrlhf.workers.roles import Actor, Critic, FrozenActor, ProcessReward, Reference, Reward
from jaxrlhf.workers.sampler import Ends, Generator, Sampler
from jaxrlhf.workers.start import check_starts, copied, initial_adapters, initial_params, quantized_each, saved_params
from jaxrlhf.workers.tokenizer_checks import check_same_tokens, check_vocabulary, stop_tokens
from jaxrlhf.workers.weights import adapter_layout, check_tiles, frozen, held, policy_dims, policy_shapes


def compute_dtype(config: Config, devices: Sequence[jax.Device]) -> jnp.dtype:
    """Dtype of activations and of the generation copy."""
    if config.compute_dtype == "auto":
        return jnp.dtype(jnp.float32 if devices[0].platform == "cpu" else jnp.bfloat16)
    return jnp.dtype(config.compute_dtype)


@dataclass(frozen=True)
class Stage:
    """One stage of a run, as the processes that compute it are told.

    Attributes:
      config: Of the stage.
      roles: That the stage calls.
      total_updates: Over which learning rates decay.
      policy: Folder of a checkpoint's actor to start from; None is the configuration's model.
      adapters: Idem of its adapters; None is as the configuration starts them.
    """

    config: Config
    roles: tuple[str, ...]
    total_updates: int
    policy: Path | None = None
    adapters: Path | None = None


class Builder:
    """Builds roles on one pool; the engine is built once and serves every stage of a run.

    Args:
      config: Of the run.
      tokenizer: The policy's.
      pool: Where the roles are placed.
      roles: That are placed on the pool in any stage.
      rank: Of this process among those that share the pool, and their number.
      progress: Told how far generation and rewards are.
      reward_output: File that takes what reward functions print; None is the standard error stream.
      address: Under which other hosts reach this one.
      ends: Shared by the builders of this process.
    """

    def __init__(
        self,
        config: Config,
        tokenizer: PreTrainedTokenizerBase,
        pool: ResourcePool,
        roles: Collection[str],
        *,
        rank: tuple[int, int],
        progress: Progress,
        reward_output: Path | None = None,
        address: str = "127.0.0.1",
        ends: Ends | None = None,
    ) -> None:
        self.config, self.tokenizer, self.pool, self._progress = config, tokenizer, pool, progress
        self.rank, self._ends = rank, ends or Ends()
        carrier = "direct" if config.cluster is None else config.cluster.weights
        self._exchange, self._reward_output = Exchange(address, carrier=carrier), reward_output
        self.model = model_config(config.model, tokenizer)
        check_vocabulary(tokenizer, self.model, role="actor")
        self.dtype = compute_dtype(config, pool.devices)
        self.width = config.rollout.max_prompt_tokens + config.rollout.max_response_tokens
        self.shapes = param_shapes(self.model, "lm", jnp.float32)
        layout = config.actor.layout
        apart = any(ROLLOUT in pool.roles for pool in config.pools)
        self.hybrid: HybridEngine | None = None
        self.sampler: Sampler | None = None
        if "actor" in roles:
            mesh = factored_mesh(layout, pool.devices)
            held(mesh, self.model, "lm", config.actor.lora, dtype=self.dtype, role="actor")  # or it is refused here
            if not apart:
                generation, dims = generation_mesh(layout, pool.devices), policy_dims(self.model, config.actor.lora)
                self.sampler = self._sampler(generation)
                shapes = policy_shapes(self.model, config.actor.lora, dtype=self.dtype)
                self.hybrid = HybridEngine.by_rules(mesh, generation, dims, shapes, dtype=self.dtype)
        if ROLLOUT in roles:
            self.sampler = self._sampler(
                replica_mesh(config.actor.layout, pool.devices, role=f"rollout on pool {pool.name!r}")
            )
        trained = config.algorithm.training(config).keys() & set(roles)
        self.remat = {role: choose_remat(self, role, roles) for role in sorted(trained)}
        self._scorer: Scorer | None = None
        if "reward" in roles and not config.rewards.by_model:
            self.scorer()  # now, so that a function that does not load is refused before anything compiles
        for part in config.rewards.parts if "reward" in roles else ():
            if isinstance(part, ModelReward):
                read_config(part.path)  # idem; weights are loaded with those of the other models

    def _sampler(self, mesh: Mesh) -> Sampler:
        config, rollout = self.config, self.config.rollout
        check_divisible(mesh, param_dims(self.model, "lm"), self.shapes, GENERATE, role="generation")
        check_tiles(mesh, self.model, "lm", config.actor.lora, GENERATE, role="generation")
        island = local_island(mesh)
        share = island.size / mesh.size
        engine = Engine(
            self.model,
            island,
            slots=math.ceil((rollout.slots or rollout.responses_per_step) * share),
            prompts=math.ceil(rollout.prompts_per_step * share),
            max_prompt_tokens=rollout.max_prompt_tokens,
            max_response_tokens=rollout.max_response_tokens,
            stop_tokens=stop_tokens(config, self.tokenizer),
            decode_tokens_per_dispatch=rollout.decode_tokens_per_dispatch,
            records_routing=rollout.replay_routing,
            dtype=self.dtype,
            slot_axes=SLOT_AXES,
            kv_head_axis="tensor",
            stage_axis="stage",
            attention=choose_attention(
                self.model,
                self.dtype,
                island,
                row_axes=SLOT_AXES,
                head_axes=("tensor",),
                expert_axes=EXPERT_AXES,
                stage_axes=("stage",),
                decodes=True,
                wanted=config.attention,
                cache=rollout.cache,
            ),
        )
        return Sampler(engine, mesh, island, self.width, self._progress, self._ends)

    def scorer(self) -> Scorer:
        """Of this process alone, made once: reward models are on its own devices."""
        if self._scorer is not None:
            return self._scorer
        models: dict[str, Callable[..., Any]] = {}
        parts = [part for part in self.config.rewards.parts if isinstance(part, ModelReward)]
        if parts:
            from jaxrlhf.workers.score_model import ScoreModel

            devices = [device for device in self.pool.devices if device.process_index == jax.process_index()]
            offload, attention = offloaded(self.config.offload, "reward", "parameters"), self.config.attention
            for part in parts:
                mesh = factored_mesh(part.layout, devices, role="reward")
                model = ScoreModel(part.path, mesh=mesh, dtype=self.dtype, offload=offload, attention=attention)
                models[part.path] = model.score
        self._scorer = Scorer(self.config.rewards, models=models, output=self._reward_output)
        return self._scorer

    def workers(self, stage: Stage, roles: Collection[str]) -> dict[str, Any]:
        """The named roles, all starting from the policy that the stage starts from."""
        check_starts(self.config, policy=stage.policy)
        workers: dict[str, Any] = {}
        if ROLLOUT in roles:
            assert self.sampler is not None
            layout = self.generation_layout(self.sampler.mesh)
            workers[ROLLOUT] = Generator(self.sampler, layout, self.generation_shapes(), self._exchange)
        if "reward" in roles:
            reward = Reward(self.scorer(), Place.alone(*self.rank), decoder(self.tokenizer), self._progress)
            workers["reward"], self._ends.listen = reward, reward.listen
        if not set(roles) - {ROLLOUT, "reward"}:
            return workers
        frozen_actor = stage.config.reference_is_frozen_actor
        copying = {"process_reward", *CRITICS, *([] if frozen_actor else ["reference"])}
        start = self._policy(stage, roles, copied=bool(copying & set(roles)))
        if "reference" in roles and not frozen_actor:
            workers["reference"] = self._reference(start)
        for role in CRITICS:
            if role in roles:
                workers[role] = self._critic(role, start, stage)
        if "process_reward" in roles:
            workers["process_reward"] = self._process_reward(start, stage)
        if "actor" in roles:  # last: the others copy the policy that it takes over
            workers["actor"] = self._actor(start, stage)
        if "reference" in roles and frozen_actor:
            lora = self.config.actor.lora
            adapters = self._adapters("actor", "lm", lora) if lora is not None and lora.start is not None else {}
            workers["reference"] = FrozenActor(workers["actor"], adapters or {})
        return workers

    def generation_shapes(self) -> Any:
        """Shapes of the policy's weights as it generates."""
        lora = self.config.actor.lora
        trained = policy_shapes(self.model, lora, dtype=self.dtype)
        return cast_shapes(policy_dims(self.model, lora), trained, dtype=self.dtype)

    def generation_layout(self, mesh: Mesh) -> Any:
        """Shardings of the policy's weights as it generates on a mesh."""
        return shardings(mesh, policy_dims(self.model, self.config.actor.lora), GENERATE)

    def _policy(self, stage: Stage, roles: Collection[str], *, copied: bool) -> Params:
        """The policy's parameters before the stage, in the training layout and dtypes of a role that needs them.

        If no other role copies them, they may be quantised as they are loaded.
        """
        role = next(name for name in ("actor", "reference", "process_reward", *CRITICS) if name in roles)
        lora = stage.config.actor.lora if role == "actor" else None
        if lora is not None and (copied or stage.policy is not None):
            lora = replace(lora, quantize=None)
        target = held(self.mesh(role), self.model, "lm", lora, dtype=self.dtype, role=role)
        if stage.policy is None:
            return initial_params(self.config.model, self.model, "lm", target, seed=self.config.seed)
        return saved_params(stage.policy, target)

    def _adapters(self, role: str, head: Head, lora: Lora | None, saved: Path | None = None) -> Params | None:
        """What is trained beside a role's frozen parameters, as it starts; None where they are trained themselves."""
        if lora is None:
            return None
        config = self.model_of(role)
        layout = adapter_layout(self.mesh(role), config, head, lora, role=role)
        if saved is not None:
            return saved_params(saved, laid_out(adapter_shapes(config, head, lora), layout))
        return initial_adapters(config, head, lora, layout, seed=self.config.seed)

    def mesh(self, role: str) -> Mesh:
        """The training mesh of a role on this pool."""
        return factored_mesh(self.training(role).layout, self.pool.devices, role=role)

    def attention(self, role: str) -> Attention:
        """The kernels of a role in its training layout."""
        return choose_attention(
            self.model_of(role),
            self.dtype,
            self.mesh(role),
            row_axes=BATCH_AXES,
            head_axes=TENSOR_AXES,
            expert_axes=EXPERT_AXES,
            stage_axes=STAGE_AXES,
            wanted=self.config.attention,
        )

    def model_of(self, role: str) -> AnyModel:
        """The shape of a role's decoder."""
        own = self.own_model(role)
        return self.model if own is None else model_config(own, self.tokenizer)

    def own_model(self, role: str) -> Pretrained | None:
        """Where a role's weights come from; None where it starts from the policy."""
        return getattr(self.config.algorithm, f"{role}_model", None)

    def training(self, role: str) -> Training:
        """How a role is laid out and fed; the reference as the actor, but for its layout.

        It has no token budget of its own, so it gets a row on each of its devices where the actor's holds fewer.
        """
        if role != "reference":
            return self.config.algorithm.training(self.config)[role]
        actor, layout = self.config.actor, self.config.reference_layout or self.config.actor.layout
        shards = len(self.pool.devices) // (layout.stage * layout.tensor)
        return replace(
            actor, layout=layout, tokens_per_microbatch=max(actor.tokens_per_microbatch, self.width * shards)
        )

    def _shared(self, role: str) -> dict[str, Any]:
        parts = [part for part in ("parameters", "optimizer") if offloaded(self.config.offload, role, part)]
        return {
            "remat": role in self.remat and self.remat[role].on,
            "width": self.width,
            "longest_response": self.config.rollout.max_response_tokens,
            "dtype": self.dtype,
            "attention": self.attention(role),
            "progress": self._progress,
            "offload": parts,
        }

    def _actor(self, start: Params, stage: Stage) -> Actor:
        target = held(self.mesh("actor"), self.model, "lm", stage.config.actor.lora, dtype=self.dtype, role="actor")
        return Actor(
            "actor",
            self.model,
            "lm",
            self.mesh("actor"),
            quantized_each(start, target),
            self.config.actor,
            **self._shared("actor"),
            optimizer=stage.config.actor.optimizer,
            total_updates=stage.total_updates - stage.config.algorithm.resting_updates(stage.config),
            adapters=self._adapters("actor", "lm", stage.config.actor.lora, stage.adapters),
            sampler=self.sampler,
            hybrid=self.hybrid,
            exchange=self._exchange,
            temperature=self.config.rollout.sampling.temperature,
        )

    def _reference(self, start: Params) -> Reference:
        mesh, config, own = self.mesh("reference"), self.model_of("reference"), self.own_model("reference")
        lora = self.config.actor.lora if own is None else None
        target = frozen(mesh, config, "lm", lora, dtype=self.dtype, role="reference")
        if own is not None:
            check_vocabulary(self.tokenizer, config, role="reference")
            check_same_tokens(self.tokenizer, own.path)
            start = initial_params(own, config, "lm", target, seed=self.config.seed)
        return Reference(
            "reference",
            config,
            "lm",
            mesh,
            copied(start, target),
            self.training("reference"),
            **self._shared("reference"),
            temperature=self.config.rollout.sampling.temperature,
        )

    def _critic(self, role: str, start: Params, stage: Stage) -> Critic:
        training, own = self.training(role), self.own_model(role)
        mesh, lora = self.mesh(role), training.lora
        config = self.model_of(role)
        check_vocabulary(self.tokenizer, config, role=role)
        target = held(mesh, config, "value", lora, dtype=self.dtype, role=role)
        if own is None:
            trunk = {name: leaf for name, leaf in start.items() if name != "head"}
            params = copied(trunk, target)
        else:
            params = initial_params(own, config, "value", target, seed=self.config.seed)
        adapters = self._adapters(role, "value", lora)
        if adapters is not None and lora is not None:
            head = params.pop("head")  # trained whole, and so among the adapters
            adapters = {**adapters, "head": head} if lora.start is None else adapters
        return Critic(
            role,
            config,
            "value",
            mesh,
            params,
            training,
            **self._shared(role),
            optimizer=training.optimizer,
            total_updates=stage.total_updates,
            adapters=adapters,
        )

    def _process_reward(self, start: Params, stage: Stage) -> ProcessReward:
        training, mesh = self.training("process_reward"), self.mesh("process_reward")
        target = held(mesh, self.model, "lm", training.lora, dtype=self.dtype, role="process_reward")
        return ProcessReward(
            "process_reward",
            self.model,
            "lm",
            mesh,
            copied(start, target),
            training,
            **self._shared("process_reward"),
            optimizer=training.optimizer,
            total_updates=stage.total_updates,
            adapters=self._adapters("process_reward", "lm", training.lora),
            temperature=self.config.rollout.sampling.temperature,
        )

    def close(self) -> None:
        """End the reward workers, and let go of weights that nobody took."""
        if self._scorer is not None:
            self._scorer.close()
        self._exchange.close()

"""Construction of one process's workers: its part of the models on the meshes of a resource pool."""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache, partial
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh
from transformers import PreTrainedTokenizerBase

from jaxrlhf.agent_loop import AgentLoop
from jaxrlhf.batch import Params
from jaxrlhf.batching.transfer_protocol import RankCoordinates
from jaxrlhf.checkpoint import check_pretrained
from jaxrlhf.config import ROLLOUT, Config, ModelReward, Pretrained, Refusal, RoleSpec, RolloutServer, offloaded
from jaxrlhf.config.environments import choices
from jaxrlhf.conversations.chat_format import ChatFormat
from jaxrlhf.data.tokenizer import TokenBytes, decoder
from jaxrlhf.engine import Engine
from jaxrlhf.engine.checks import check_routing
from jaxrlhf.engine.rollout_engine import PolicyWeights, RolloutEngine
from jaxrlhf.engine.servers.server_engine import ServerEngine
from jaxrlhf.engine.servers.weight_files import WeightFiles
from jaxrlhf.environments.pool import EnvironmentPool
from jaxrlhf.models.attention.kernel_choice import choose_execution
from jaxrlhf.models.causal_lm import AnyModel
from jaxrlhf.models.config import Head, ModelConfig
from jaxrlhf.models.huggingface.config import read_config
from jaxrlhf.resharding.hybrid import HybridEngine
from jaxrlhf.resharding.transfer import Exchange
from jaxrlhf.rewards.endpoint import check_health
from jaxrlhf.rewards.scorer import Scorer
from jaxrlhf.sharding.described import are_here, described
from jaxrlhf.sharding.mesh import GENERATION_AXES, SLOT_AXES, factored_mesh, generation_mesh, replica_mesh
from jaxrlhf.sharding.pool import ResourcePool
from jaxrlhf.sharding.submesh import local_submesh
from jaxrlhf.workers.actor import Actor
from jaxrlhf.workers.generation.worker import RolloutWorker
from jaxrlhf.workers.model import ModelSetup, ModelWorker, Progress
from jaxrlhf.workers.pool_roles import PoolRoles, check_same_tokens, check_vocabulary, stop_texts, stop_tokens
from jaxrlhf.workers.reference import SharedWeightsReference
from jaxrlhf.workers.remat import choose_remat
from jaxrlhf.workers.reward import Reward
from jaxrlhf.workers.role_weights import (
    RoleWeights,
    copied,
    initial_adapters,
    initial_params,
    quantized_as,
    rollout_format,
    saved_params,
)
from jaxrlhf.workers.sampler import CompletionFeed, Sampler
from jaxrlhf.workers.score_model import ScoreModel


@dataclass(frozen=True)
class Phase:
    """One phase of a run, such as a cold start or RLHF.

    Attributes:
      policy: Folder of a checkpoint's actor to start from; None starts from the configuration's model.
      adapters: Folder of a checkpoint's adapters to start from; None initializes the adapters as configured.
    """

    config: Config
    roles: tuple[str, ...]
    total_updates: int
    policy: Path | None = None
    adapters: Path | None = None


class Builder:
    """Builder of workers on one pool; the engine is built once and serves every phase of a run.

    Args:
      rank: Index of this process among the processes that share the pool, and their number.
      reward_output: File for the output that reward functions print; None is the standard error stream.
      address: Name or address of this host for weight transfers.
      feed: Completion feed that all builders of this process share.

    Attributes:
      on: Roles on the pool, as configured.
      has_devices: False if the pool's devices are only described: workers have shapes instead of weights.
    """

    def __init__(
        self,
        config: Config,
        tokenizer: PreTrainedTokenizerBase,
        pool: ResourcePool,
        roles: Collection[str],
        *,
        rank: tuple[int, int] = (0, 1),
        progress: Progress,
        reward_output: Path | None = None,
        address: str = "127.0.0.1",
        feed: CompletionFeed | None = None,
    ) -> None:
        self.config, self.on = config, PoolRoles(config, tokenizer, pool, roles)
        self.has_devices = are_here(pool.devices)
        self.rank, self.progress, self._feed = rank, progress, feed or CompletionFeed()
        carrier = "direct" if config.cluster is None else config.cluster.weights
        self._exchange, self._reward_output = Exchange(address, carrier=carrier), reward_output
        model, layout = self.on.model, config.actor.layout
        rounded = rollout_format(config, model, pool)
        self.policy = RoleWeights("actor", model, "lm", self.on.dtype, config.actor.lora, quantize=rounded)
        self.hybrid: HybridEngine | None = None
        self.sampler: Sampler | None = None
        if "actor" in roles:
            mesh = factored_mesh(layout, pool.devices)
            self.policy.trained_params(mesh)  # raises Refusal early
            if not any(ROLLOUT in other.roles for other in config.pools):
                generation = generation_mesh(layout, pool.devices)
                self.sampler = self._sampler(generation)
                self.hybrid = self.policy.switch(mesh, generation)
        if ROLLOUT in roles:
            self.sampler = self._sampler(replica_mesh(layout, pool.devices, role=f"rollout on pool {pool.name!r}"))
        self.remat = {role: choose_remat(self.on, role) for role in sorted(self.on.trained)}
        self._scorer: Scorer | None = None
        if self.has_devices and "reward" in roles and not config.rewards.by_model:
            self.scorer()  # now, so that a function that cannot be loaded is refused before anything compiles
        for part in config.rewards.parts if "reward" in roles else ():
            if isinstance(part, ModelReward):
                self._reward_mesh(part)  # raises Refusal early; the weights are loaded later, with the other models

    def _sampler(self, mesh: Mesh) -> Sampler:
        self.policy.check_generation(mesh)
        submesh = local_submesh(mesh)
        share = submesh.size / mesh.size
        engine, loop, rollout = self.rollout_engine(submesh, share), self._agent_loop(), self.config.rollout
        how = self.on.width, self.progress, self._feed, loop, rollout.sampling.most_kept
        new_engine = partial(self._engine, submesh=submesh, share=share)
        return Sampler(self.on.model, engine, mesh, submesh, *how, new_engine=new_engine)

    def _agent_loop(self) -> AgentLoop | None:
        """Build the runner of episodes; environments are loaded now, so that an invalid one is refused early."""
        environment, rollout = self.config.environment, self.config.rollout
        if environment is None or not self.has_devices:
            return None
        return AgentLoop(
            environment,
            ChatFormat(self.on.tokenizer, reader=self.on.reader),
            EnvironmentPool(choices(environment), output=self._reward_output),
            rollout.max_prompt_tokens,
            rollout.max_response_tokens,
            stop_tokens(self.config, self.on.tokenizer),
        )

    def rollout_engine(self, submesh: Mesh, share: float) -> RolloutEngine:
        """Build the rollout engine on this process's part of a generation mesh.

        Args:
          share: Fraction of a step's responses that this engine generates.
        """
        rollout = self.config.rollout
        if rollout.server is not None:
            return self._server_engine(rollout.server)
        return self._engine(self.on.model, self.on.slots, submesh=submesh, share=share)

    def _engine(self, model: AnyModel, slots: int, *, submesh: Mesh, share: float) -> Engine:
        """Build an engine for the policy, or for another model that is sharded and sampled from in the same way."""
        config, rollout, on = self.config, self.config.rollout, self.on
        return Engine(
            model,
            submesh,
            slots=math.ceil(slots * share),
            prompts=math.ceil(rollout.prompts_per_step * share),
            max_prompt_tokens=rollout.max_prompt_tokens,
            max_response_tokens=rollout.max_response_tokens,
            stop_tokens=stop_tokens(config, on.tokenizer),
            stop_texts=stop_texts(config, on.tokenizer),
            decode=TokenBytes(on.tokenizer).text,
            decode_tokens_per_dispatch=rollout.decode_tokens_per_dispatch,
            records_routing=rollout.replay_routing,
            most_kept=rollout.sampling.most_kept if model is on.model else 0,
            pixels=on.pixels,
            speculation=rollout.speculation,
            slot_axes=SLOT_AXES,
            kv_head_axis="tensor",
            execution=choose_execution(
                on.model,
                on.dtype,
                submesh,
                **GENERATION_AXES,
                decodes=True,
                wanted=config.attention,
                cache=rollout.cache if model is on.model else "slots",
            ),
        )

    def _server_engine(self, server: RolloutServer) -> ServerEngine:
        """Build the engine that calls the run's servers; a server that does not answer is refused now."""
        config, rollout, on = self.config, self.config.rollout, self.on
        if not isinstance(model := on.model, ModelConfig):
            required = "a model with a Hugging Face format, but the model is user-defined"
            raise Refusal(f"rollout.server requires {required}; set rollout.server=None")
        check_routing(model, records_routing=rollout.replay_routing)
        if on.reader is not None and (marks := on.reader.placeholders).expanded(1) != marks.mark:
            raise Refusal(
                f"rollout.server sends one placeholder token for each image, but {model.family} writes {marks.mark!r}, "
                "which servers replace by text; set rollout.server=None, or read no images"
            )
        for url in server.urls if self.has_devices else ():
            check_health(url)
        source = config.model.path if isinstance(config.model, Pretrained) else None
        # A folder for this run alone, since older weights in it are deleted.
        place = config.folder if server.folder is None else Path(server.folder).expanduser() / config.name
        save = partial(PolicyWeights.save, dtype=on.dtype, tokenizer=on.tokenizer, source=source)
        return ServerEngine(
            server,
            model,
            WeightFiles(place / "server_weights", server.weights, save, on.dtype),
            logps=partial(PolicyWeights.logps, dtype=on.dtype),
            max_response_tokens=rollout.max_response_tokens,
            stop_tokens=stop_tokens(config, on.tokenizer),
            stop_texts=stop_texts(config, on.tokenizer),
            image_url=None if on.reader is None else lru_cache(maxsize=256)(on.reader.png_url),
            records_routing=rollout.replay_routing,
        )

    def _reward_mesh(self, part: ModelReward) -> Mesh:
        """Return the mesh of a reward model over this process's devices, after a check that the model splits evenly."""
        devices = [device for device in self.on.pool.devices if device.process_index == jax.process_index()]
        mesh = factored_mesh(part.layout, devices, role="reward")
        RoleWeights("reward model", read_config(part.path), "score", self.on.dtype, None).layout(mesh)
        return mesh

    def scorer(self) -> Scorer:
        """Return this process's scorer, built at the first call; its reward models are on this process's devices."""
        if self._scorer is not None:
            return self._scorer
        parts = [part for part in self.config.rewards.parts if isinstance(part, ModelReward)]
        offload, attention = offloaded(self.config.offload, "reward", "parameters"), self.config.attention
        how: dict[str, Any] = {"dtype": self.on.dtype, "offload": offload, "attention": attention}
        meshes = {part.layout: self._reward_mesh(part) for part in parts}
        model = cache(lambda path, layout: ScoreModel(path, mesh=meshes[layout], **how))  # one model for all its parts
        models = {part.key: model(part.path, part.layout).reading(part) for part in parts}
        rewards, sources = self.config.rewards, self.config.source_rewards
        self._scorer = Scorer(rewards, sources=sources, models=models, output=self._reward_output)
        return self._scorer

    def workers(self, phase: Phase) -> dict[str, Any]:
        """Build the workers of a phase on this pool; all copies of the policy start from the phase's initial policy."""
        if self.has_devices:
            self._check_starts(phase)
        roles = [role for role in self.on.roles if role in phase.roles]
        workers: dict[str, Any] = {}
        if ROLLOUT in roles:
            assert self.sampler is not None
            received, quantize = self.policy.apart(self.sampler.mesh)
            workers[ROLLOUT] = RolloutWorker(self.sampler, *received, self._exchange, quantize)
        if "reward" in roles:
            place = RankCoordinates.alone(*self.rank)
            workers["reward"] = reward = Reward(self.scorer(), place, decoder(self.on.tokenizer), self.progress)
            self._feed.listen = reward.listen
        if not set(roles) - {ROLLOUT, "reward"}:
            return workers
        models = [self.config.roles[role] for role in roles if role not in (ROLLOUT, "reward")]
        if phase.config.reference_is_frozen_actor:
            models = [spec for spec in models if spec.name != "reference"]
        from_policy = [spec.name for spec in models if spec.model is None]
        start = self._policy_params(phase, from_policy) if from_policy else {}
        for spec in models:
            if spec.name != "actor":
                workers[spec.name] = self._model(spec, start, phase)
        if "actor" in from_policy:  # last: the other workers copy the parameters that the actor takes over
            workers["actor"] = self._actor(start, phase)
        if "reference" in roles and phase.config.reference_is_frozen_actor:
            lora = self.config.actor.lora
            adapters = self._adapters(self.policy) if lora is not None and lora.start is not None else None
            workers["reference"] = SharedWeightsReference(workers["actor"], adapters or {})
        return workers

    def _check_starts(self, phase: Phase) -> None:
        """Check all checkpoints that roles start from, before anything is loaded or compiled.

        Raises:
          Refusal: See `check_pretrained`; or a model has other tokens than its inputs.
        """
        wanted: list[tuple[Pretrained, Head]] = []
        trains = phase.config.roles.keys() <= {*phase.roles}  # an evaluation may have a policy with other tokens
        for spec in self.config.roles.values():
            if spec.model is not None and spec.head is not None:
                wanted.append((spec.model, spec.head))
                if trains:
                    check_vocabulary(self.on.tokenizer_of(spec.name), self.on.model_of(spec.name), role=spec.name)
                if trains and spec.head == "lm" and spec.max_expansion is None:
                    check_same_tokens(self.on.tokenizer, spec.model.path, role=spec.name)
            elif spec.model is None and phase.policy is None and isinstance(self.config.model, Pretrained):
                wanted.append((self.config.model, "lm"))
        wanted += [
            (Pretrained(part.path), "score") for part in self.config.rewards.parts if isinstance(part, ModelReward)
        ]
        for model, head in dict.fromkeys(wanted):
            check_pretrained(model.path, read_config(model.path, vision=model.vision, mtp=model.mtp), head)

    def _policy_params(self, phase: Phase, roles: Sequence[str]) -> Params:
        """Load the policy's parameters before the phase, in the training layout and dtypes of one of `roles`.

        If no other role copies the parameters, they may be quantized during loading.

        Args:
          roles: Roles that start from the policy; the layout is the actor's, or else the first role's.
        """
        role, copied = ("actor", len(roles) > 1) if "actor" in roles else (roles[0], True)
        lora = phase.config.actor.lora if role == "actor" else None
        if lora is not None and (copied or phase.policy is not None):
            lora = replace(lora, quantize=None)
        weights = replace(self.policy, role=role, lora=lora)
        target = weights.trained_params(self.on.mesh(role))
        if not self.has_devices:
            return target
        if phase.policy is None:
            return initial_params(self.config.model, weights, target, seed=self.config.seed)
        return saved_params(phase.policy, target)

    def _adapters(self, weights: RoleWeights, saved: Path | None = None) -> Params | None:
        """Return the initial adapters of a role; None if its parameters are trained directly."""
        if weights.lora is None:
            return None
        mesh = self.on.mesh(weights.role)
        target = described(weights.adapter_shapes(), weights.adapter_layout(mesh))
        if not self.has_devices:
            return target
        if saved is not None:
            return saved_params(saved, target)
        return initial_adapters(weights, mesh, seed=self.config.seed)

    def _setup(self, role: str) -> ModelSetup:
        on, rollout = self.on, self.config.rollout
        parts = [part for part in ("parameters", "optimizer") if offloaded(self.config.offload, role, part)]
        parts = parts if self.has_devices else []  # described parameters cannot be offloaded
        return ModelSetup(
            role,
            on.model_of(role),
            on.weights(role).head,
            on.mesh(role),
            on.training(role),
            width=on.expanded(on.width, role),
            longest_response=on.expanded(rollout.max_response_tokens, role),
            execution=on.execution(role, remat=self.remat[role].kind if role in self.remat else "none"),
            progress=self.progress,
            offload=parts,
            temperature=rollout.sampling.temperature,
            pixels=on.pixels,
            staleness=rollout.staleness,
            together=on.config.algorithm.together,
            tokenizers=on.tokenizers(role) if self.has_devices else None,
        )

    def _actor(self, start: Params, phase: Phase) -> Actor:
        weights = replace(self.policy, lora=phase.config.actor.lora)
        target = weights.trained_params(self.on.mesh("actor"))
        return self.on.spec("actor").worker_class(
            replace(self._setup("actor"), width=phase.config.rollout.width),
            quantized_as(start, target) if self.has_devices else target,
            optimizer=phase.config.actor.optimizer,
            total_updates=phase.total_updates - phase.config.algorithm.critic_only_updates(phase.config.rollout),
            adapters=self._adapters(weights, phase.adapters),
            sampler=self.sampler,
            hybrid=self.hybrid,
            exchange=self._exchange,
        )

    def _model(self, spec: RoleSpec, start: Params, phase: Phase) -> ModelWorker:
        """Build the worker of any role but the actor."""
        weights, mesh = self.on.weights(spec.name), self.on.mesh(spec.name)
        target = weights.frozen_params(mesh) if spec.training is None else weights.trained_params(mesh)
        if not self.has_devices:
            params = dict(target)
        elif spec.model is None:
            shared = {name: leaf for name, leaf in start.items() if name != "head" or spec.head == "lm"}
            params = copied(shared, target)
        else:
            params = initial_params(spec.model, weights, target, seed=self.config.seed)
        if spec.training is None:
            return spec.worker_class(self._setup(spec.name), params)
        adapters = self._adapters(weights)
        if adapters is not None and weights.lora is not None and spec.head == "value":
            head = params.pop("head")  # fully trained, so it is kept with the adapters
            adapters = {**adapters, "head": head} if weights.lora.start is None else adapters
        return spec.worker_class(
            self._setup(spec.name),
            params,
            optimizer=spec.training.optimizer,
            total_updates=phase.total_updates,
            adapters=adapters,
        )

    def close(self) -> None:
        """Stop the reward processes and environments, and withdraw weights that were offered and not taken."""
        if self._scorer is not None:
            self._scorer.close()
        if self.sampler is not None and self.sampler.agent_loop is not None:
            self.sampler.agent_loop.close()
        self._exchange.close()

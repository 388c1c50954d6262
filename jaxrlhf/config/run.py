"""Configuration of a run."""

import math
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal, Self

from jaxrlhf.config.algorithms.algorithm import Algorithm, PolicyGradient, check_read, check_schedule
from jaxrlhf.config.algorithms.supervised import SFT, ColdStart
from jaxrlhf.config.cli.annotations import check_types
from jaxrlhf.config.cluster import RayCluster
from jaxrlhf.config.environments import Agent, AnyEnvironment, EnvironmentByRecord, Tools, choices
from jaxrlhf.config.mixtures import Data, Evaluation, EvaluationSet, Mixture, Selection, Source, check_names
from jaxrlhf.config.placement import ROLLOUT, Pool, check_offload, check_pools
from jaxrlhf.config.refusal import checking, require
from jaxrlhf.config.rewards import ArithmeticReward, Gsm8kReward, MathReward, ModelReward, RewardPart, Rewards
from jaxrlhf.config.roles import REWARD, ROLLOUT_COPY, RoleSpec
from jaxrlhf.config.saved import Checkpointing, Stall, TokenRecords
from jaxrlhf.config.serving import check_server
from jaxrlhf.config.settings import NotNegative, Positive, Settings
from jaxrlhf.config.sources import Model, PromptFields
from jaxrlhf.config.training import Layout, Rollout, Training

COLD_START = "cold_start"
"""Folder of the cold start, within the folder of the run."""
TrackerName = Literal["tensorboard", "wandb", "mlflow", "swanlab", "trackio"]


@dataclass(frozen=True)
class Config(Settings):
    """Configuration of a run.

    Attributes:
      name: Name of the run and of its folder.
      steps: Number of steps, without those of the cold start.
      selection: Training records that are used, and their order.
      system_prompt: System message of every prompt that has no system message.
      environment: Environment of episodes with several turns; None samples one response per prompt.
      reference_layout: Layout of the reference policy; None is the actor's layout.
      token_records: Responses with per-token records in `samples.jsonl`.
      tokenizer: Hugging Face tokenizer directory or hub id; None is the tokenizer of the model.
      compute_dtype: Dtype of activations and of the generation copy; `auto` is bfloat16 on GPU and TPU, float32 on CPU.
        Master weights are always float32.
      attention: Attention kernels; `auto` uses the fastest of the backend, after a check against the results of `xla`.
      devices: Number of devices in one pool that all roles share; None uses all devices.
      pools: Placement of roles on devices; empty is one pool.
      placement: `auto` searches for pools, layouts and offload at startup; `given` uses those of the configuration.
      hardware: Speed and memory of the devices for the search, by name (`a100x16x8`) or file; None detects them.
      cluster: Hosts joined by Ray; None runs in this process, on its devices.
      offload: Parts kept in host memory while not in use: `role`, `role.parameters` or `role.optimizer`.
      workdir: Folder of checkpoints, metrics and samples; None is `runs/<name>`.
      resume: True continues from the newest checkpoint in `workdir`, if there is a checkpoint.
      stall: Report of a run in which nothing moves.
      trackers: Services that also receive metrics and samples; they are configured by their environment variables.
      profile_steps: Numbers of the steps in which every process profiles its devices, into `workdir/profile/step_N`.
    """

    name: str
    algorithm: Algorithm
    steps: Positive[int]
    model: Model
    data: Data
    selection: Selection = field(default_factory=Selection)
    system_prompt: str | None = None
    rewards: Rewards = field(default_factory=Rewards)
    rollout: Rollout = field(default_factory=Rollout)
    environment: AnyEnvironment | None = None
    actor: Training = field(default_factory=Training)
    reference_layout: Layout | None = None
    cold_start: ColdStart | None = None
    evaluation: Evaluation = field(default_factory=Evaluation)
    checkpoint: Checkpointing = field(default_factory=Checkpointing)
    token_records: TokenRecords = field(default_factory=TokenRecords)
    tokenizer: str | None = None
    compute_dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    attention: Literal["auto", "xla"] = "auto"
    devices: Positive[int] | None = None
    pools: tuple[Pool, ...] = ()
    placement: Literal["given", "auto"] = "given"
    hardware: str | None = None
    cluster: RayCluster | None = None
    offload: tuple[str, ...] = ()
    seed: NotNegative[int] = 0
    workdir: str | None = None
    resume: bool = True
    stall: Stall = field(default_factory=Stall)
    trackers: tuple[TrackerName, ...] = ("tensorboard",)
    profile_steps: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not checking():
            return
        check_types(self, "Config")
        super().__post_init__()
        require(self.seed < 2**32, f"Config.seed must be below 2**32, got {self.seed}")
        require(
            self.name.strip() not in ("", ".", "..") and not set(self.name) & set("/\\"),
            f"Config.name must be a folder name without separators, got {self.name!r}; to choose where the run is "
            "stored, set workdir",
        )
        require(self.workdir != "", "Config.workdir is empty; give a folder, or None for runs/<name>")
        wrong = [number for number in self.profile_steps if not 1 <= number <= self.steps]
        require(not wrong, f"profile_steps has {wrong}, but the run has steps 1 to {self.steps}; remove {wrong}")
        self._check_placement()
        self._check_lora()
        self._check_sampler()
        check_schedule(self)
        check_read(self)
        self._check_search()
        self._check_layouts()
        self._check_microbatches()
        self._check_sources()
        self._check_records()
        self._check_environment()
        self._check_weights()
        self.checkpoint.check(self.evaluation.every_steps)
        self.algorithm.check(self)

    def _check_placement(self) -> None:
        require(
            self.devices is None or not self.pools,
            f"devices={self.devices} and pools are both set; each pool has its own devices; set devices=None",
        )
        roles = tuple(self.roles)
        check_pools(self.pools, roles)
        scoring = ["reward"] if self.rewards.by_model else []
        models = [*(role for role in roles if role != "reward"), *scoring]
        check_offload(self.offload, models, list(self.trained))
        name = type(self.algorithm).__name__ + " with kl=None" * hasattr(self.algorithm, "kl")
        require(
            self.reference_layout is None or "reference" in roles,
            f"reference_layout is set, but {name} has no reference; set reference_layout=None",
        )

    @property
    def roles(self) -> dict[str, RoleSpec]:
        """Roles that a step calls, by name."""
        return {role.name: role for role in self.algorithm.roles(self)}

    @property
    def all_roles(self) -> dict[str, RoleSpec]:
        """Roles that a step calls, plus roles that evaluations call or that generate on their own pool, by name."""
        return {role.name: role for role in (ROLLOUT_COPY, REWARD)} | self.roles

    @property
    def trained(self) -> dict[str, Training]:
        """Training settings of each trained role, by name."""
        return {name: role.training for name, role in self.roles.items() if role.training is not None}

    @property
    def generates_apart(self) -> bool:
        """True if a separate pool generates."""
        return any(ROLLOUT in pool.roles for pool in self.pools)

    @property
    def steps_ahead(self) -> int:
        """Steps by which generation is ahead of training; the rest of the staleness is for postponed groups."""
        staleness, puts_off = self.rollout.staleness, self.rollout.over_provision > 1
        return min(staleness, int(self.generates_apart)) if puts_off else staleness

    @property
    def saving(self) -> Checkpointing:
        """Checkpoint settings with each None replaced by its default."""
        return self.checkpoint.filled_in(self.evaluation.every_steps)

    @property
    def folder(self) -> Path:
        """Directory of the run's checkpoints, metrics and samples."""
        return Path(self.workdir).expanduser() if self.workdir else Path("runs") / self.name

    @property
    def phases(self) -> tuple[Self, ...]:
        """Configurations of the cold start, if any, and of the run; each starts from the previous phase's policy."""
        cold = self.cold_start
        if cold is None:
            return (self,)
        first = replace(
            self,
            name=f"{self.name} (cold start)",
            workdir=str(self.folder / COLD_START),
            algorithm=cold.algorithm,
            data=cold.data or self.data,
            steps=cold.steps,
            rollout=Rollout(  # nothing is sampled
                max_prompt_tokens=cold.max_prompt_tokens or self.rollout.max_prompt_tokens,
                max_response_tokens=self.rollout.max_response_tokens,
            ),
            selection=self.selection.of_given_answers,
            token_records=TokenRecords(),
            actor=replace(self.actor, optimizer=cold.optimizer, lora=None),
            cold_start=None,
            profile_steps=(),
            pools=(),  # the run's pools are started already, and have roles that this phase does not call
            offload=(),
            reference_layout=None,
            evaluation=Evaluation(every_steps=0, problems=1),
            checkpoint=Checkpointing(every_steps=0, keep_last=1, keep_best=0),
        )
        return (first, self)

    @property
    def sources(self) -> tuple[Source, ...]:
        """Data sets of a mixture; empty if the data is not a mixture."""
        return self.data.sources if isinstance(self.data, Mixture) else ()

    @property
    def source_rewards(self) -> dict[str, tuple[RewardPart, ...]]:
        """Reward parts of each source or evaluation set with its own rewards, by name."""
        own: list[Source | EvaluationSet] = [*self.sources, *self.evaluation.sets]
        return {one.name: one.rewards for one in own if one.rewards is not None}

    @property
    def reference_is_frozen_actor(self) -> bool:
        """True if the reference is the actor without adapters, and has no weights of its own."""
        together = not self.pools or any({"actor", "reference"} <= set(pool.roles) for pool in self.pools)
        alike = self.reference_layout in (None, self.actor.layout)
        return self.actor.lora is not None and self._refers_to_start and together and alike

    @property
    def _refers_to_start(self) -> bool:
        """True if there is a reference, and it is the policy that the run starts from."""
        return "reference" in self.roles and self.roles["reference"].model is None

    def _check_lora(self) -> None:
        entries = [entry for entry in self.offload if entry.partition(".")[0] == "reference"]
        require(
            not (entries and self.reference_is_frozen_actor),
            f"offload: {', '.join(entries)}, but with actor.lora the reference shares the actor's frozen weights; use "
            "actor.parameters instead",
        )
        given = self.actor.lora is not None and self.actor.lora.start is not None
        require(
            not (given and self._refers_to_start) or self.reference_is_frozen_actor,
            "actor.lora.start also gives the reference adapters, which requires the actor's pool and layout; place "
            "the reference there, or merge the adapters into the model and set actor.lora.start=None",
        )

    def _check_sampler(self) -> None:
        """Refuse a sampler that differs from the trained policy without a correction, or that does not fit the run."""
        kind, server = self.rollout.quantize, self.rollout.server
        if server is not None:
            check_server(episodes=self.environment is not None, hosts=self.cluster is not None)
        if kind is server is None:
            return
        differs = f"quantize={kind!r} samples from rounded weights" if kind else "server samples with another engine"
        algorithm = self.algorithm
        corrected = kind is None  # algorithms without a policy gradient do not learn from samples
        if isinstance(algorithm, PolicyGradient):
            corrected = algorithm.correction_for(self) is not None or algorithm.old_logp == "bypass"
        require(
            corrected,
            f"rollout.{differs}, which costs accuracy without importance weights, but {type(algorithm).__name__} has "
            f"none; set algorithm.correction=TruncatedImportance(), or rollout.{'quantize' if kind else 'server'}=None",
        )
        require(
            kind is None or not self.generates_apart,
            f"rollout.quantize={kind!r} rounds weights in the switch to the generation layout, but pools place "
            "'rollout' apart from 'actor'; remove 'rollout' from pools, or set rollout.quantize=None",
        )
        require(
            kind is None or self.actor.lora is None or self.actor.lora.quantize is None,
            f"rollout.quantize={kind!r}, but actor.lora.quantize already rounds the same matrices; set one to None",
        )

    def _check_search(self) -> None:
        """Refuse settings that the placement search would overrule, and settings that only the search reads."""
        if self.placement == "given":
            require(
                self.hardware is None,
                f"hardware={self.hardware!r} is only used by placement='auto'; set placement='auto', or hardware=None",
            )
            return
        chosen = [f"layout of {name}" for name, layout in self._layouts().items() if layout != Layout()]
        chosen += [name for name in ("pools", "reference_layout", "offload") if getattr(self, name)]
        require(
            not chosen,
            f"placement='auto' chooses pools, layouts and offload, but the configuration sets {', '.join(chosen)}; "
            "remove these settings, or set placement='given'",
        )

    def _layouts(self) -> dict[str, Layout]:
        """Return the layout of each role and reward model that has its own layout."""
        layouts = {role: training.layout for role, training in self.trained.items()}
        judges = [part for part in self.rewards.parts if isinstance(part, ModelReward)]
        return layouts | {f"reward {judge.path}": judge.layout for judge in judges}

    def _check_layouts(self) -> None:
        """Refuse a generation layout for a role that generates nothing."""
        layouts = self._layouts() | {"reference_layout": self.reference_layout or Layout()}
        layouts.pop("actor", None)
        for name, layout in layouts.items():
            fields = (f"generation_{axis}" for axis in ("context", "stage", "tensor"))
            given = ", ".join(f"{field}={size}" for field in fields if (size := getattr(layout, field)) > 1)
            require(not given, f"{name} has {given}, but only the actor generates; remove {given}")

    def _check_microbatches(self) -> None:
        if self.placement == "auto":  # the plan raises a limit that is too small
            return
        longest = self.rollout.max_prompt_tokens + self.rollout.max_response_tokens
        for role, training in self.trained.items():
            name = role if role == "actor" else f"algorithm.{role}"
            require(
                training.tokens_per_microbatch >= longest,
                f"{name}.tokens_per_microbatch={training.tokens_per_microbatch} is below the longest sequence, "
                f"max_prompt_tokens + max_response_tokens = {longest} tokens; raise it to at least {longest}, or set "
                "placement='auto'",
            )

    def _check_sources(self) -> None:
        """Refuse names used for two data sets, and sources with an environment that does not exist."""
        names = [*(one.name for one in self.sources), *(one.name for one in self.evaluation.sets)]
        if names:
            check_names(names, "Mixture.sources and Evaluation.sets")
        for parts in self.source_rewards.values():
            self.rewards.check_limits(parts)
        for source in self.sources:
            there = [one.name for one in choices(self.environment)] if self.environment is not None else []
            require(
                source.environment is None
                or (isinstance(self.environment, EnvironmentByRecord) and source.environment in there),
                f"source {source.name!r} has environment={source.environment!r}, which must be one of an "
                f"EnvironmentByRecord (the run has {', '.join(there) or 'none'}); choose one, or None",
            )

    def _check_records(self) -> None:
        supervised = isinstance(self.algorithm, SFT)
        require(
            not (supervised and self.cold_start),
            "cold_start and algorithm SFT are the same training; remove cold_start and raise steps",
        )
        longest = self.rollout.max_prompt_tokens
        require(
            self.cold_start is None or (self.cold_start.max_prompt_tokens or 0) <= longest,
            f"cold_start.max_prompt_tokens must be at most rollout.max_prompt_tokens={longest}; lower "
            "cold_start.max_prompt_tokens",
        )
        if not isinstance(self.data, PromptFields):
            return
        reads, cold = self.algorithm.reads_solutions, self.cold_start
        require(
            self.data.solution_key is not None or not (reads or (cold and cold.data is None)),
            f"{f'algorithm {type(self.algorithm).__name__}' if reads else 'cold_start'} trains on worked solutions, "
            "but data.solution_key is None; set data.solution_key to the field with the solutions",
        )
        readers = (Gsm8kReward, ArithmeticReward, MathReward)
        graded = [type(p).__name__ for p in self.rewards.parts if isinstance(getattr(p, "correct", p), readers)]
        scored = not supervised or self.data.evaluation is not None
        require(
            self.data.answer_key is not None or not (graded and scored),
            f"{', '.join(graded)} compares with a reference answer, but data.answer_key is None; set data.answer_key, "
            f"or choose other rewards{' or, to evaluate only the loss, rewards=Rewards(parts=())' * supervised}",
        )

    def _check_environment(self) -> None:
        """Refuse settings that do not fit episodes of several turns, and runs without any reward."""
        own = self.environment is not None and self.source_rewards
        unscored = isinstance(self.algorithm, SFT) and all(one.rewards for one in self.evaluation.sets)
        require(
            bool(self.rewards.parts or own or unscored) or self._environment_rewards,
            "Rewards.parts is empty, and no environment gives rewards; give at least one reward",
        )
        if self.environment is None:
            return
        algorithm = type(self.algorithm).__name__
        require(
            REWARD.name in self.roles or isinstance(self.algorithm, SFT),
            f"environment is set, but {algorithm} samples no responses; set environment=None",
        )
        require(
            not self.rollout.replay_routing,
            "rollout.replay_routing needs the experts that each token was sampled with, but episodes do not record "
            "experts; set rollout.replay_routing=False, or environment=None",
        )
        several = [
            type(one).__name__
            for one in choices(self.environment)
            if isinstance(one, Agent) or one.history == "as_templated"
        ]
        require(
            not several or self.algorithm.takes_several(),
            f"{', '.join(several)} may turn an episode into several sequences, but {algorithm} treats each sequence "
            "separately; choose another algorithm, or an environment with history='as_sampled'",
        )

    def _check_weights(self) -> None:
        own = {f"data.sources.{number}.rewards": one.rewards or () for number, one in enumerate(self.sources)}
        for name, parts in {"rewards.parts": self.rewards.parts, **own}.items():
            for index, part in enumerate(parts):
                require(math.isfinite(part.weight), f"{name}.{index}.weight must be finite, got {part.weight}")
            require(
                not parts or any(part.weight for part in parts) or self._environment_rewards,
                f"every weight of {name} is 0, so every score is 0; set at least one weight other than 0",
            )

    @property
    def _environment_rewards(self) -> bool:
        """True if an environment adds rewards to the scores of episodes; tools alone give none."""
        environment = self.environment
        return environment is not None and not all(isinstance(one, Tools) for one in choices(environment))

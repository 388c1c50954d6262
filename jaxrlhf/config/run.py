"""Configuration of a run."""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Literal, Self

from jaxrlhf.config.algorithms.algorithm import Algorithm
from jaxrlhf.config.algorithms.supervised import SFT, ColdStart
from jaxrlhf.config.cli.annotations import check_types
from jaxrlhf.config.cluster import RayCluster
from jaxrlhf.config.environments import AnyEnvironment
from jaxrlhf.config.mixtures import Data, Evaluation, Mixture, Selection, Source
from jaxrlhf.config.placement import ROLLOUT, Pool
from jaxrlhf.config.refusal import checking, require
from jaxrlhf.config.rewards import RewardPart, Rewards
from jaxrlhf.config.roles import REWARD, ROLLOUT_COPY, RoleSpec
from jaxrlhf.config.saved import CHECKPOINT_STEPS, Checkpointing, Stall, TokenRecords
from jaxrlhf.config.settings import Bound, NotEmpty, NotNegative, Positive, Settings
from jaxrlhf.config.sources import Model
from jaxrlhf.config.training import Layout, Rollout, Training

COLD_START = "cold_start"
"""Folder of the cold start, within the folder of the run."""
_FOLDER_NAME = Bound(
    lambda name: name.strip() not in ("", ".", "..") and not {*name} & {*"/\\"},
    "a folder name without separators (workdir says where the run is stored)",
    str,
)
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

    name: Annotated[str, _FOLDER_NAME]
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
    seed: Annotated[NotNegative[int], Bound(lambda value: value < 2**32, "below 2**32")] = 0
    workdir: NotEmpty[str] | None = None
    resume: bool = True
    stall: Stall = field(default_factory=Stall)
    trackers: tuple[TrackerName, ...] = ("tensorboard",)
    profile_steps: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not checking():
            return
        check_types(self, "Config")
        super().__post_init__()
        wrong = [number for number in self.profile_steps if not 1 <= number <= self.steps]
        require(not wrong, f"profile_steps has {wrong}, but the run has steps 1 to {self.steps}; remove {wrong}")

    @property
    def roles(self) -> dict[str, RoleSpec]:
        """Roles that a step calls, by name."""
        return {role.name: role for role in self.algorithm.roles(self.actor)}

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
        saved, evaluated = self.checkpoint.every_steps, self.evaluation.every_steps
        if saved is None:
            saved = CHECKPOINT_STEPS if evaluated == 0 else -(-CHECKPOINT_STEPS // evaluated) * evaluated
        ranked = saved == 0 or evaluated == 0 or saved % evaluated == 0
        best = int(ranked) if self.checkpoint.keep_best is None else self.checkpoint.keep_best
        return replace(self.checkpoint, every_steps=saved, keep_best=best)

    @property
    def folder(self) -> Path:
        """Directory of the run's checkpoints, metrics and samples."""
        return Path(self.workdir).expanduser() if self.workdir else Path("runs") / self.name

    @property
    def phases(self) -> tuple[Self, ...]:
        """Configurations of the cold start, if any, and of the run; each starts from the previous phase's policy."""
        cold, selection = self.cold_start, self.selection
        if cold is None:
            return (self,)
        band = Selection.band if selection.samples is None else selection.band  # this phase scores no responses
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
            selection=replace(selection, online=False, band=band),
            token_records=TokenRecords(),
            actor=replace(self.actor, optimizer=cold.optimizer, lora=None),
            cold_start=None,
            profile_steps=(),
            pools=(),  # the run's pools are started already, and have roles that this phase does not call
            offload=(),
            reference_layout=None,
            evaluation=Evaluation(every_steps=0, problems=1),
            checkpoint=Checkpointing(every_steps=0, keep_last=1, keep_best=0, on_damage=self.checkpoint.on_damage),
        )
        return (first, self)

    @property
    def sources(self) -> tuple[Source, ...]:
        """Data sets of a mixture; empty if the data is not a mixture."""
        return self.data.sources if isinstance(self.data, Mixture) else ()

    @property
    def source_rewards(self) -> dict[str, tuple[RewardPart, ...]]:
        """Reward parts of each source or evaluation set with its own rewards, by name."""
        own = (*self.sources, *self.evaluation.sets)
        return {one.name: one.rewards for one in own if one.rewards is not None}

    @property
    def reference_is_frozen_actor(self) -> bool:
        """True if the reference is the actor without adapters, and has no weights of its own."""
        together = not self.pools or any({"actor", "reference"} <= set(pool.roles) for pool in self.pools)
        alike = self.reference_layout in (None, self.actor.layout)
        return self.actor.lora is not None and self.reference_is_start and together and alike

    @property
    def reference_is_start(self) -> bool:
        """True if there is a reference, and it is the policy that the run starts from."""
        return "reference" in self.roles and self.roles["reference"].model is None

    @property
    def answers_held_out(self) -> bool:
        """True if held-out problems are answered greedily, and the answers are scored."""
        scored = isinstance(self.algorithm, SFT) and self.rewarded
        return self.algorithm.evaluation is None or scored

    @property
    def rewarded(self) -> bool:
        """True if responses to the run's prompts are scored, by reward parts or by an environment."""
        return bool(self.rewards.parts) or self.environment is not None

"""Placement problem of a configuration: its roles, workload and software."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache

from jaxrlhf.config import (
    Config,
    FromScratch,
    Layout,
    Model,
    ModelReward,
    Nnx,
    PolicyGradient,
    Pretrained,
    Refusal,
    Training,
)
from jaxrlhf.models import from_scratch, tokenizer_of
from jaxrlhf.models.attention.kernel_choice import uses_pages
from jaxrlhf.models.config import Head, ModelConfig
from jaxrlhf.models.lora.lora import declare_adapters
from jaxrlhf.models.parameters import declare
from jaxrlhf.optimizers.groups import layers_of
from jaxrlhf.optimizers.state import state_bytes_per_weight
from jaxrlhf.planner.hardware import Hardware, compiler_of
from jaxrlhf.planner.plan import GivenPools, PlacementProblem
from jaxrlhf.planner.shapes import shape_of
from jaxrlhf.planner.workload import Role, Software, Workload

SCORED_TOKENS = 16_384
"""Number of tokens of one forward pass of a reward model."""


@dataclass(frozen=True)
class Lengths:
    """Expected mean numbers of tokens; None is the maximum that the configuration allows.

    Attributes:
      accepted: Expected `speculation/accepted_fraction`; None counts no drafts.
    """

    prompt_tokens: float | None = None
    response_tokens: float | None = None
    accepted: float | None = None

    def __post_init__(self) -> None:
        for name in ("prompt_tokens", "response_tokens"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise Refusal(f"the mean {name} must be above 0 and finite, got {value}")
        if self.accepted is not None and not 0 <= self.accepted <= 1:
            raise Refusal(f"accepted={self.accepted} is no share of drafted tokens; expected 0 to 1")


@dataclass(frozen=True)
class Question:
    """Placement problem, with notes on estimates and on parts that are left out."""

    problem: PlacementProblem
    notes: tuple[str, ...]


def question_of(
    config: Config, hardware: Hardware, *, lengths: Lengths | None = None, vocabulary: int | None = None
) -> Question:
    """Build the placement problem of a configuration on hardware, with notes.

    Args:
      lengths: Mean numbers of tokens, if known.
      vocabulary: Size of the tokenizer's vocabulary; None loads the tokenizer if a model is made from scratch.

    Raises:
      Refusal: The shape of a model is not known, or the configuration does not allow the lengths.
    """
    lengths = lengths or Lengths()
    shapes = _Shapes(config, vocabulary)
    roles, judges = roles_of(config, shapes), tuple(judges_of(config))
    layouts = {role: (layout,) for role, layout in configured_layouts(config).items()}
    optimizers = tuple(f"{role.name}.optimizer" for role in roles if role.trained)
    offloads = ((), optimizers, tuple(role.name for role in roles))
    problem = PlacementProblem(
        roles=roles,
        workload=workload_of(config, lengths),
        software=software_of(config, hardware, next((role.model for role in roles if role.generates), None)),
        hardware=hardware,
        offloads=(_by_role(config),) if config.offload or config.pools else offloads,
        together=(judges,) if len(judges) > 1 else (),
        layouts=layouts or None,
        pools=configured_pools(config),
        devices_per_host=None if config.cluster is None else config.cluster.devices_per_host,
    )
    return Question(problem, (*shapes.notes, *_notes(config, hardware, lengths)))


def judges_of(config: Config) -> dict[str, int]:
    """Return the index in `rewards.parts` of each reward model, by the name of its role."""
    indices = [index for index, part in enumerate(config.rewards.parts) if isinstance(part, ModelReward)]
    return {"reward" if len(indices) == 1 else f"reward_{index}": index for index in indices}


def roles_of(config: Config, shapes: Callable[[Model | str], ModelConfig]) -> tuple[Role, ...]:
    """Return the roles of the dataflow: every model, and its work in a step.

    In a step with rewards the actor generates, and every role makes one forward pass over the responses; the actor
    skips its pass if the sampler's log-probabilities are used instead. `Algorithm.further_passes` are added. Any other
    step is an update, and only frozen roles make a pass before the update. A reference that is the actor without its
    adapters is no role: the actor makes its passes.

    Args:
      shapes: Function that returns the shape of a model.
    """
    samples, own = generates(config), generates_here(config)
    found = []
    for name, spec in config.roles.items():
        if name in _unplaced(config):
            continue
        assert spec.head is not None, f"role {name} has no model head"
        settings = spec.training or config.actor
        model = shapes(spec.model or config.model)
        found.append(
            Role(
                name,
                model,
                spec.head,
                generates=own and name == "actor",
                passes=_passes(config, name),
                trained=spec.training is not None,
                tokens_per_microbatch=settings.tokens_per_microbatch,
                remat={"auto": None, "full": True, "offload": True, "none": False}[settings.remat],
                offloads=settings.remat == "offload",
                lora=None if spec.training is None else spec.training.lora,
                optimizer_bytes=None if spec.training is None else _optimizer_bytes(spec.training, model, spec.head),
                undivided=_undivided(config),
            )
        )
    for name, index in judges_of(config).items():
        part = config.rewards.parts[index]
        assert isinstance(part, ModelReward)
        judge = Role(name, shapes(part.path), "score", passes=int(samples), remat=False, within_machine=True)
        found.append(replace(judge, tokens_per_microbatch=SCORED_TOKENS))
    return tuple(found)


def _undivided(config: Config) -> tuple[str, ...]:
    """Return the parts that a run would refuse to divide; see `Role.undivided`."""
    pages = config.rollout.cache == "pages"
    parts = {"rows": bool(getattr(config.model, "vision", None)), "stage": pages, "context": pages}
    return tuple(part for part, whole in parts.items() if whole)


def _optimizer_bytes(training: Training, model: ModelConfig, head: Head) -> float | None:
    """Return the optimizer's bytes per weight; None for AdamW of all weights, which keeps two float32 moments."""
    optimizer = training.optimizer
    plain = optimizer.factory is None and optimizer.state_dtype == "float32"
    if plain and not optimizer.groups and optimizer.average_decay is None:
        return None
    declared = declare(model, head) if training.lora is None else declare_adapters(model, head, training.lora)
    return state_bytes_per_weight(optimizer, declared, layers_of(model))


def _passes(config: Config, role: str) -> int:
    algorithm = config.algorithm
    others = _passes(config, "reference") if role == "actor" and config.reference_is_frozen_actor else 0
    others += role in algorithm.further_passes
    if role == "actor" and isinstance(algorithm, PolicyGradient) and algorithm.trusts_sampler(config.rollout):
        return others
    return others + (generates(config) or role not in config.trained)


def _unplaced(config: Config) -> tuple[str, ...]:
    """Return the roles that a plan does not place.

    Reward models replace the role `reward`. The actor replaces a reference that is the actor without its adapters.
    """
    return ("reward", "reference") if config.reference_is_frozen_actor else ("reward",)


def placed_roles(config: Config) -> tuple[str, ...]:
    """Return the names of all roles that have separate weights."""
    return (*(role for role in config.roles if role not in _unplaced(config)), *judges_of(config))


def generates(config: Config) -> bool:
    """Return whether a step samples responses; such steps have rewards."""
    return "reward" in config.roles


def generates_here(config: Config) -> bool:
    """Return whether the run's own devices sample the responses, instead of servers of another engine."""
    return generates(config) and (config.rollout.server is None or config.generates_apart)


def workload_of(config: Config, lengths: Lengths) -> Workload:
    """Return the workload of one step of the algorithm.

    Raises:
      Refusal: A mean is above the configuration's maximum, or nothing drafts tokens that could be accepted.
    """
    if lengths.accepted is not None and config.rollout.speculation is None:
        raise Refusal(
            f"accepted={lengths.accepted} counts drafts, but rollout.speculation=None drafts nothing; set "
            "rollout.speculation='auto', or omit --accepted"
        )
    algorithm, rollout, means = config.algorithm, config.rollout, {}
    prompts = algorithm.problems_per_step(config.rollout)
    sequences = rollout.responses_per_prompt if generates(config) else algorithm.together
    for name in ("prompt_tokens", "response_tokens"):
        most, mean = getattr(rollout, f"max_{name}"), getattr(lengths, name)
        if mean is not None and mean > most:
            raise Refusal(f"a mean of {mean} {name} is above rollout.max_{name}={most}; lower the mean")
        means[name] = float(most if mean is None else mean)
    return Workload(
        prompts=prompts,
        responses=prompts * sequences,
        **means,
        longest_tokens=rollout.max_prompt_tokens + rollout.max_response_tokens,
        longest_prompt_tokens=rollout.max_prompt_tokens,
        updates=algorithm.updates_per_step(config.rollout),
        epochs=getattr(algorithm, "epochs_per_step", 1),
        slots=rollout.slots,
        quantize=rollout.quantize,
        together=algorithm.together,
        accepted=lengths.accepted or 0.0,
    )


def software_of(config: Config, hardware: Hardware, generator: ModelConfig | None = None) -> Software:
    """Return the software settings, with float32 masters, and activations in the compute dtype.

    Args:
      generator: Model that samples the responses; None if no model does.
    """
    compiler, dtype = compiler_of(hardware), config.compute_dtype
    if dtype == "auto":
        dtype = "float32" if hardware.shared_compute else "bfloat16"
    return Software(
        compute_bytes=4 if dtype == "float32" else 2,
        decode_tokens_per_dispatch=config.rollout.decode_tokens_per_dispatch,
        compiler=compiler,
        pages=generator is not None and uses_pages(generator, compiler, cache=config.rollout.cache),
    )


def configured_layouts(config: Config) -> dict[str, Layout]:
    """Return the layouts that a configuration fixes: all layouts if it has pools, else only non-default layouts."""
    judges = {name: config.rewards.parts[index] for name, index in judges_of(config).items()}
    layouts = {role: training.layout for role, training in config.trained.items()}
    layouts |= {name: part.layout for name, part in judges.items() if isinstance(part, ModelReward)}
    if "reference" in placed_roles(config):
        layouts["reference"] = config.reference_layout or config.actor.layout.of_training
    if config.pools:
        return layouts
    reference = ["reference"] if "reference" in layouts and config.reference_layout else []
    return {role: layout for role, layout in layouts.items() if layout != Layout() or role in reference}


def configured_pools(config: Config) -> GivenPools | None:
    """Return the roles and devices of each pool of a configuration, only roles with models; None without pools."""
    if not config.pools:
        return None
    judges = tuple(judges_of(config))
    placed = any("reward" in pool.roles for pool in config.pools)
    pools = []
    for index, pool in enumerate(config.pools):
        scores = "reward" in pool.roles or (index == 0 and not placed)
        roles = (*(role for role in pool.roles if role not in _unplaced(config)), *(judges if scores else ()))
        pools += [(roles, pool.devices)] if roles else []
    return tuple(pools)


def _by_role(config: Config) -> tuple[str, ...]:
    """Return the configuration's offload entries, with a separate entry for each reward model."""
    found: list[str] = []
    for entry in config.offload:
        role, dot, part = entry.partition(".")
        found += [f"{name}{dot}{part}" for name in judges_of(config)] if role == "reward" else [entry]
    return tuple(found)


class _Shapes:
    """Cache of the shapes of models, with notes on the source of each shape."""

    def __init__(self, config: Config, vocabulary: int | None) -> None:
        self._config, self._vocabulary = config, vocabulary
        self._known = cache(self._look_up)
        self.notes: list[str] = []

    def __call__(self, model: Model | str) -> ModelConfig:
        if not isinstance(model, Pretrained):
            return self._known(model)
        known = self._known(model.path)
        return replace(known, mtp="output") if model.mtp else known  # of the same size in every family

    def _look_up(self, model: FromScratch | Nnx | str) -> ModelConfig:
        if isinstance(model, FromScratch):
            if self._vocabulary is None:
                self._vocabulary = len(tokenizer_of(self._config))
            return from_scratch(model, tokens=self._vocabulary)
        if isinstance(model, Nnx):
            raise Refusal(
                "a plan requires the decoder of this package, but the model is your own module (Nnx); set layouts "
                "yourself, with placement='given'"
            )
        shape, source = shape_of(model)
        self.notes.append(f"the shape of {model} is from {source}")
        return shape


def _notes(config: Config, hardware: Hardware, lengths: Lengths) -> list[str]:
    notes = []
    if config.pools:
        notes.append("pools, layouts and offload are as configured; with --afresh the plan command searches them")
    elif given := [*configured_layouts(config), *(["offload"] if config.offload else [])]:
        notes.append(f"{', '.join(given)} as configured; with --afresh the plan command searches everything")
    notes += [f"figures of {hardware.name}: {hardware.source}"] if hardware.source else []
    row = config.algorithm.together * config.rollout.width
    for role, training in config.trained.items():
        if training.tokens_per_microbatch < row:
            below = "the longest sequence" if config.algorithm.together == 1 else "a pair of the longest sequences"
            notes.append(
                f"{role}: tokens_per_microbatch={training.tokens_per_microbatch} is below {below}; the "
                f"plan uses {row} for each device with its own rows"
            )
    what = "responses" if generates(config) else "solutions"
    unknown = [name for name in ("prompt", "response") if getattr(lengths, f"{name}_tokens") is None]
    if unknown:
        means = " and ".join(f"{getattr(config.rollout, f'max_{name}_tokens')} tokens of {name}" for name in unknown)
        flags = " and ".join(f"--{name}-tokens" for name in unknown)
        notes.append(
            f"all {what} are assumed to have maximal length, {means}; to set means, use {flags} of the plan command"
        )
    if generates(config) and not config.rewards.by_model:
        notes.append("the time of reward functions on the hosts is not counted")
    if generates(config) and not generates_here(config):
        notes.append("the time of rollout.server, which generates, is not counted")
    if config.rollout.speculation is not None and lengths.accepted is None:
        notes.append("drafts of rollout.speculation are not counted; to set their accepted share, use --accepted")
    if generates(config) and config.environment is not None:
        notes.append("episodes are assumed to have one turn; the time of tools and environments is not counted")
    if any(spec.max_expansion is not None for spec in config.roles.values()):
        notes.append("models with their own tokenizer are assumed to have as many tokens per text as the policy")
    if getattr(config.model, "vision", None):
        weights = "weights and " if isinstance(config.model, Pretrained) else ""
        notes.append(f"{weights}work of the vision tower are not counted")
    if getattr(config.algorithm, "max_rounds", 1) > 1:
        notes.append("each step is assumed to sample prompts once; each further round generates as many again")
    left_out = [config.algorithm.also_generates] if config.algorithm.also_generates is not None else []
    left_out += ["the algorithm's own examples"] if config.algorithm.examples(config.rollout) is not None else []
    left_out += ["evaluation", "checkpoints", *(["the cold start"] if config.cold_start else [])]
    notes.append(f"only steps are planned; {', '.join(left_out[:-1])} and {left_out[-1]} are not counted")
    return notes

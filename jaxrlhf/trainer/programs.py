"""Lowering of every program of a run, by name, for described devices: no accelerator is needed, nothing is computed.

    for name, program in lower_programs(config, tokenizer, topology(hardware("v5p-128"))).items():
        print(name, program.compile().memory_analysis())

The algorithm's own step runs on the run's own workers; they hold shapes in place of weights, and lower each program
instead of running it.
"""

import dataclasses
import json
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import jax
import numpy as np
from transformers import PreTrainedTokenizerBase

from jaxrlhf.batch import KEPT, ROUTING, Array, EpisodeRows, Pair, Problem, RolloutBatch, Scores, Sequences
from jaxrlhf.config import (
    Config,
    HubSteps,
    ModelReward,
    PolicyGradient,
    Preference,
    Pretrained,
    StepFile,
    function_of,
    override,
)
from jaxrlhf.data.labelled.steps import LabelledSteps
from jaxrlhf.data.tokenizer import embedded_tokenizer
from jaxrlhf.dataflows import remax
from jaxrlhf.dataflows.batches.scored import ScoredRollout
from jaxrlhf.dataflows.step import StepInput
from jaxrlhf.episode import EpisodeRecord
from jaxrlhf.models.config import ModelConfig
from jaxrlhf.models.from_config import model_config
from jaxrlhf.models.huggingface.config import read_fields, write_fields
from jaxrlhf.planner.apply import planned_config
from jaxrlhf.planner.compiled import CompiledProgram, compile_programs
from jaxrlhf.planner.cost.programs import ExpectedPrograms
from jaxrlhf.planner.plan import PlacementPlan, PlacementProblem
from jaxrlhf.planner.problem import judges_of
from jaxrlhf.planner.shapes import SHAPES, shape_of
from jaxrlhf.planner.topology import compiler_options
from jaxrlhf.rewards.parts import ENVIRONMENT, part_names
from jaxrlhf.sharding.described import lowering_for
from jaxrlhf.sharding.mesh import factored_mesh
from jaxrlhf.single_controller.launch import launch, split_devices
from jaxrlhf.workers.build import Phase
from jaxrlhf.workers.pool_roles import compute_dtype
from jaxrlhf.workers.score_model import ScoreModel


def lower_programs(
    config: Config, tokenizer: PreTrainedTokenizerBase, devices: Sequence[jax.Device], *, generation: bool = True
) -> dict[str, jax.stages.Lowered]:
    """Lower the programs of a step for sequences of maximum length; names are `role.program[sizes]`.

    Args:
      devices: Described devices of hardware that is not present, from `jaxrlhf.planner.topology`.
      generation: False leaves out prefill and decode, which take the longest to lower.

    Raises:
      Refusal: The devices cannot hold a layout or a token budget.
    """
    with lowering_for(devices):
        return _lowered(config, tokenizer, devices, generation=generation)


def _lowered(
    config: Config, tokenizer: PreTrainedTokenizerBase, devices: Sequence[jax.Device], *, generation: bool
) -> dict[str, jax.stages.Lowered]:
    algorithm = config.algorithm
    problems = _problems(config)
    with closing(launch(config, tokenizer, progress=lambda *_: None, workdir=None, devices=tuple(devices))) as pools:
        names = tuple(name for name in config.all_roles if name != "reward")
        updates = config.steps * algorithm.updates_per_step(config.rollout)
        with closing(pools.roles(Phase(config, names, updates))) as roles:
            if generation and "reward" in config.roles:
                roles.actor.compile_generation([config.rollout.max_prompt_tokens]).result()
            work: StepInput[Any] = StepInput(
                config, problems, config.steps - 1, algorithm.initial_state(), None, _examples(config)
            )
            collected: Any = problems
            if isinstance(algorithm, PolicyGradient):
                model = model_config(config.model, tokenizer)
                collected = _scored(config, problems, model, each=config.rollout.responses_per_prompt)
                if function_of(algorithm, "collect") is remax.collect:
                    collected = dataclasses.replace(collected, beside=_scored(config, problems, model, each=1))
            function_of(algorithm, "learn")(roles, work, collected).with_updates()
            return roles.lowered() | _reward_models(config, devices)


def _reward_models(config: Config, devices: Sequence[jax.Device]) -> dict[str, jax.stages.Lowered]:
    """Lower the programs of reward models, for the longest text of the step."""
    longest, programs = config.rollout.max_prompt_tokens + config.rollout.max_response_tokens, {}
    for name, index in judges_of(config).items():
        part = config.rewards.parts[index]
        assert isinstance(part, ModelReward)
        own = next(own for pool, own in split_devices(config, devices) if "reward" in pool.roles)
        mesh = factored_mesh(part.layout, own, role="reward")
        dtype = compute_dtype(config, own)
        programs[f"{name}.forward"] = ScoreModel(part.path, mesh=mesh, dtype=dtype).lower(longest)
    return programs


def compile_plan(
    config: Config,
    problem: PlacementProblem,
    plan: PlacementPlan,
    devices: Sequence[jax.Device],
    *,
    progress: Callable[[str, int, int], None] = lambda name, done, total: None,
) -> list[CompiledProgram]:
    """Compile every program of a plan with the compiler for these devices; the devices need not be present.

    Args:
      devices: Described devices from `jaxrlhf.planner.topology`, as many as the plan's hardware has.
      progress: Called with the name of the next program, the number compiled so far, and the total.

    Raises:
      Refusal: A setting does not fit the devices, or their compiler rejects a program.
    """
    return compile_programs(
        lower_plan(config, problem, plan, devices),
        ExpectedPrograms(problem, plan),
        options=compiler_options(problem.hardware),
        progress=progress,
    )


def lower_plan(
    config: Config,
    problem: PlacementProblem,
    plan: PlacementPlan,
    devices: Sequence[jax.Device],
    *,
    generation: bool = True,
) -> dict[str, jax.stages.Lowered]:
    """Lower every program of a plan; for arguments and errors see `compile_plan` and `lower_programs`."""
    expected = ExpectedPrograms(problem, plan)
    config = planned_config(config, plan)
    roles = {role: role if role == "actor" else f"algorithm.{role}" for role in expected.remat}
    config = override(config, {f"{roles[role]}.remat": how for role, how in expected.remat.items()})
    with TemporaryDirectory() as folder:
        return lower_programs(described(config, Path(folder)), embedded_tokenizer(), devices, generation=generation)


def described(config: Config, folder: Path) -> Config:
    """Replace each checkpoint of the configuration by a folder with a config.json and no weights.

    The config.json is the checkpoint's own, or written from a built-in shape.

    Raises:
      Refusal: The shape of a checkpoint cannot be found.
    """
    paths: dict[str, str] = {}

    def stand_in(path: str) -> str:
        if path not in paths:
            paths[path] = str(folder / f"checkpoint_{len(paths)}")
            model, _ = shape_of(path)
            Path(paths[path]).mkdir()
            fields = write_fields(model, "lm", dtype="bfloat16") if path in SHAPES else read_fields(path)
            Path(paths[path], "config.json").write_text(json.dumps(fields), encoding="utf-8")
        return paths[path]

    def described_in(value: Any) -> Any:
        if isinstance(value, Pretrained | ModelReward):
            return dataclasses.replace(value, path=stand_in(value.path))
        if isinstance(value, tuple):
            return tuple(map(described_in, value))
        if not dataclasses.is_dataclass(value) or isinstance(value, type):
            return value
        changed = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        changed = {name: described_in(own) for name, own in changed.items()}
        return dataclasses.replace(value, **changed)

    return dataclasses.replace(described_in(config), tokenizer=None)


def _problems(config: Config) -> Sequence[Problem]:
    """Make a step's records, with texts of maximum length."""
    solved = _solved(config, config.algorithm.problems_per_step(config.rollout))
    if isinstance(config.algorithm, Preference):
        return [Pair(**vars(one), rejected_tokens=one.solution_tokens, safe=(True, False)) for one in solved]
    if isinstance(config.data, StepFile | HubSteps):
        ends = (config.rollout.max_response_tokens - 1,)
        return [LabelledSteps(**vars(one), step_ends=ends, step_labels=(True,)) for one in solved]
    return solved


def _examples(config: Config) -> Sequence[Problem]:
    """Make records of the algorithm's own data set."""
    examples = config.algorithm.examples(config.rollout)
    return () if examples is None else _solved(config, examples[1])


def _solved(config: Config, count: int) -> list[Problem]:
    prompt, answer = (1,) * config.rollout.max_prompt_tokens, (1,) * (config.rollout.max_response_tokens - 1)
    return [Problem(number, "", prompt, "", answer) for number in range(count)]


def _scored(config: Config, problems: Sequence[Problem], model: Any, *, each: int) -> ScoredRollout:
    """Make responses to the problems, or episodes of one turn, of maximum length; every other one is right.

    Args:
      each: Number of responses to a problem.
    """
    rollout = config.rollout
    count, width = each * len(problems), rollout.max_prompt_tokens + rollout.max_response_tokens
    mask_BT = np.tile(np.arange(width) >= rollout.max_prompt_tokens, (count, 1))
    recorded: dict[str, Array] = {}
    if rollout.replay_routing and isinstance(model, ModelConfig):
        recorded[ROUTING] = np.zeros((count, width, *model.routed_choices), np.int16)
    if most_kept := rollout.sampling.most_kept:
        recorded[KEPT] = np.zeros((count, width, most_kept), np.int32)
    sequences = Sequences(
        token_BT=np.ones((count, width), np.int32),
        length_B=np.full(count, width, np.int32),
        mask_BT=mask_BT,
        prompt_id_B=np.repeat([problem.prompt_id for problem in problems], each),
        recorded=recorded,
    )
    zeros_BT, cut_B, good_B = np.zeros(mask_BT.shape, np.float32), np.zeros(count, bool), np.ones(count, bool)
    score_B = np.arange(count, dtype=np.float32) % 2
    parts: dict[str, Array] = dict.fromkeys(part_names(config.rewards.parts), score_B)
    episodes = None
    if config.environment is not None:
        turn_BT, record_B = np.where(mask_BT, 0, -1), np.full(count, EpisodeRecord([], [], "done"), object)
        episodes = EpisodeRows(np.arange(count), turn_BT.astype(np.int16), zeros_BT, turn_BT, record_B)
        parts[ENVIRONMENT] = score_B
    batch = RolloutBatch(sequences, zeros_BT, cut_B, np.zeros(mask_BT.shape, np.int32), episodes)
    return ScoredRollout(problems, batch, Scores(score_B, good_B, parts), trained_B=good_B)

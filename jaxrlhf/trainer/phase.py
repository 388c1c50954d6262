"""Phases of a run (the cold start and the main phase): data, workers, checkpoints and log around a training loop."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from transformers import PreTrainedTokenizerBase

from jaxrlhf.agent_loop.prompts import EpisodePrompts
from jaxrlhf.batch import Problem
from jaxrlhf.checkpoint import Checkpoints
from jaxrlhf.config import Config, PolicyGradient, Refusal, to_json
from jaxrlhf.data import Loader
from jaxrlhf.data.images import ImageReader
from jaxrlhf.data.loader import Band, Part
from jaxrlhf.data.selection import Selected, selected
from jaxrlhf.data.sources import Loaded, load_problems
from jaxrlhf.data.tokenizer import decoder
from jaxrlhf.models import AnyModel, CausalLM, model_config
from jaxrlhf.models.huggingface.save import save_description
from jaxrlhf.models.vision.reader import image_reader, processor_of
from jaxrlhf.single_controller.pools import Pools
from jaxrlhf.single_controller.stall import StallWatch
from jaxrlhf.tracking import Logger
from jaxrlhf.trainer.asynchronous.off_policy import OffPolicy
from jaxrlhf.trainer.auto_placement import Placed
from jaxrlhf.trainer.evaluation import HeldOutSet
from jaxrlhf.trainer.failures import afterwards
from jaxrlhf.trainer.log import PhaseLog
from jaxrlhf.trainer.loop import Loop, OnStep
from jaxrlhf.trainer.resume import changed_settings, describe_start
from jaxrlhf.trainer.schedule import Synchronous
from jaxrlhf.trainer.signals import Stop
from jaxrlhf.trainer.workdir import CHECKPOINTS, MODEL
from jaxrlhf.workers.build import Phase


@dataclass(frozen=True)
class RunData:
    """Tokenized problems of a run.

    Attributes:
      train: Training split.
      evaluation: Held-out split.
      held_out: Problems of the held-out split to evaluate on, the first ones of each source.
      selected: Training problems that are used, for each source.
      sets: Further evaluation sets.
      examples: Algorithm's own data set, if it has one.
    """

    train: Loaded
    evaluation: Loaded
    held_out: Sequence[Problem]
    selected: Sequence[Selected]
    sets: Sequence[HeldOutSet] = ()
    examples: Loaded | None = None

    def loader(self, config: Config) -> Loader:
        """Make the loader of a phase's training problems."""
        selection, weights = config.selection, [source.weight for source in config.sources] or [1.0]
        names = [name for name, _ in self.train.problems.sources]
        columns = zip(self.selected, weights, names, strict=True)
        return Loader(
            self.train.problems,
            per_step=config.algorithm.problems_per_step(config.rollout),
            seed=config.seed,
            fingerprint=self.train.problems.fingerprint,
            parts=[Part(one.kept, weight, name) for one, weight, name in columns],
            shuffle=selection.order == "shuffled",
            band=Band(*selection.band) if selection.online else None,
        )

    def example_loader(self, config: Config) -> Loader | None:
        """Make the loader of the algorithm's own data set; None if it has none."""
        wanted = config.algorithm.examples(config.rollout)
        if wanted is None:
            return None
        assert self.examples is not None
        problems = self.examples.problems
        return Loader(problems, per_step=wanted[1], seed=config.seed, fingerprint=problems.fingerprint)


def load_data(config: Config, tokenizer: Any) -> RunData:
    """Read and tokenize the data of a run.

    Raises:
      Refusal: A file cannot be read, or no problem of a split fits the limits.
    """
    limits = _limits(config, tokenizer)
    labelled = config.algorithm.positions_after is not None  # `_limits` limits its answers in both splits
    alike = [phase for phase in config.phases if same_problems(phase, config)]
    supervised = not labelled and any(phase.algorithm.reads_solutions for phase in alike)
    solutions: dict[str, Any] = {"max_solution_tokens": config.rollout.max_response_tokens}
    train = load_problems(config.data, tokenizer, split="train", **limits, **(solutions if supervised else {}))
    evaluation = load_problems(config.data, tokenizer, split="evaluation", **limits)
    examples = None
    if (wanted := config.algorithm.examples(config.rollout)) is not None:
        examples = load_problems(wanted[0], tokenizer, split="train", **limits, **solutions)
    chosen = [selected(train.problems, index, config.selection) for _, index in train.problems.sources]
    sets = load_sets(config, tokenizer)
    return RunData(train, evaluation, first_of_sources(evaluation, config), chosen, sets, examples)


def same_problems(phase: Config, config: Config) -> bool:
    """Return True if a phase uses the problems of its run."""
    return (phase.data, phase.rollout.max_prompt_tokens) == (config.data, config.rollout.max_prompt_tokens)


def first_of_sources(evaluation: Loaded, config: Config) -> list[Problem]:
    """Return the first held-out problems of each source."""
    most, table = config.evaluation.problems, evaluation.problems
    return [table[n] for _, index in table.sources for n in index[:most].tolist()]


def load_sets(config: Config, tokenizer: Any) -> list[HeldOutSet]:
    """Read and tokenize the further evaluation sets.

    Raises:
      Refusal: A file cannot be read, or a data set has no held-out split.
    """
    sets = []
    for given in config.evaluation.sets:
        problems = load_problems(given, tokenizer, split="evaluation", **_limits(config, tokenizer)).problems
        if not len(problems):
            raise Refusal(f"evaluation set {given.name!r} has no held-out split; set a split in its data settings")
        sets.append(HeldOutSet(given, problems[: given.problems]))
    return sets


def load_split(config: Config, tokenizer: Any, split: Literal["train", "evaluation"]) -> Loaded:
    """Read and tokenize one split alone; for errors see `load_data`."""
    return load_problems(config.data, tokenizer, split=split, **_limits(config, tokenizer))


def _reader(config: Config, tokenizer: Any) -> ImageReader | None:
    """Make the reader of images; None for models that read text alone."""
    if not getattr(config.model, "vision", None):
        return None
    return image_reader(config, model_config(config.model, tokenizer), tokenizer)


def _limits(config: Config, tokenizer: Any) -> dict[str, Any]:
    """Return keyword arguments of `load_problems`: token limits, and readers of images and of episode records."""
    limits: dict[str, Any] = {"max_prompt_tokens": config.rollout.max_prompt_tokens}
    limits |= {"reader": _reader(config, tokenizer), "system_prompt": config.system_prompt}
    limits["environment_key"] = getattr(config.environment, "field", None)
    if config.environment is not None:
        limits["episodes"] = EpisodePrompts(config.environment, tokenizer)
    if (after := config.algorithm.positions_after) is not None:  # both splits have answers
        limits["max_solution_tokens"] = config.rollout.max_response_tokens - after
    return limits


class PhaseProgress:
    """Progress of long tasks, shown on the console of the current phase's log."""

    def __init__(self) -> None:
        self.log: PhaseLog | None = None
        self.beat: Callable[[], None] = lambda: None

    def __call__(self, task: str, done: int, total: int) -> None:
        self.beat()
        log = self.log
        if log is not None:
            log.console.progress(task, done, total)


@dataclass(frozen=True)
class RunContext:
    """Context shared by the phases of a run.

    Attributes:
      given: Configuration as the user gave it.
      launched: Configuration with its placement filled in.
      data: Problems of the run.
      cold_data: Problems of the first phase, the cold start if there is one.
      placed: Placement under `placement='auto'`; None if the user placed the roles.
      stop: Request to save and end after the step in progress.
      start_s: Start of the phase on the clock of `time.perf_counter`.
    """

    given: Config
    launched: Config
    model: AnyModel
    tokenizer: PreTrainedTokenizerBase
    data: RunData
    progress: PhaseProgress
    cold_data: RunData
    placed: Placed | None = None
    stop: Stop = field(default_factory=Stop)
    start_s: float = 0.0

    @property
    def workdir(self) -> Path:
        """Folder of the run."""
        return self.launched.folder

    def describe(self) -> None:
        """Write the run's configuration, its placement, and the description of its model, without weights."""
        describe_start(self.workdir, self.given)
        if self.placed is not None:
            self.placed.write(self.workdir)
        if isinstance(self.model, CausalLM):  # a user's module, which only the configuration's file can build
            return
        source = getattr(self.launched.model, "path", None)
        # A checkpoint's own tokenizer is copied as it is.
        tokenizer = None if source is not None and self.launched.tokenizer is None else self.tokenizer
        save_description(self.model, self.workdir / MODEL, tokenizer=tokenizer, source=source)
        if source is None and (tower := getattr(self.launched.model, "vision", None)):
            processor_of(tower).save_pretrained(self.workdir / MODEL)


def run_phase(
    context: RunContext,
    config: Config,
    pools: Pools,
    start: Path | None,
    *,
    held_out: Sequence[Problem] = (),
    sets: Sequence[HeldOutSet] = (),
    on_step: OnStep | None = None,
    loggers: Sequence[Logger] = (),
) -> Path | None:
    """Run one phase.

    Args:
      config: Configuration of the phase.
      start: Checkpoint item that the policy starts from; None is the configuration's model.

    Returns:
      Checkpoint folder of the trained policy; None if the phase was stopped before its last step.
    """
    algorithm, data = config.algorithm, context.data
    total = config.steps * algorithm.updates_per_step(config.rollout)
    roles = pools.roles(Phase(config, tuple(config.all_roles), total, start))
    saving = config.saving
    checkpoints = Checkpoints(
        config.folder / CHECKPOINTS,
        keep_last=saving.keep_last,
        keep_best=saving.keep_best or 0,
        on_damage=saving.on_damage,
    )
    generates = "reward" in config.roles or (held_out and config.answers_held_out)
    train_lengths = data.train.problems.prompt_tokens.lengths.tolist() if generates else []
    evaluated = [*(held_out if generates else ()), *(problem for one in sets for problem in one.problems)]
    held_out_lengths = [len(problem.prompt_tokens) for problem in evaluated]
    if config.rollout.over_provision > 1 and config.environment is None:  # continued responses are prefilled, too
        longest = config.rollout.max_prompt_tokens
        train_lengths = [*train_lengths, *range(longest + 1, longest + config.rollout.max_response_tokens)]
    kind = OffPolicy if config.rollout.staleness and isinstance(algorithm, PolicyGradient) else Synchronous
    schedule = kind(config, roles, data.loader(config), data.example_loader(config))
    loop = Loop(
        config=config,
        roles=roles,
        schedule=schedule,
        held_out=held_out,
        sets=sets,
        checkpoints=checkpoints,
        log=_log_opener(context, config, loggers),
        decode=decoder(context.tokenizer),
        prompt_lengths=[*train_lengths, *held_out_lengths],
        on_step=on_step,
        stop=context.stop,
    )
    wait, watch = True, StallWatch(config.stall, roles.timeline, loop.doing)
    context.progress.beat = watch.beat
    with afterwards("closing the checkpoints", checkpoints.close):
        try:
            with watch:
                return checkpoints.folder(config.steps, "actor") if loop.run() else None
        except BaseException as error:
            pools.close()  # ends calls that nobody waits for anymore
            wait = not isinstance(error, KeyboardInterrupt)
            raise
        finally:
            schedule.close()
            roles.close(wait=wait)
            context.progress.log = None


def _log_opener(context: RunContext, config: Config, loggers: Sequence[Logger]) -> Callable[[int], PhaseLog]:
    """Return a function that opens the phase's log, given the number of steps already done."""

    def open_log(done: int) -> PhaseLog:
        going_on = 0 < done < config.steps
        changed = changed_settings(context.workdir, context.given) if going_on else []
        if done < config.steps:  # only now: a checkpoint that does not fit was refused without changing its run
            context.describe()
        log = PhaseLog(
            config.folder,
            steps=config.steps,
            first_step=done,
            loggers=loggers,
            trackers=config.trackers if done < config.steps else (),  # a finished run reports nothing
            settings=to_json(config),
            start_s=context.start_s,
        )
        context.progress.log = log
        if going_on:
            log.console.print(resuming(config, done))
        elif done:
            over = f"all {done} steps are done; to train further, raise steps or choose another workdir"
            log.console.print(f"{config.name}: {over}")
        if changed:
            log.console.print(f"settings changed since the last start: {', '.join(changed)}")
        return log

    return open_log


def resuming(config: Config, done: int) -> str:
    """Return the line that a resumed phase prints."""
    return f"{config.name}: resuming after step {done} of {config.steps}"

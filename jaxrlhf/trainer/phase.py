"""One phase of a run, its cold start or itself: data, workers, checkpoints and log around a loop."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from jaxrlhf.agent_loop.prompts import EpisodePrompts
from jaxrlhf.batch import Problem
from jaxrlhf.checkpoint import Checkpoints
from jaxrlhf.config import SFT, Config, PolicyGradient, Preference, to_json
from jaxrlhf.data import Loader
from jaxrlhf.data.images import ImageReader
from jaxrlhf.data.sources import Loaded, load_problems
from jaxrlhf.data.tokenizer import decoder
from jaxrlhf.models import AnyModel, CausalLM, model_config
from jaxrlhf.models.huggingface.save import save_description
from jaxrlhf.models.vision.reader import image_reader, processor_of
from jaxrlhf.single_controller.pools import Pools
from jaxrlhf.tracking import Logger
from jaxrlhf.trainer.asynchronous.off_policy import OffPolicy
from jaxrlhf.trainer.auto_placement import Placed
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
    """Tokenised problems of a run.

    Attributes:
      train: The training split.
      evaluation: The held-out split.
      held_out: The first problems of that split, which are evaluated on.
      examples: The algorithm's own data, if it has some.
    """

    train: Loaded
    evaluation: Loaded
    held_out: Sequence[Problem]
    examples: Loaded | None = None

    def loader(self, config: Config) -> Loader:
        """The training problems in the order of a phase."""
        return _loader(self.train, config.algorithm.problems_per_step(config), config)

    def example_loader(self, config: Config) -> Loader | None:
        """The algorithm's own data in the order of a phase."""
        wanted = config.algorithm.examples(config)
        if wanted is None:
            return None
        assert self.examples is not None
        return _loader(self.examples, wanted[1], config)


def _loader(split: Loaded, per_step: int, config: Config) -> Loader:
    return Loader(split.problems, per_step=per_step, seed=config.seed, fingerprint=split.problems.fingerprint)


def load_data(config: Config, tokenizer: Any) -> RunData:
    """Read and tokenise the data of a run.

    Raises:
      Refusal: Files that cannot be read, or splits without a problem that fits.
    """
    limits = _limits(config, tokenizer)
    supervised = any(isinstance(phase.algorithm, SFT) for phase in config.phases)
    if isinstance(config.algorithm, Preference):
        supervised = False
    solutions: dict[str, Any] = {"max_solution_tokens": config.rollout.max_response_tokens}
    train = load_problems(config.data, tokenizer, split="train", **limits, **(solutions if supervised else {}))
    evaluation = load_problems(config.data, tokenizer, split="evaluation", **limits)
    examples = None
    if (wanted := config.algorithm.examples(config)) is not None:
        examples = load_problems(wanted[0], tokenizer, split="train", **limits, **solutions)
    return RunData(train, evaluation, evaluation.problems[: config.evaluation.problems], examples)


def load_evaluation(config: Config, tokenizer: Any) -> Loaded:
    """Read and tokenise the held-out split alone; errors as of `load_data`."""
    return load_problems(config.data, tokenizer, split="evaluation", **_limits(config, tokenizer))


def _reader(config: Config, tokenizer: Any) -> ImageReader | None:
    """Reader of images; None for models that read text alone."""
    if not getattr(config.model, "vision", None):
        return None
    return image_reader(config, model_config(config.model, tokenizer), tokenizer)


def _limits(config: Config, tokenizer: Any) -> dict[str, Any]:
    """Limits of tokens, and readers of images and of episodes' records."""
    limits: dict[str, Any] = {"max_prompt_tokens": config.rollout.max_prompt_tokens}
    limits["reader"] = _reader(config, tokenizer)
    if config.environment is not None:
        limits["episodes"] = EpisodePrompts(config.environment, tokenizer)
    if isinstance(config.algorithm, Preference):  # answers are read in both splits
        limits["max_solution_tokens"] = config.rollout.max_response_tokens - config.algorithm.places_after
    return limits


class PhaseProgress:
    """The progress of long tasks, shown by the log of the phase that runs."""

    def __init__(self) -> None:
        self.log: PhaseLog | None = None

    def __call__(self, task: str, done: int, total: int) -> None:
        log = self.log
        if log is not None:
            log.console.progress(task, done, total)


@dataclass(frozen=True)
class RunContext:
    """Everything that the phases of a run share.

    Attributes:
      given: The configuration as the user gave it.
      launched: The configuration with its placement filled in.
      placed: The placement that the search found, if it placed the roles.
      stop: Asks to save and end after the step in progress.
    """

    given: Config
    launched: Config
    model: AnyModel
    tokenizer: PreTrainedTokenizerBase
    data: RunData
    progress: PhaseProgress
    placed: Placed | None = None
    stop: Stop = field(default_factory=Stop)

    @property
    def workdir(self) -> Path:
        """Folder of the run."""
        return self.launched.folder

    def describe(self) -> None:
        """Write the run's configuration, its placement, and its model but for the weights."""
        describe_start(self.workdir, self.given)
        if self.placed is not None:
            self.placed.write(self.workdir)
        if isinstance(self.model, CausalLM):  # only the configuration's file can make it
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
    on_step: OnStep | None = None,
    loggers: Sequence[Logger] = (),
) -> Path | None:
    """Run one phase.

    Args:
      config: Configuration of the phase.
      start: Checkpoint item that its policy starts from; None is the configuration's model.

    Returns:
      Where the trained policy lies; None if the phase was stopped before its last step.
    """
    algorithm, data = config.algorithm, context.data
    total = config.steps * algorithm.updates_per_step(config)
    roles = pools.roles(Phase(config, tuple(config.all_roles), total, start))
    checkpoints = Checkpoints(
        config.folder / CHECKPOINTS, keep_last=config.checkpoint.keep_last, keep_best=config.checkpoint.keep_best
    )
    generates = "reward" in config.roles or (held_out and algorithm.evaluation is None)
    train_lengths = data.train.problems.prompt_tokens.lengths.tolist() if generates else []
    held_out_lengths = [len(problem.prompt_tokens) for problem in held_out] if generates else []
    kind = OffPolicy if config.rollout.staleness and isinstance(algorithm, PolicyGradient) else Synchronous
    schedule = kind(config, roles, data.loader(config), data.example_loader(config))
    loop = Loop(
        config=config,
        roles=roles,
        schedule=schedule,
        held_out=held_out,
        checkpoints=checkpoints,
        log=_log_opener(context, config, loggers),
        decode=decoder(context.tokenizer),
        prompt_lengths=[*train_lengths, *held_out_lengths],
        on_step=on_step,
        stop=context.stop,
    )
    wait = True
    with afterwards("letting go of the checkpoints", checkpoints.close):
        try:
            return checkpoints.folder(config.steps, "actor") if loop.run() else None
        except BaseException as error:
            pools.close()  # ends calls that nobody waits for any more
            wait = not isinstance(error, KeyboardInterrupt)
            raise
        finally:
            schedule.close()
            roles.close(wait=wait)
            context.progress.log = None


def _log_opener(context: RunContext, config: Config, loggers: Sequence[Logger]) -> Callable[[int], PhaseLog]:
    """A function that opens the phase's log, given the steps already done."""

    def open_log(done: int) -> PhaseLog:
        going_on = 0 < done < config.steps
        changed = changed_settings(context.workdir, context.given) if going_on else []
        if done < config.steps:  # and only now: a checkpoint that does not fit was refused, its run left as it was
            context.describe()
        log = PhaseLog(
            config.folder,
            steps=config.steps,
            first_step=done,
            loggers=loggers,
            trackers=config.trackers if done < config.steps else (),  # a run that is over has nothing to tell them
            settings=to_json(config),
        )
        context.progress.log = log
        if going_on:
            log.console.print(resuming(config, done))
        elif done:
            over = f"all {done} steps are done; raise steps, or choose another workdir, to train on"
            log.console.print(f"{config.name}: {over}")
        if changed:
            log.console.print(f"settings that are not as before: {', '.join(changed)}")
        return log

    return open_log


def resuming(config: Config, done: int) -> str:
    """The line that a phase prints when it goes on after some steps."""
    return f"{config.name}: step {done} of {config.steps} is done, going on from there"

"""A whole run: from a configuration to a trained policy."""

import fcntl
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from jaxrlhf.batch import Problem
from jaxrlhf.checkpoint import Checkpoints
from jaxrlhf.config import ROLLOUT, SFT, Config, Preference, Refusal, function_of
from jaxrlhf.data import Loaded, Loader, decoder, load_problems, load_tokenizer
from jaxrlhf.models import AnyModel, OwnModel, model_config, tokenizer_path
from jaxrlhf.models.huggingface.save import save_description
from jaxrlhf.resharding.wire import TransferError
from jaxrlhf.single_controller.launch import launch
from jaxrlhf.single_controller.pools import Pools
from jaxrlhf.single_controller.ray.failure import HostDied, HostHung, HostNotStarted
from jaxrlhf.tracking import Logger, MetricsWriter, SettingsTable, default_console
from jaxrlhf.trainer.failures import afterwards
from jaxrlhf.trainer.log import StageLog
from jaxrlhf.trainer.loop import Loop, OnStep
from jaxrlhf.trainer.placement import Placed, place
from jaxrlhf.trainer.resume import changed_settings, check_same_start, describe_start
from jaxrlhf.trainer.signals import Stop, stopped_by_signals
from jaxrlhf.trainer.summary import settings_rows
from jaxrlhf.workers.build import Phase

CHECKPOINTS = "checkpoints"
MODEL = "model"
LOCK = "lock"
STOPPED = "stopped after saving; the same command goes on from"


@dataclass(frozen=True)
class Data:
    """The problems of a run, tokenised.

    Attributes:
      train: The training split.
      evaluation: The held-out split.
      held_out: What is evaluated on: the first problems of that split.
      examples: Of the algorithm's own data, if it has some.
    """

    train: Loaded
    evaluation: Loaded
    held_out: list[Problem]
    examples: Loaded | None = None


@dataclass(frozen=True)
class RunResult:
    """What a run left behind.

    Attributes:
      workdir: Checkpoints, metrics, samples and pictures.
      finished: False if it was asked to stop before its last step.
    """

    workdir: Path
    finished: bool


def run(
    config: Config, *, on_step: OnStep | None = None, loggers: Sequence[Logger] = (), dry_run: bool = False
) -> RunResult:
    """Run a configuration to its end, resuming if its workdir holds a checkpoint.

    SIGTERM, Ctrl-C and the stop button of a notebook end it after the step in progress, which is saved. A second
    Ctrl-C ends it at once.

    Args:
      on_step: Called after every step of the main stage with its number and metrics.
      loggers: Of yours, beside the built-in ones; they see the metrics of the main stage and are closed at the end.
        After a restart they see the steps since the last checkpoint again.
      dry_run: Stop after the table of derived settings; nothing is compiled or written.

    Raises:
      Refusal: Settings, data, tokenizer and checkpoint that do not fit, before any compile.
      KeyboardInterrupt: After Ctrl-C, and once all is saved: cells or runs that were to follow shall not.
    """
    function_of(config.algorithm, "dataflow")  # refuses what is no step before anything is read
    tokenizer = load_tokenizer(tokenizer_path(config))
    model = model_config(config.model, tokenizer)
    data = load_data(config, tokenizer)
    for stage in config.stages:  # refuses too few problems now, and not after the cold start
        _loader(stage, data)
        _example_loader(stage, data)
    workdir = config.folder
    placed = place(config, workdir, vocabulary=len(tokenizer)) if config.placement == "auto" else None
    display, launched = Display(), config if placed is None else placed.config
    shared = Shared(config, launched, model, tokenizer, data, workdir, display, on_step, loggers, placed)
    with afterwards("closing a logger", MetricsWriter(loggers).close), nullcontext() if dry_run else _held(workdir):
        finished = _with_restarts(shared, dry_run=dry_run)
    if shared.stop.interrupted:
        raise KeyboardInterrupt(f"{'finished' if finished else STOPPED} {workdir}")
    return RunResult(workdir, finished)


@contextmanager
def _held(workdir: Path) -> Iterator[None]:
    """Makes the folder, and keeps other runs out of it: they would cut off this one's metrics and clear its saves."""
    try:
        workdir.mkdir(parents=True, exist_ok=True)
        lock = open(workdir / LOCK, "w")  # noqa: SIM115  open until the end of the block
    except OSError as error:
        raise Refusal(f"workdir {workdir} cannot be written to: {error}; choose another") from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise Refusal(f"another run is at work in {workdir}; wait for its end, or choose another") from error
        except OSError as error:
            text = f"{workdir} is on a file system without locks ({error}); see to it that no other run uses it"
            default_console().print(text, markup=False, highlight=False, soft_wrap=True)
        yield


class Display:
    """Passes the progress of long phases on to the log of the stage that runs."""

    def __init__(self) -> None:
        self.log: StageLog | None = None

    def progress(self, phase: str, done: int, total: int) -> None:
        log = self.log
        if log is not None:
            log.console.progress(phase, done, total)


@dataclass(frozen=True)
class Shared:
    """What the stages of a run share.

    Attributes:
      run_config: The configuration as it was given.
      config: Of the stage.
      placed: By the search, if that places the roles.
    """

    run_config: Config
    config: Config
    model: AnyModel
    tokenizer: PreTrainedTokenizerBase
    data: Data
    workdir: Path
    display: Display
    on_step: OnStep | None
    loggers: Sequence[Logger]
    placed: Placed | None = None
    pools: Pools | None = None
    stop: Stop = field(default_factory=Stop)


def _with_restarts(shared: Shared, *, dry_run: bool) -> bool:
    """Run, and launch anew from the last checkpoint as often as the cluster's settings allow after a host failed."""
    cluster = shared.config.cluster
    left = 0 if cluster is None or dry_run else cluster.restarts
    while True:
        try:
            return _launch_and_run(shared, dry_run=dry_run)
        except (HostDied, HostHung, HostNotStarted, TransferError) as failure:
            if left == 0 or shared.stop.asked:
                raise
            left -= 1
            text = f"{failure}\nlaunching anew from the last checkpoint; {left} more would be allowed"
            default_console().print(text, markup=False, highlight=False, soft_wrap=True)
            shared = replace(shared, config=replace(shared.config, resume=True))


def _launch_and_run(shared: Shared, *, dry_run: bool) -> bool:
    """Launch the pools, show what the configuration comes down to, and run; whether the run came to its end."""
    config, data = shared.config, shared.data
    folder = None if dry_run else shared.workdir
    with closing(launch(config, shared.tokenizer, progress=shared.display.progress, workdir=folder)) as pools:
        rows = settings_rows(config, shared.model, pools, data.train, data.evaluation, data.examples)
        default_console().print(SettingsTable(rows, title=config.name))
        if dry_run:
            return False
        _check_workdir(shared.workdir, config)
        return _run_stages(replace(shared, pools=pools))


def load_data(config: Config, tokenizer: Any) -> Data:
    """The training problems, and as many held-out ones as are evaluated on."""
    limits = {"max_prompt_tokens": config.rollout.max_prompt_tokens}
    supervised = any(isinstance(stage.algorithm, SFT) for stage in config.stages)
    if isinstance(config.algorithm, Preference):  # answers are read in both splits
        limits["max_solution_tokens"] = config.rollout.max_response_tokens - config.algorithm.places_after
        supervised = False
    solutions = {"max_solution_tokens": config.rollout.max_response_tokens} if supervised else {}
    train = load_problems(config.data, tokenizer, split="train", **limits, **solutions)
    evaluation = load_problems(config.data, tokenizer, split="evaluation", **limits)
    examples = None
    if (own := config.algorithm.examples(config)) is not None:
        solutions = {"max_solution_tokens": config.rollout.max_response_tokens}
        examples = load_problems(own[0], tokenizer, split="train", **limits, **solutions)
    return Data(train, evaluation, evaluation.problems[: config.evaluation.problems], examples)


def _check_workdir(workdir: Path, config: Config) -> None:
    saved = [path for stage in config.stages for path in stage.folder.glob(f"{CHECKPOINTS}/*")]
    if saved and not config.resume:
        raise Refusal(f"{workdir} already holds a run and resume is off; choose another workdir, delete it, or resume")
    if any(workdir.glob(f"{CHECKPOINTS}/*")):
        check_same_start(workdir, config)


def _describe(shared: Shared) -> None:
    """Write what the run is: its configuration, its placement, and its model but for the weights."""
    config = shared.config
    describe_start(shared.workdir, shared.run_config)
    if shared.placed is not None:
        shared.placed.write(shared.workdir)
    if isinstance(shared.model, OwnModel):  # which only the configuration's file can make
        return
    source = getattr(config.model, "path", None)
    # A checkpoint's own tokenizer is copied as it is.
    tokenizer = None if source is not None and config.tokenizer is None else shared.tokenizer
    save_description(shared.model, shared.workdir / MODEL, tokenizer=tokenizer, source=source)


def _run_stages(shared: Shared) -> bool:
    """Run the stages one after another; return whether the last came to its end."""
    *first, _ = shared.config.stages
    start, quiet = None, replace(shared, data=replace(shared.data, held_out=[]), on_step=None, loggers=())
    with stopped_by_signals(shared.stop):
        for stage in first:
            start = _trained(stage) or _run_stage(replace(quiet, config=stage), start)
            if start is None or shared.stop.asked:
                return False
        return _run_stage(shared, start) is not None


def _trained(config: Config) -> Path | None:
    """The policy of a stage that is over, in its checkpoint."""
    if not (config.folder / CHECKPOINTS).is_dir():
        return None
    with closing(Checkpoints(config.folder / CHECKPOINTS, read_only=True)) as checkpoints:
        if checkpoints.latest() != config.steps:
            return None
        default_console().print(_going_on(config, config.steps), markup=False, highlight=False, soft_wrap=True)
        return checkpoints.folder(config.steps, "actor")


def _going_on(config: Config, done: int) -> str:
    return f"{config.name}: step {done} of {config.steps} is done, going on from there"


def _loader(config: Config, data: Data) -> Loader:
    per_step = config.algorithm.problems_per_step(config)
    problems = data.train.problems
    return Loader(problems, per_step=per_step, seed=config.seed, fingerprint=problems.fingerprint)


def _example_loader(config: Config, data: Data) -> Loader | None:
    """Of the algorithm's own data, if it has some."""
    own = config.algorithm.examples(config)
    if own is None:
        return None
    assert data.examples is not None
    problems = data.examples.problems
    return Loader(problems, per_step=own[1], seed=config.seed, fingerprint=problems.fingerprint)


def _run_stage(shared: Shared, start: Path | None) -> Path | None:
    """Run one stage from a policy on disk, or from the configuration's model.

    Returns:
      Where the trained policy lies; None if the stage was interrupted.
    """
    config, algorithm = shared.config, shared.config.algorithm
    assert shared.pools is not None
    total = config.steps * algorithm.updates_per_step(config)
    roles = shared.pools.roles(Phase(config, (*algorithm.roles, ROLLOUT, "reward"), total, start))
    checkpoints = Checkpoints(
        config.folder / CHECKPOINTS, keep_last=config.checkpoint.keep_last, keep_best=config.checkpoint.keep_best
    )

    def open_log(done: int) -> StageLog:
        changed = changed_settings(shared.workdir, shared.run_config) if done else []
        if done < config.steps:  # and only now: a checkpoint that does not fit was refused, its run left as it was
            _describe(shared)
        shared.display.log = StageLog(config.folder, steps=config.steps, first_step=done, loggers=shared.loggers)
        if done:
            over = f"{config.name}: all {done} steps are done; raise steps, or choose another workdir, to train on"
            shared.display.log.console.print(over if done == config.steps else _going_on(config, done))
        if changed and done < config.steps:
            shared.display.log.console.print(f"settings that are not as before: {', '.join(changed)}")
        return shared.display.log

    generates = "reward" in algorithm.roles or (shared.data.held_out and algorithm.evaluation is None)
    train_lengths = shared.data.train.problems.prompt_tokens.lengths.tolist() if generates else []
    held_out_lengths = [len(problem.prompt_tokens) for problem in shared.data.held_out] if generates else []
    loop = Loop(
        config=config,
        roles=roles,
        loader=_loader(config, shared.data),
        examples=_example_loader(config, shared.data),
        held_out=shared.data.held_out,
        checkpoints=checkpoints,
        log=open_log,
        decode=decoder(shared.tokenizer),
        prompt_lengths=[*train_lengths, *held_out_lengths],
        on_step=shared.on_step,
        stop=shared.stop,
    )
    wait = True
    with afterwards("letting go of the checkpoints", checkpoints.close):
        try:
            return checkpoints.folder(config.steps, "actor") if loop.run() else None
        except BaseException as error:
            shared.pools.close()  # ends calls that nobody waits for any more
            wait = not isinstance(error, KeyboardInterrupt)
            raise
        finally:
            roles.close(wait=wait)
            shared.display.log = None

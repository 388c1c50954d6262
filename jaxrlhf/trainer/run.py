"""Entry point of a run: `run` trains a policy from a configuration."""

import time
from collections.abc import Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from jaxrlhf.checkpoint import Checkpoints, Damaged, check_local
from jaxrlhf.config import Config, ModelReward, Pretrained, Refusal, checked, function_of
from jaxrlhf.dataflows.step import Metrics
from jaxrlhf.models import model_config, tokenizer_of
from jaxrlhf.models.config import Head
from jaxrlhf.resharding.wire import TransferError
from jaxrlhf.single_controller.launch import launch
from jaxrlhf.single_controller.ray.failure import HostDied, HostHung, HostNotStarted, HostRaised
from jaxrlhf.tracking import Logger, MetricsWriter, SettingsTable, default_console, require_packages, say
from jaxrlhf.trainer.auto_placement import place
from jaxrlhf.trainer.failures import afterwards
from jaxrlhf.trainer.log import last_metrics
from jaxrlhf.trainer.loop import OnStep
from jaxrlhf.trainer.phase import PhaseProgress, RunContext, load_data, resuming, run_phase, same_problems
from jaxrlhf.trainer.resume import check_same_start
from jaxrlhf.trainer.settings_summary import settings_rows
from jaxrlhf.trainer.signals import stopped_by_signals
from jaxrlhf.trainer.workdir import CHECKPOINTS, locked
from jaxrlhf.workers.pool_roles import check_vocabulary

RELAUNCHABLE = (HostDied, HostHung, HostNotStarted, TransferError)
"""Failures after which hosts may be relaunched; a `HostRaised` may have one of these as its cause."""

STOPPED = "stopped after saving; the same command continues from"


@dataclass(frozen=True)
class RunResult:
    """Result of a run.

    Attributes:
      workdir: Folder of the run's checkpoints, metrics, samples and pictures.
      finished: False if the run was stopped before its last step.
      metrics: Metrics of the last completed step; empty for a dry run.
    """

    workdir: Path
    finished: bool
    metrics: Metrics = field(default_factory=dict)

    @property
    def accuracy(self) -> float | None:
        """`eval/accuracy` of the last step; None if it was not evaluated."""
        return self.metrics.get("eval/accuracy")


def run(
    config: Config, *, on_step: OnStep | None = None, loggers: Sequence[Logger] = (), dry_run: bool = False
) -> RunResult:
    """Run a configuration to its end, resuming if its workdir holds a checkpoint.

    SIGTERM, Ctrl-C and the stop button of a notebook end the run after the step in progress, which is saved. A second
    Ctrl-C ends the run at once. Failed hosts are relaunched as often as the cluster's settings allow.

    Args:
      on_step: Called after every step of the main phase with the step's number and metrics.
      loggers: Loggers in addition to the built-in ones; they get the metrics of the main phase and are closed at the
        end. After a restart they get the steps since the last checkpoint again.
      dry_run: True stops after the table of derived settings; nothing is compiled or written.

    Raises:
      Refusal: Settings, data, tokenizer or checkpoint do not fit; raised before any compilation.
      KeyboardInterrupt: Raised after Ctrl-C once everything is saved, so that following cells or runs do not start.
    """
    if not isinstance(config, Config):
        raise Refusal(f"run requires a Config, got {config!r}; load a configuration file or name with jaxrlhf.load")
    context = _prepared(checked(config))
    cluster, workdir = context.launched.cluster, context.workdir
    restarts = 0 if cluster is None or dry_run else cluster.restarts
    with afterwards("closing a logger", MetricsWriter(loggers).close), nullcontext() if dry_run else locked(workdir):
        for left in reversed(range(restarts + 1)):
            try:
                finished = _launch_and_run(context, on_step, loggers, dry_run=dry_run)
                break
            except (*RELAUNCHABLE, HostRaised) as failure:
                fatal = isinstance(failure, HostRaised) and not isinstance(failure.__cause__, RELAUNCHABLE)
                if fatal or left == 0 or context.stop.asked:
                    raise
                say(f"{failure}\nrelaunching from the last checkpoint; {left - 1} more relaunches are allowed")
                launched = replace(context.launched, resume=True)
                context = replace(context, launched=launched, start_s=time.perf_counter())
    if context.stop.interrupted:
        raise KeyboardInterrupt(f"{'finished' if finished else STOPPED} {workdir}")
    return RunResult(workdir, finished, {} if dry_run else last_metrics(workdir))


def _prepared(config: Config) -> RunContext:
    """Read and check everything that a run needs before its devices: algorithm, tokenizer, model, data, placement."""
    start_s = time.perf_counter()
    function_of(config.algorithm, "collect")
    function_of(config.algorithm, "learn")
    require_packages(config.trackers)
    tokenizer = tokenizer_of(config)
    model = model_config(config.model, tokenizer)
    data = load_data(config, tokenizer)
    read = [data if same_problems(phase, config) else load_data(phase, tokenizer) for phase in config.phases]
    for phase, problems in zip(config.phases, read, strict=True):
        problems.loader(phase)  # refuses too few problems now, not after the cold start
        problems.example_loader(phase)
    placed = place(config, config.folder, vocabulary=len(tokenizer)) if config.placement == "auto" else None
    launched = config if placed is None else placed.config
    return RunContext(config, launched, model, tokenizer, data, PhaseProgress(), read[0], placed, start_s=start_s)


def _launch_and_run(context: RunContext, on_step: OnStep | None, loggers: Sequence[Logger], *, dry_run: bool) -> bool:
    """Launch the pools, print the derived settings and run all phases; return True if the last phase finished."""
    config, data, stop = context.launched, context.data, context.stop
    workdir = None if dry_run else context.workdir
    with closing(launch(config, context.tokenizer, progress=context.progress, workdir=workdir)) as pools:
        rows = settings_rows(config, context.model, pools, data)
        default_console().print(SettingsTable(rows, title=config.name))
        if dry_run:
            _check_checkpoints(config, context.tokenizer)
            return False
        _check_workdir(config)
        with stopped_by_signals(stop):
            start = None
            for phase in config.phases[:-1]:
                start = _trained(phase) or run_phase(replace(context, data=context.cold_data), phase, pools, start)
                if start is None or stop.asked:
                    return False
                context = replace(context, start_s=time.perf_counter())
            policy = run_phase(
                context,
                config,
                pools,
                start,
                held_out=data.held_out,
                sets=data.sets,
                on_step=on_step,
                loggers=loggers,
            )
            return policy is not None


def _check_checkpoints(config: Config, tokenizer: PreTrainedTokenizerBase) -> None:
    """Refuse local checkpoints that the run could not start from; only the headers of their files are read."""
    wanted: list[tuple[Pretrained, Head]] = [(config.model, "lm")] if isinstance(config.model, Pretrained) else []
    for spec in (spec for phase in config.phases for spec in phase.roles.values()):
        if spec.model is not None and spec.head is not None:
            wanted.append((spec.model, spec.head))
            if spec.max_expansion is None:
                check_vocabulary(tokenizer, model_config(spec.model, tokenizer), role=spec.name)
    scores = (part for part in config.rewards.parts if isinstance(part, ModelReward))
    wanted += [(Pretrained(part.path), "score") for part in scores]
    for model, head in dict.fromkeys(wanted):
        check_local(model.path, head, vision=model.vision, mtp=model.mtp)


def _check_workdir(config: Config) -> None:
    """Refuse a workdir with checkpoints that the run may not, or could not, resume from."""
    workdir = config.folder
    saved = [path for phase in config.phases for path in phase.folder.glob(f"{CHECKPOINTS}/*")]
    if saved and not config.resume:
        raise Refusal(
            f"{workdir} already holds a run, but resume=False; set resume=True, choose another workdir, or delete "
            "the folder"
        )
    if any(workdir.glob(f"{CHECKPOINTS}/*")):
        check_same_start(workdir, config)


def _trained(phase: Config) -> Path | None:
    """Return the policy of a finished phase, in its last checkpoint; None if the phase is not finished.

    Raises:
      Damaged: The last checkpoint is damaged, and was not passed over.
    """
    folder = phase.folder / CHECKPOINTS
    if not folder.is_dir():
        return None
    with closing(Checkpoints(folder, on_damage=phase.saving.on_damage)) as checkpoints:
        if checkpoints.latest() != phase.steps:
            return None
        try:
            policy = checkpoints.checked_folder(phase.steps, "actor")
        except Damaged as damage:
            checkpoints.pass_over(phase.steps, damage)
            return None  # the phase resumes from the checkpoint before
        say(resuming(phase, phase.steps))
        return policy

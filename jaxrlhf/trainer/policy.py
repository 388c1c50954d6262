"""Trained policies outside their run: export in Hugging Face format, and evaluation of any checkpoint."""

from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import jax
import jax.numpy as jnp
from transformers import PreTrainedTokenizerBase

from jaxrlhf.batch import Diverged, Params
from jaxrlhf.checkpoint import Checkpoints
from jaxrlhf.checkpoint.items import read_named, stored_shapes
from jaxrlhf.config import COLD_START, ROLLOUT, Config, Nnx, Pretrained, Refusal, Sampling, checked
from jaxrlhf.data.tokenizer import decoder, load_tokenizer, misread
from jaxrlhf.dataflows.step import Metrics
from jaxrlhf.models import read_config, sees, tokenizer_of
from jaxrlhf.models.config import Head
from jaxrlhf.models.huggingface.load import Progress
from jaxrlhf.models.huggingface.save import check_new, save_each
from jaxrlhf.models.parameters import param_shapes, path_name
from jaxrlhf.optimizers.average import place_of
from jaxrlhf.single_controller.launch import launch
from jaxrlhf.single_controller.pools import Roles
from jaxrlhf.tracking import RunConsole, SettingsTable, say, show_samples
from jaxrlhf.trainer.auto_placement import placed_for_evaluation
from jaxrlhf.trainer.evaluation import evaluate, evaluations
from jaxrlhf.trainer.lora_export import SUFFIX, AdaptedRun, checkpoint_of, placed
from jaxrlhf.trainer.phase import first_of_sources, load_sets, load_split
from jaxrlhf.trainer.publishing.card import Exported, write_card
from jaxrlhf.trainer.samples import to_samples
from jaxrlhf.trainer.workdir import CHECKPOINTS, MODEL
from jaxrlhf.workers.build import Phase

_NO_FORMAT = "a user-defined module (Nnx), which has no Hugging Face format"


def export_policy(
    run: str | Path,
    directory: str | Path,
    *,
    step: int | None = None,
    dtype: str = "float32",
    merge: bool = False,
    average: bool = False,
    name: str | None = None,
    progress: Progress = lambda done, total: None,
) -> int:
    """Write the trained policy or reward model of a run as a Hugging Face checkpoint, with tokenizer and model card.

    Only one parameter is in memory at a time. Adapters are written in `peft` format. A line is printed if
    `AutoTokenizer` would not load the tokenizer unchanged.

    Args:
      run: Workdir of the run.
      step: Step of the checkpoint; None is the newest.
      merge: True writes whole weights with the trained adapters added.
      average: True writes the average of the weights that `Optimizer.average_decay` keeps.
      name: Name of the model in its card, such as the name on the hub; None is the directory's name.
      progress: Called with the number of bytes written so far and the total.

    Returns:
      The exported step.

    Raises:
      Refusal: There is no such run or checkpoint, or the directory already holds files.
    """
    run, directory = Path(run).expanduser(), check_new(directory)
    model = run / MODEL
    if run.name == COLD_START and (run.parent / MODEL).is_dir():
        raise Refusal(
            f"{run} is the cold start of the run in {run.parent}, and only whole runs are exported; export "
            f"{run.parent}, or train with algorithm=SFT in a separate run"
        )
    if not model.is_dir() and (run / CHECKPOINTS).is_dir():
        raise Refusal(f"{run} trained {_NO_FORMAT}")
    if not model.is_dir():
        raise Refusal(f"{run} has no {MODEL} folder, so it is not the workdir of a run")
    config = read_config(model, vision=sees(model))
    with closing(Checkpoints(run / CHECKPOINTS, read_only=True)) as checkpoints:
        step = chosen_step(checkpoints, step)
        # A run without a policy trains a reward model: a critic without an actor.
        held = checkpoints.holds(step)
        trained = held & {"actor", f"actor{SUFFIX}"}
        role: Literal["actor", "critic"] = "actor" if trained else "critic"
        head: Head = "lm" if trained else "value"
        if average:
            optimizer = f"{role}_optimizer"
            folder = (checkpoints.checked_folder if optimizer in held else checkpoints.folder)(step, optimizer)
            arrays = average_of(folder, param_shapes(config, head, jnp.float32))
        elif role + SUFFIX in held:
            adapted = AdaptedRun.of(run, role, checkpoints.state(step))
            adapters = adapted.adapters(checkpoints, step, role, config, head)
            if not merge:
                tokenizer = load_tokenizer(str(model))
                adapted.save(adapters, config, head, directory, tokenizer=tokenizer, dtype=dtype, progress=progress)
                write_card(run, directory, Exported(step, scores=not trained, adapters=True, name=name))
                return step
            arrays = adapted.merged(adapters, config, head)
        elif merge:
            raise Refusal(f"{run} trained whole weights, so there are no adapters to merge; omit --merge")
        else:
            arrays = checkpoints.read_each(step, role, placed(param_shapes(config, head, jnp.float32)))
        save_each(arrays, config, head, directory, dtype=dtype, progress=progress, source=model)
    write_card(run, directory, Exported(step, scores=not trained, average=average, name=name))
    if note := misread(directory):
        say(note)
    return step


def average_of(optimizer: Path, shapes: Params) -> Iterator[tuple[str, jax.Array]]:
    """Read the average of the weights from an optimizer's saved state, one parameter after another."""
    place = place_of(stored_shapes(optimizer)) if optimizer.is_dir() else None
    if place is None:
        raise Refusal(
            f"{optimizer} holds no average of the weights; omit --average, or train with Optimizer.average_decay"
        )
    wanted = {f"{place}.{path_name(path)}": shape for path, shape in jax.tree.leaves_with_path(placed(shapes))}
    return ((name.removeprefix(f"{place}."), array) for name, array in read_named(optimizer, wanted))


def check_exportable(config: Config, *, merge: bool = False, average: bool = False) -> None:
    """Raise `Refusal` if `export_policy` would refuse the model that a run of the configuration trains."""
    if isinstance(config.model, Nnx):
        raise Refusal(f"the run trains {_NO_FORMAT}")
    training = config.trained
    trained = training["actor" if "actor" in training else "critic"]
    if average and trained.optimizer.average_decay is None:
        raise Refusal("the run keeps no average of the weights; omit --average, or set Optimizer.average_decay")
    if trained.lora is not None and not merge:
        checkpoint_of(config.model, cold_start=config.cold_start is not None)
    if trained.lora is None and merge:
        raise Refusal("the run trains whole weights, so there are no adapters to merge; omit --merge")


@dataclass(frozen=True)
class ChosenPolicy:
    """Policy that answers prompts outside of its run.

    Attributes:
      config: Configuration with the policy as its model.
      name: Path or hub id of the policy, with the step of a run's checkpoint.
      step: Step of a run's checkpoint; 0 if the policy is not from a run.
      phase: Roles that answer and score, and the location of their weights.
    """

    config: Config
    name: str
    step: int
    phase: Phase
    tokenizer: PreTrainedTokenizerBase

    @contextmanager
    def roles(self, console: RunConsole) -> Iterator[Roles]:
        """Launch the policy's roles for the duration of the block."""
        with (
            _naming_the_policy(self.name),
            closing(launch(self.config, self.tokenizer, progress=console.progress, workdir=None)) as pools,
            closing(pools.roles(self.phase)) as roles,
        ):
            yield roles


def choose_policy(config: Config, policy: str | None, step: int | None = None) -> ChosenPolicy:
    """Find the policy that answers with the settings of a configuration.

    Args:
      policy: Workdir of a run, or a Hugging Face checkpoint; None is the configuration's workdir.
      step: Step of a run's checkpoint; None is the newest.

    Raises:
      Refusal: There is no such policy or checkpoint.
    """
    place = config.folder if policy is None else Path(policy).expanduser()
    described = (place / MODEL).is_dir()
    own = isinstance(config.model, Nnx) and not described and (place / CHECKPOINTS).is_dir()
    from_run = own or described
    if policy is None and not from_run:
        raise Refusal(f"{place} holds no run to evaluate; train first, or pass a checkpoint with --policy")
    if step is not None and not from_run:
        raise Refusal(f"--step {step} requires the workdir of a run, but {policy} is none; omit --step")
    path = str(place / MODEL if from_run else policy)
    model = config.model if own else Pretrained(path, vision=bool(getattr(config.model, "vision", None)) and sees(path))
    # The servers belong to the training run, which may still be in progress.
    rollout = replace(config.rollout, server=None)
    config = replace(config, model=model, actor=replace(config.actor, lora=None), rollout=rollout)
    tokenizer = tokenizer_of(config)
    if config.placement == "auto":
        config = placed_for_evaluation(config, place)
    start = adapters = None
    if from_run:
        with closing(Checkpoints(place / CHECKPOINTS, read_only=True)) as checkpoints:
            step = chosen_step(checkpoints, step)
            held, saved = checkpoints.holds(step), checkpoints.state(step)
            start, adapters = (
                checkpoints.checked_folder(step, item) if item in held else None for item in ("actor", f"actor{SUFFIX}")
            )
        if adapters is not None:
            run = AdaptedRun.of(place, "actor", saved)
            actor = replace(config.actor, lora=run.lora)
            config, start = replace(config, model=run.model, seed=run.seed, actor=actor), run.trained_weights
        elif start is None:
            raise Refusal(f"{place} trained no policy, and evaluation requires one; choose another run")
    phase = Phase(config, ("actor", ROLLOUT, "reward"), total_updates=1, policy=start, adapters=adapters)
    name = f"{place}, step {step}" if from_run else str(policy)
    return ChosenPolicy(config, name, step or 0, phase, tokenizer)


def evaluate_policy(config: Config, *, policy: str | None, samples: int, show: int, step: int | None = None) -> Metrics:
    """Answer the held-out problems of a configuration, and print the accuracy and some answers.

    Args:
      policy: Workdir of a run, or a Hugging Face checkpoint; None is the configuration's workdir.
      samples: Answers per problem; 1 decodes greedily, more are sampled as in the configuration's rollout.
      show: Number of answers to print.
      step: Step of a run's checkpoint; None is the newest.

    Raises:
      Refusal: Settings contradict each other, nothing can be evaluated, or there is no such policy.
    """
    config = checked(config)
    if "actor" not in config.roles:
        raise Refusal(
            f"{type(config.algorithm).__name__} trains no policy, and evaluation requires one; see the run's metrics "
            "for its accuracy on held-out pairs"
        )
    if not (config.rewarded or config.evaluation.sets):  # evaluation sets have rewards of their own
        raise Refusal("rewards.parts is empty, but evaluation scores responses; set at least one reward")
    chosen = choose_policy(config, policy, step)
    config, tokenizer = chosen.config, chosen.tokenizer
    held_out = first_of_sources(load_split(config, tokenizer, "evaluation"), config) if config.rewarded else []
    sets = load_sets(config, tokenizer)
    if not (held_out or sets):
        raise Refusal("the configuration's data has no evaluation split; set one in data")
    with RunConsole(steps=0) as console, chosen.roles(console) as roles:
        metrics, decode = Metrics(), decoder(tokenizer)
        if held_out:
            sampling = config.rollout.sampling if samples > 1 else Sampling(greedy=True)
            metrics, scored = evaluate(roles, config, held_out, decode, sampling=sampling, samples=samples)
            answers = to_samples(chosen.step, scored, decode)[: show * samples : samples]
        for own, scored in evaluations(roles, config, (), sets, decode):
            metrics |= own
            answers = answers if held_out else to_samples(chosen.step, scored, decode)[:show]
    show_samples(answers, source=chosen.name)
    rows = [("evaluation", name.removeprefix("eval/"), f"{value:.4g}", "") for name, value in metrics.items()]
    console.print(SettingsTable(rows, title=chosen.name))
    return metrics


@contextmanager
def _naming_the_policy(policy: str) -> Iterator[None]:
    """Replace a `Diverged` of the block by an error that names the policy; the workers' message is about training."""
    try:
        yield
    except Diverged as error:
        raise Diverged(
            f"the policy of {policy} returns logits that are not finite, because its weights diverged or "
            "overflow; evaluate an earlier checkpoint with --step, or train again with a lower learning rate"
        ) from error


def chosen_step(checkpoints: Checkpoints, step: int | None) -> int:
    """Return the requested step, or the newest step if None; raise `Refusal` if there is no such checkpoint."""
    chosen = checkpoints.latest() if step is None else step
    if chosen is None or chosen not in checkpoints.steps():
        which = "" if chosen is None else f" of step {chosen}"
        raise Refusal(f"{checkpoints.directory} has no checkpoint{which}; it has {checkpoints.steps()}")
    return chosen

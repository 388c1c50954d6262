"""Trained policies outside their run: export in Hugging Face format, and evaluation of any checkpoint."""

from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import jax
import jax.numpy as jnp
from transformers import PreTrainedTokenizerBase

from jaxrlhf.batch import Diverged, Params
from jaxrlhf.checkpoint.items import read_named, stored_shapes
from jaxrlhf.config import ROLLOUT, Config, Nnx, Pretrained, Refusal, Sampling, checked
from jaxrlhf.data.tokenizer import decoder, load_tokenizer, misread
from jaxrlhf.dataflows.step import Metrics
from jaxrlhf.models import read_config, sees, tokenizer_of
from jaxrlhf.models.huggingface.load import Progress
from jaxrlhf.models.huggingface.save import check_new, save_each
from jaxrlhf.models.parameters import param_shapes, path_name
from jaxrlhf.optimizers.average import place_of
from jaxrlhf.single_controller.launch import launch
from jaxrlhf.single_controller.pools import Roles
from jaxrlhf.tracking import RunConsole, SettingsTable, say, show_samples
from jaxrlhf.trainer.auto_placement import placed_for_evaluation
from jaxrlhf.trainer.evaluation import evaluate, evaluations
from jaxrlhf.trainer.phase import first_of_sources, load_sets, load_split
from jaxrlhf.trainer.publishing.card import Exported, write_card
from jaxrlhf.trainer.samples import to_samples
from jaxrlhf.trainer.saved_policy import (
    NO_FORMAT,
    SUFFIX,
    SavedPolicy,
    checkpoint_of,
    find_policy,
    find_run,
    placed,
)
from jaxrlhf.workers.build import Phase


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
    saved = find_run(run, step, reward_model=True)
    model, head = saved.description, saved.head
    config = read_config(model, vision=sees(model), mtp=saved.mtp)
    if merge and saved.adapted is None and not average:
        raise Refusal(f"{run} trained whole weights, so there are no adapters to merge; omit --merge")
    alone = None if merge or average else saved.adapted
    if alone is not None:
        tokenizer = load_tokenizer(model)
        alone.save(saved.adapters(config), config, head, directory, tokenizer=tokenizer, dtype=dtype, progress=progress)
    elif average:
        arrays = average_of(saved.folder(f"{saved.role}_optimizer"), param_shapes(config, head, jnp.float32))
        save_each(arrays, config, head, directory, dtype=dtype, progress=progress, source=model)
    else:
        save_each(saved.weights(config), config, head, directory, dtype=dtype, progress=progress, source=model)
    adapters, scores = alone is not None, saved.role == "critic"
    write_card(run, directory, Exported(saved.step, scores=scores, adapters=adapters, average=average, name=name))
    if alone is None and (note := misread(directory)):
        say(note)
    return saved.step


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
        raise Refusal(f"the run trains {NO_FORMAT}")
    training = config.trained
    trained = training["actor" if "actor" in training else "critic"]
    if average and trained.optimizer.average_decay is None:
        raise Refusal("the run keeps no average of the weights; omit --average, or set Optimizer.average_decay")
    if trained.lora is not None and not merge:
        checkpoint_of(config.model, cold_start=config.cold_start is not None)
    if trained.lora is None and merge:
        raise Refusal("the run trains whole weights, so there are no adapters to merge; omit --merge")


@dataclass(frozen=True)
class PolicyRoles:
    """Roles that answer prompts with a saved policy, and score the responses.

    Attributes:
      config: Configuration with the policy as its model.
      phase: Roles, and the location of their weights.
    """

    config: Config
    saved: SavedPolicy
    phase: Phase
    tokenizer: PreTrainedTokenizerBase

    @contextmanager
    def launched(self, console: RunConsole) -> Iterator[Roles]:
        """Launch the roles for the duration of the block."""
        with (
            _naming_the_policy(self.saved.name),
            closing(launch(self.config, self.tokenizer, progress=console.progress, workdir=None)) as pools,
            closing(pools.roles(self.phase)) as roles,
        ):
            yield roles


def policy_roles(config: Config, policy: str | None, step: int | None = None) -> PolicyRoles:
    """Return the roles that answer with a policy and the settings of a configuration.

    Args:
      policy: Policy as in `find_policy`; None is the run in the configuration's workdir.
      step: Step of a run's checkpoint; None is the newest.

    Raises:
      Refusal: There is no such policy or checkpoint.
    """
    saved = find_run(config.folder, step) if policy is None else find_policy(policy, step)
    model = config.model
    if saved.is_described or not isinstance(model, Nnx):
        path = saved.description
        model = Pretrained(
            path,
            vision=bool(getattr(model, "vision", None)) and sees(path),
            mtp=getattr(model, "mtp", False) and saved.mtp,
        )
    # The servers belong to the training run, which may still be in progress.
    rollout = replace(config.rollout, server=None)
    config = replace(config, model=model, actor=replace(config.actor, lora=None), rollout=rollout)
    tokenizer = tokenizer_of(config)
    if config.placement == "auto":
        config = placed_for_evaluation(config, Path(saved.source))
    start = adapters = None
    if saved.adapted is not None:
        run, adapters = saved.adapted, saved.folder(f"actor{SUFFIX}")
        actor = replace(config.actor, lora=run.lora)
        config = replace(config, model=run.model, seed=run.seed, actor=actor)
        start = None if run.cold_start is None else run.cold_start.folder("actor")
    elif saved.run is not None:
        start = saved.folder("actor")
    phase = Phase(config, ("actor", ROLLOUT, "reward"), total_updates=1, policy=start, adapters=adapters)
    return PolicyRoles(config, saved, phase, tokenizer)


def evaluate_policy(config: Config, *, policy: str | None, samples: int, show: int, step: int | None = None) -> Metrics:
    """Answer the held-out problems of a configuration, and print the accuracy and some answers.

    Args:
      policy: Policy as in `find_policy`; None is the run in the configuration's workdir.
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
    found = policy_roles(config, policy, step)
    config, tokenizer, saved = found.config, found.tokenizer, found.saved
    held_out = first_of_sources(load_split(config, tokenizer, "evaluation"), config) if config.rewarded else []
    sets = load_sets(config, tokenizer)
    if not (held_out or sets):
        raise Refusal("the configuration's data has no evaluation split; set one in data")
    with RunConsole(steps=0) as console, found.launched(console) as roles:
        metrics, decode = Metrics(), decoder(tokenizer)
        if held_out:
            sampling = config.rollout.sampling if samples > 1 else Sampling(greedy=True)
            metrics, scored = evaluate(roles, config, held_out, decode, sampling=sampling, samples=samples)
            answers = to_samples(saved.step, scored, decode)[: show * samples : samples]
        for own, scored in evaluations(roles, config, (), sets, decode):
            metrics |= own
            answers = answers if held_out else to_samples(saved.step, scored, decode)[:show]
    show_samples(answers, source=saved.name)
    rows = [("evaluation", name.removeprefix("eval/"), f"{value:.4g}", "") for name, value in metrics.items()]
    console.print(SettingsTable(rows, title=saved.name))
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

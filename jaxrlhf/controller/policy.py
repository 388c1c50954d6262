"""Trained policies outside their run: export to Hugging Face, evaluation from any checkpoint."""

from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from jaxrlhf.architecture import ModelConfig
from jaxrlhf.batch import Params
from jaxrlhf.checkpoint import Checkpoints
from jaxrlhf.config import Config, Optimizer, Pretrained, Sampling
from jaxrlhf.controller.evaluation import evaluate
from jaxrlhf.controller.log import to_samples
from jaxrlhf.controller.run import CHECKPOINTS, MODEL, load_data, tokenizer_path, workdir_of
from jaxrlhf.controller.step import Metrics
from jaxrlhf.data import load_tokenizer
from jaxrlhf.models.hf_config import read_config
from jaxrlhf.models.hf_save import save_params
from jaxrlhf.models.parameters import param_shapes
from jaxrlhf.parallel import ResourcePool
from jaxrlhf.tracking import RunConsole, settings_table, show_samples
from jaxrlhf.workers import Builder


def export_policy(run: str | Path, directory: str | Path, *, step: int | None = None, dtype: str = "float32") -> int:
    """Write the policy of a run as a Hugging Face checkpoint with its tokenizer.

    Args:
      run: Workdir of the run.
      step: Which checkpoint; None is the newest.

    Returns:
      The step that was exported.

    Raises:
      ValueError: No run, no such checkpoint, or the directory already holds files.
    """
    run, directory = Path(run), Path(directory)
    if directory.exists() and any(directory.iterdir()):
        raise ValueError(f"{directory} is not empty; export to a new directory")
    model = run / MODEL
    if not model.is_dir():
        raise ValueError(f"{run} is not the workdir of a run: it has no {MODEL} folder")
    config = read_config(model)
    whole = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    layout = jax.tree.map(lambda _: whole, param_shapes(config, "lm", jnp.float32))
    params, step = _restore_policy(run, _targets(config, layout), step=step)
    save_params(params, config, directory, dtype=jnp.dtype(dtype), tokenizer=load_tokenizer(str(model)), source=model)
    return step


def evaluate_policy(config: Config, *, policy: str | None, samples: int, show: int) -> Metrics:
    """Answer the held-out problems of a configuration and print accuracy and some answers.

    Args:
      policy: A run's workdir or a Hugging Face checkpoint; None is the configuration's workdir.
      samples: Answers per problem; above 1 they are sampled as in the configuration's rollout.
      show: Answers to print.
    """
    place = Path(policy) if policy else workdir_of(config)
    from_run = (place / MODEL).is_dir()
    if policy is None and not from_run:
        raise ValueError(f"{place} holds no run to evaluate; train first, or name a checkpoint with --policy")
    model = Pretrained(str(place / MODEL if from_run else policy))
    config = replace(config, model=model, cold_start=None)
    tokenizer = load_tokenizer(tokenizer_path(config))
    held_out = load_data(config, tokenizer).held_out
    if not held_out:
        raise ValueError("the configuration's data has no evaluation split; name one in its data settings")
    pool = ResourcePool.of_all(config.devices)
    console = RunConsole(steps=1)
    with console, closing(Builder(config, tokenizer, pool, progress=console.progress)) as builder:
        start = (
            _restore_policy(place, _targets(builder.model, builder.layout))[0] if from_run else builder.initial_actor()
        )
        roles = builder.roles(("actor",), start, optimizer=Optimizer(), total_updates=1, seed=config.seed)
        with closing(roles):
            sampling = config.rollout.sampling if samples > 1 else Sampling(greedy=True)
            metrics, rollout, scores = evaluate(roles, held_out, sampling=sampling, samples=samples)
            answers = to_samples(0, held_out, roles.reward.worker.responses(rollout), rollout, scores)
    show_samples(answers[: show * samples : samples])
    rows = [("evaluation", name.removeprefix("eval/"), f"{value:.4g}", "") for name, value in metrics.items()]
    console.print(settings_table(rows, title=str(place)))
    return metrics


def _targets(config: ModelConfig, layout: Any) -> Params:
    """What the policy's parameters are restored into."""
    return jax.tree.map(
        lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
        param_shapes(config, "lm", jnp.float32),
        layout,
    )


def _restore_policy(run: Path, target: Params, *, step: int | None = None) -> tuple[Params, int]:
    """The actor's parameters of one checkpoint of a run, and its step."""
    checkpoints = Checkpoints(run / CHECKPOINTS, read_only=True)
    try:
        step = checkpoints.latest() if step is None else step
        if step is None or step not in checkpoints.steps():
            raise ValueError(f"{run / CHECKPOINTS} has no checkpoint of step {step}; it has {checkpoints.steps()}")
        params = checkpoints.read(step, {"actor": target})["actor"]
    finally:
        checkpoints.close()
    return params, step

"""Workdirs of runs that were made instead of trained: every file of a run, and a checkpoint of zeros at step 2."""

import json
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
from tiny_runs import get_config

from jaxrlhf.checkpoint import Checkpoints, TreeItem
from jaxrlhf.config import GRPO, Config, Lora, to_json
from jaxrlhf.models import model_config, param_shapes, tokenizer_of
from jaxrlhf.models.huggingface.save import save_description
from jaxrlhf.models.lora.lora import adapter_shapes

LORA = Lora(rank=2, alpha=32.0)


def made_config(workdir: Path, lora: Lora | None) -> Config:
    """GRPO without a cold start, of whole weights or of adapters."""
    config = replace(get_config(), cold_start=None, algorithm=GRPO(responses_per_update=16), workdir=str(workdir))
    return replace(config, actor=replace(config.actor, lora=lora))


def make_run(workdir: Path, lora: Lora | None = None) -> Config:
    """Make a run's workdir, and return its configuration."""
    config = made_config(workdir, lora)
    tokenizer = tokenizer_of(config)
    model = model_config(config.model, tokenizer)
    save_description(model, workdir / "model", tokenizer=tokenizer)
    shapes = param_shapes(model, "lm") if lora is None else adapter_shapes(model, "lm", lora)
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), shapes)
    name, adapters = ("actor", {}) if lora is None else ("actor_adapters", {"actor": to_json(lora)})
    with closing(Checkpoints(workdir / "checkpoints")) as checkpoints:
        checkpoints.save(2, {name: TreeItem(lambda: zeros, lambda _: None)}, {"step": 2, "adapters": adapters})
    (workdir / "config.json").write_text(json.dumps(to_json(config)))
    for file in ("metrics.jsonl", "samples.jsonl", "evaluation.jsonl"):
        (workdir / file).write_text('{"step": 1}\n{"step": 2}\n')
    for file in ("lock", "timeline.json", "curve.png", "timeline.png", "reward_output.log"):
        (workdir / file).touch()
    return config

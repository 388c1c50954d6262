"""A run whose model has a layer for the second next token: it drafts, is trained along, resumed and exported."""

from dataclasses import replace

import drafted
import jax
import numpy as np
import pytest
from placed_runs import assert_resumed, cut_after
from safetensors.numpy import load_file
from tiny_checkpoints import build, write
from tiny_runs import get_config, numbers, training

import jaxrlhf
from jaxrlhf import models
from jaxrlhf.config import GRPO, Checkpointing, Evaluation, Pretrained
from jaxrlhf.data.tokenizer import embedded_tokenizer
from jaxrlhf.engine.speculation.choice import Speculation
from jaxrlhf.trainer.policy import export_policy
from jaxrlhf.trainer.served_policy.flags import EngineSizes
from jaxrlhf.trainer.served_policy.load import load_policy

pytestmark = pytest.mark.usefixtures("programs", "undrawn")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A checkpoint with such a layer, of random weights."""
    source, made = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("made")
    write(source, build("glm4-moe", vocab_size=-(-len(embedded_tokenizer()) // 64) * 64))
    embedded_tokenizer().save_pretrained(source)
    config = replace(models.read_config(source), mtp="output")
    models.save_params(models.init_params(config, "lm", jax.random.key(0)), config, made, source=source)
    return made


def config_of(model, workdir):
    tiny = get_config()
    return replace(
        tiny,
        workdir=str(workdir),
        model=Pretrained(str(model), mtp=True),
        algorithm=GRPO(responses_per_update=8),
        rollout=replace(tiny.rollout, slots=8, decode_tokens_per_dispatch=4, speculation="auto"),
        cold_start=None,
        actor=training(),
        steps=4,
        evaluation=Evaluation(every_steps=0, problems=8),
        checkpoint=Checkpointing(every_steps=2, keep_last=4, keep_best=0),
    )


@pytest.mark.slow
def test_the_layer_is_trained_resumed_and_exported(model, tmp_path, monkeypatch):
    monkeypatch.setattr(Speculation, "_width", drafted.widest)
    whole, export = tmp_path / "whole", tmp_path / "export"
    jaxrlhf.run(config_of(model, whole))
    logged = numbers(whole / "metrics.jsonl")
    assert all(record["speculation/tokens_per_pass"] >= 1 for record in logged)
    assert all(0 < record["mtp/actor_loss"] < 20 for record in logged)
    cut = cut_after(2, whole, tmp_path / "cut")
    jaxrlhf.run(config_of(model, cut))
    assert_resumed(cut, whole, after=2, without=("sampler/", "speculation/"))
    assert export_policy(whole, export) == 4
    before, after = (load_file(folder / "model.safetensors") for folder in (model, export))
    assert before.keys() == after.keys()
    layers = max(int(name.split(".")[2]) for name in before if name.startswith("model.layers."))
    moved = [name for name in before if np.abs(before[name] - after[name]).max() > 1e-6]
    assert {f"model.layers.{layers}.{name}.weight" for name in ("eh_proj", "enorm", "shared_head.norm")} <= {*moved}
    sizes = EngineSizes(4, 80, 16, 1, "float32", speculation="auto")
    assert load_policy(str(export), sizes).engine.execution.mtp_slots
    assert load_policy(str(whole), sizes).engine.execution.mtp_slots

"""Runs that train adapters: killed and resumed, exported, evaluated, with generation on devices apart."""

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import peft
import pytest
import safetensors.numpy
import torch
import transformers
from placed_runs import assert_resumed, assert_same_numbers, cut_after
from tiny_runs import get_config, numbers, records, training, write_policy

import jaxrlhf
from jaxrlhf.config import GRPO, Checkpointing, Config, Evaluation, KLInLoss, Lora, Pool, Pretrained
from jaxrlhf.trainer.policy import evaluate_policy, export_policy
from tests.docs.test_metrics import unexplained

pytestmark = [
    pytest.mark.usefixtures("programs", "undrawn"),
    pytest.mark.filterwarnings(
        "ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"  # of transformers, which peft reads
    ),
]
LORA = Lora(rank=2, alpha=4.0, rslora=True)
APART = (Pool("policy", 4, ("actor", "reference")), Pool("generation", 2, ("rollout", "reward")))


def adapting(workdir: Path, model: Path, **layout: int) -> Config:
    """GRPO that trains adapters of a checkpoint."""
    tiny = get_config()
    return replace(
        tiny,
        workdir=str(workdir),
        model=Pretrained(str(model)),
        algorithm=GRPO(responses_per_update=8, kl=KLInLoss(coefficient=0.05)),
        cold_start=None,
        actor=replace(training(**layout), lora=LORA),
        steps=4,
        evaluation=Evaluation(every_steps=0, problems=16),
        checkpoint=Checkpointing(every_steps=2, keep_last=4, keep_best=0),
    )


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return write_policy(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def undisturbed(model, tmp_path_factory) -> Path:
    workdir = tmp_path_factory.mktemp("undisturbed")
    jaxrlhf.run(adapting(workdir, model))
    return workdir


@pytest.fixture(scope="module")
def exported(undisturbed, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("exported") / "adapters"
    assert export_policy(undisturbed, folder) == 4
    return folder


@pytest.mark.slow
def test_a_run_that_died_goes_on_with_the_same_numbers(undisturbed, model, tmp_path):
    workdir = cut_after(2, undisturbed, tmp_path / "died")
    jaxrlhf.run(adapting(workdir, model))
    assert_resumed(workdir, undisturbed, after=2)
    for name in ("samples.jsonl", "evaluation.jsonl"):
        assert (workdir / name).read_bytes() == (undisturbed / name).read_bytes()
    drift = [record["kl/ref"] for record in numbers(workdir / "metrics.jsonl")]
    assert drift[0] == pytest.approx(0, abs=1e-9)
    assert drift[-1] > 1e-6


@pytest.mark.slow
def test_what_the_run_wrote_is_on_the_page_of_metrics(undisturbed):
    assert unexplained(undisturbed, files=1) == []


@pytest.mark.slow
def test_checkpoints_hold_adapters_alone(undisturbed, model):
    step = undisturbed / "checkpoints" / "step_4"
    assert {path.name for path in step.iterdir() if path.is_dir()} >= {"actor_adapters", "actor_optimizer"}
    assert not (step / "actor").exists()
    arrays = json.loads((step / "host" / "metadata").read_text())["arrays"]["actor_adapters"].values()
    saved = sum(math.prod(json.loads(text[text.index("[") :])) for text in arrays)
    weights = sum(array.size for array in safetensors.numpy.load_file(model / "model.safetensors").values())
    assert 0 < saved < weights / 5


def logits(model, token_RW) -> np.ndarray:
    with torch.no_grad():
        return model(torch.tensor(token_RW)).logits.numpy()


@pytest.mark.slow
def test_adapters_and_whole_weights_are_exported_and_compute_the_same(undisturbed, exported, model, tmp_path):
    export_policy(undisturbed, tmp_path / "whole", merge=True)
    token_RW = np.random.default_rng(0).integers(1, 400, (3, 24))
    base = transformers.AutoModelForCausalLM.from_pretrained(model)
    before = logits(base, token_RW)
    theirs = logits(peft.PeftModel.from_pretrained(base, exported), token_RW)
    whole = logits(transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "whole"), token_RW)
    np.testing.assert_allclose(whole, theirs, atol=1e-4)
    assert np.abs(theirs - before).max() > 1e-2
    assert transformers.AutoTokenizer.from_pretrained(exported).get_vocab()


@pytest.mark.slow
def test_a_run_goes_on_from_adapters_that_it_is_given(undisturbed, exported, model, tmp_path):
    config = adapting(tmp_path / "more", model)
    config = replace(config, steps=1, actor=replace(config.actor, lora=replace(LORA, start=str(exported))))
    jaxrlhf.run(config)
    [first] = numbers(tmp_path / "more" / "metrics.jsonl")
    last = numbers(undisturbed / "metrics.jsonl")[-1]
    assert first["eval/accuracy_at_start"] == last["eval/accuracy"]
    assert first["kl/ref"] == pytest.approx(0, abs=1e-9), "the reference has the adapters that the run started from"


@pytest.mark.slow
def test_a_run_is_evaluated_with_its_adapters(undisturbed, model):
    metrics = evaluate_policy(adapting(undisturbed, model), policy=None, samples=1, show=0)
    last = numbers(undisturbed / "metrics.jsonl")[-1]
    assert {name: metrics[name] for name in last if name in metrics} == {
        name: last[name] for name in metrics if name in last
    }
    assert "eval/accuracy" in metrics


@pytest.mark.seeds
def test_adapters_beside_quantised_weights_with_generation_on_a_pool_apart_and_exported(model, tmp_path):
    def config_of(name: str, **layout: int) -> Config:
        config = adapting(tmp_path / name, model, **layout)
        return replace(config, steps=2, actor=replace(config.actor, lora=replace(LORA, quantize="nf4")))

    jaxrlhf.run(config_of("run"))
    jaxrlhf.run(replace(config_of("apart", stage=2), devices=None, pools=APART))
    assert_same_numbers(tmp_path / "apart", tmp_path / "run")
    first, *_, last = numbers(tmp_path / "run" / "metrics.jsonl")
    assert first["kl/ref"] == pytest.approx(0, abs=1e-9)
    assert evaluate_policy(config_of("run"), policy=None, samples=1, show=0)["eval/accuracy"] == last["eval/accuracy"]
    export_policy(tmp_path / "run", tmp_path / "adapters")
    export_policy(tmp_path / "run", tmp_path / "whole", merge=True)

    # Devices of the pool apart are sent the weights once, and then the adapters, whole and in float32.
    sent = [record["transfer/received_bytes"] for record in records(tmp_path / "apart" / "metrics.jsonl")]
    tensors = safetensors.numpy.load_file(tmp_path / "adapters" / "adapter_model.safetensors").values()
    adapters = sum(leaf.size for leaf in tensors)
    assert sent[-1] == 4 * adapters < (model / "model.safetensors").stat().st_size / 5

    base = transformers.AutoModelForCausalLM.from_pretrained(model)
    float_weights = {name: weight.numpy().copy() for name, weight in base.state_dict().items()}
    theirs = peft.PeftModel.from_pretrained(base, tmp_path / "adapters").merge_and_unload().state_dict()
    whole = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "whole").state_dict()
    for name, weight in float_weights.items():
        rounded = whole[name].numpy() - (theirs[name].numpy() - weight)  # without what the adapters add
        if not name.endswith("_proj.weight"):
            np.testing.assert_array_equal(rounded, weight)
            continue
        # Of outputs: those of a head, a third of the MLP's 48, and all 32 of the residual stream.
        tile = {"q": 8, "k": 8, "v": 8, "gate": 16, "up": 16}.get(name.split(".")[-2].removesuffix("_proj"), 32)
        tiles = rounded.T.reshape(-1, tile)
        levels = np.round(tiles / np.abs(tiles).max(axis=1, keepdims=True), 4)
        assert len(np.unique(levels)) == 16 and levels.max() == 1 and levels.min() == -1
        assert 0.01 < np.abs(rounded - weight).max() / np.abs(weight).max() < 0.16


@pytest.mark.seeds
def test_adapters_beside_weights_of_a_cold_start(tmp_path):
    config = get_config()
    config = replace(
        config,
        workdir=str(tmp_path / "run"),
        steps=1,
        actor=replace(config.actor, lora=LORA),
        algorithm=replace(config.algorithm, critic=replace(config.algorithm.critic, lora=LORA)),
    )
    jaxrlhf.run(config)
    [record] = numbers(tmp_path / "run" / "metrics.jsonl")
    saved = {path.name for path in (tmp_path / "run" / "checkpoints" / "step_1").iterdir()}
    assert saved >= {"actor_adapters", "critic_adapters"}
    with pytest.raises(ValueError, match="export base weights and adapters together with --merge"):
        export_policy(tmp_path / "run", tmp_path / "adapters")
    export_policy(tmp_path / "run", tmp_path / "whole", merge=True)
    metrics = evaluate_policy(config, policy=str(tmp_path / "whole"), samples=1, show=0)
    assert metrics["eval/accuracy"] == record["eval/accuracy"]

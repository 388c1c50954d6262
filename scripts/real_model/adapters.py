"""LoRA adapters: to `peft` and back, and beside frozen weights of 4 and 8 bits."""

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrlhf.config import SFT, Checkpointing, Config, Lora, Quantization, Rewards
from jaxrlhf.models.huggingface.peft import load_adapters
from jaxrlhf.models.lora.lora import adapted, adapter_shapes, quantized
from jaxrlhf.models.lora.quantized import quantize_layers
from jaxrlhf.trainer.policy import export_policy
from scripts.real_model.logits import gap, our_logits, our_model, text_rows, their_logits, their_model
from scripts.real_model.runs import Figures, Given, config_of, curve, rollout, sentences, train, trained, training

LORA = Lora(rank=8, alpha=16.0)
EXAMPLES, EXPORTED = 16, 3


def _config(given: Given, name: str, lora: Lora, steps: int) -> Config:
    """Supervised training of adapters, every step on the same sentences."""
    return config_of(
        given,
        name,
        SFT(examples_per_update=EXAMPLES),
        data=sentences(given, EXAMPLES),
        rollout=rollout(EXAMPLES, 1, 24),
        rewards=Rewards(parts=()),
        actor=training(3e-4, lora=lora),
        steps=steps,
    )


def _equal(tree: Any, other: Any) -> bool:
    same = jax.tree.map(lambda a, b: np.asarray(a).tobytes() == np.asarray(b).tobytes(), tree, other)
    return all(jax.tree.leaves(same))


def to_peft_and_back(given: Given) -> Figures:
    """Train adapters, have `peft` apply them, and read them again from what either wrote."""
    import peft

    saving = Checkpointing(every_steps=EXPORTED, keep_last=2, keep_best=0)
    config = replace(_config(given, "run", LORA, EXPORTED + 1), checkpoint=saving)
    train(config)
    exported, saved = given.folder / "adapters", given.folder / "saved"
    export_policy(config.folder, exported, step=EXPORTED)
    shape, params = our_model(given.model)
    shapes = adapter_shapes(shape, "lm", LORA)
    adapters = trained(config, "actor_adapters", shapes, step=EXPORTED)
    token_RW = text_rows(given, rows=2)
    start, ours = (our_logits(each, shape, token_RW) for each in (params, adapted(params, adapters)))
    theirs = peft.PeftModel.from_pretrained(their_model(given), exported)
    theirs.save_pretrained(str(saved))
    layout = jax.tree.map(lambda _: jax.sharding.SingleDeviceSharding(jax.devices()[0]), shapes)
    again, peft_again = (load_adapters(place, shape, "lm", LORA, layout) for place in (exported, saved))
    further = _config(given, "further", replace(LORA, start=str(exported)), 1)
    train(further)
    return {
        "changed": float(np.abs(ours - start).max()),
        "peft": gap(ours, their_logits(theirs, token_RW), token_RW),
        "exported_equal": _equal(adapters, again),
        "peft_saved_equal": _equal(adapters, peft_again),
        "loss": curve(config, "supervised/loss"),
        "loss_after_start": curve(further, "supervised/loss")[0],
        "start_equal": curve(further, "supervised/loss")[0] == curve(config, "supervised/loss")[EXPORTED],
    }


def _rounded(params: Any, kind: Quantization) -> Any:
    """Weights whose matrices are quantised as those of a run are, a layer at a time."""
    one = jax.jit(partial(_quantize, kind=kind))
    return quantized(params, kind, one)


def _quantize(weight: jax.Array, kind: Quantization) -> Any:
    return quantize_layers(weight, kind, layers=weight.shape[0])


def _mib(params: Any) -> float:
    return sum(leaf.nbytes for leaf in jax.tree.leaves(params)) / 2**20


def quantised(given: Given) -> Figures:
    """Train adapters beside weights of 32, 8 and 4 bits; compare losses, logits and bytes."""
    found: Figures = {}
    shape, params = our_model(given.model)
    token_RW = text_rows(given, rows=2)
    whole = our_logits(params, shape, token_RW)
    kinds: tuple[Quantization | None, ...] = (None, "int8", "nf4")
    for kind in kinds:
        config = _config(given, kind or "float32", replace(LORA, quantize=kind), 6)
        train(config)
        loss = curve(config, "supervised/loss")
        own: Figures = {"loss_first": loss[0], "loss_last": loss[-1], "step_s": float(np.median(_seconds(config)))}
        weights = params if kind is None else _rounded(params, kind)
        own |= {"weights_mib": _mib(weights), "matrices_mib": _mib(weights["layers"])}
        if kind is not None:
            own |= gap(our_logits(weights, shape, token_RW, jnp.float32), whole, token_RW)
        found[kind or "float32"] = own
    falls = {name: figures["loss_first"] - figures["loss_last"] for name, figures in found.items()}
    for name, fall in falls.items():
        found[name]["share_of_fall"] = fall / falls["float32"]
    return found


def _seconds(config: Config) -> list[float]:
    return curve(config, "time/step_s")[1:]

"""A trained policy exported, read again here and by transformers, and exported once more."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from transformers import AutoModelForCausalLM, AutoTokenizer

from jaxrlhf import models
from jaxrlhf.config import SFT, Rewards
from jaxrlhf.data.tokenizer import load_tokenizer
from jaxrlhf.trainer.policy import export_policy
from scripts.real_model.logits import gap, our_logits, our_model, text_rows, their_logits
from scripts.real_model.runs import Figures, Given, config_of, rollout, sentences, train, trained


def equal_files(folder: Path, other: Path) -> dict[str, bool]:
    """Compare two folders file by file, without the model card; True for a file with equal content in both."""
    names = sorted({file.name for place in (folder, other) for file in place.iterdir() if file.suffix != ".md"})
    return {
        name: (folder / name).is_file()
        and (other / name).is_file()
        and (folder / name).read_bytes() == (other / name).read_bytes()
        for name in names
    }


def measure(given: Given) -> Figures:
    """Train two updates, export, and compare logits and bytes."""
    data = sentences(given, 8)
    sft = SFT(examples_per_update=8)
    config = config_of(given, "run", sft, data=data, rollout=rollout(8, 1, 24), rewards=Rewards(parts=()), steps=2)
    train(config)
    first, second, third = (given.folder / name for name in ("first", "second", "third"))
    export_policy(config.folder, first)
    export_policy(config.folder, second)
    token_RW = text_rows(given, rows=2)
    shape, params = our_model(first)
    weights = trained(config, "actor", models.param_shapes(shape, "lm", jnp.float32))
    same = jax.tree.leaves(jax.tree.map(lambda a, b: np.array_equal(np.asarray(a), np.asarray(b)), weights, params))
    in_run, again = (our_logits(each, shape, token_RW) for each in (weights, params))
    models.save_params(params, shape, third, source=first)
    start = our_logits(our_model(given.model)[1], shape, token_RW)
    theirs = AutoModelForCausalLM.from_pretrained(first).eval()
    texts = ["Tom has 12 apples.\n\nHow many?  9,876", "naïve café 東京"]
    ours, hubs = load_tokenizer(str(models.resolve(given.model))), AutoTokenizer.from_pretrained(first)
    files, once_more = equal_files(first, second), equal_files(first, third)
    return {
        "changed": float(np.abs(in_run - start).max()),
        "weights_equal": all(same),
        "logits_equal": bool(np.array_equal(in_run, again)),
        "transformers": gap(in_run, their_logits(theirs, token_RW), token_RW),
        "files": len(files),
        "files_equal": all(files.values()),
        "weight_bytes_equal": all(equal for name, equal in once_more.items() if name.endswith(".safetensors")),
        "tokenizer_equal": all(ours.encode(text) == hubs.encode(text) for text in texts),
    }

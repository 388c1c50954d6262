"""Logits of the model here and in transformers, in float32 and bfloat16."""

from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from transformers import AutoModelForCausalLM

from jaxrlhf import models
from jaxrlhf.data.tokenizer import load_tokenizer
from jaxrlhf.models.config import ModelConfig
from jaxrlhf.sharding.rules import cast_shapes
from scripts.real_model.runs import Figures, Given, questions

ROWS, WIDTH = 4, 128


def text_rows(given: Given, rows: int = ROWS, width: int = WIDTH) -> np.ndarray:
    """Tokens of questions and answers of GSM8K, each row the beginning of one long text."""
    tokenizer = load_tokenizer(str(models.resolve(given.model)))
    texts = [f"{record['question']}\n{record['answer']}\n" for record in questions(given, 4 * rows)]
    token_N = [tokenizer.encode("".join(texts[4 * row : 4 * row + 4]))[:width] for row in range(rows)]
    return np.array(token_N, np.int32)


def their_model(given: Given, dtype: torch.dtype = torch.float32) -> Any:
    """The model as transformers reads it from the same file."""
    return AutoModelForCausalLM.from_pretrained(given.model.parent, gguf_file=given.model.name, dtype=dtype).eval()


def their_logits(model: Any, token_RW: np.ndarray) -> np.ndarray:
    """Logits of transformers' model, in float32."""
    with torch.no_grad():
        return model(torch.tensor(token_RW, dtype=torch.long)).logits.float().numpy()


@partial(jax.jit, static_argnums=(1, 3))
def _logits(params: Any, config: ModelConfig, token_RW: jax.Array, dtype: Any) -> Any:
    position_RW = jnp.broadcast_to(jnp.arange(token_RW.shape[1]), token_RW.shape)
    segment_RW = jnp.ones(token_RW.shape, jnp.int32)
    execution = models.Execution(dtype=dtype)
    hidden_RWD = models.hidden_states(params, config, token_RW, position_RW, segment_RW, execution=execution).hidden_RWD
    return models.logits(params, config, hidden_RWD)


def our_logits(params: Any, config: ModelConfig, token_RW: np.ndarray, dtype: Any = jnp.float32) -> np.ndarray:
    """Logits of this project's model."""
    return np.asarray(_logits(params, config, jnp.asarray(token_RW), dtype))


def our_model(path: str | Path) -> tuple[ModelConfig, Any]:
    """The model as this project reads it, in float32."""
    config = models.read_config(path)
    return config, models.load_params(path, config, "lm")


def in_bfloat16(params: Any, config: ModelConfig) -> Any:
    """Weights in the dtypes that a run with bfloat16 computes with."""
    shapes = models.param_shapes(config, "lm", jnp.float32)
    cast = cast_shapes(models.param_dims(config, "lm"), shapes, dtype=jnp.bfloat16)
    return jax.tree.map(lambda array, shape: array.astype(shape.dtype), params, cast)


def gap(logit_RWV: np.ndarray, other_RWV: np.ndarray, token_RW: np.ndarray) -> dict[str, float]:
    """Differences of two models' logits, and of the log-probabilities that they give to the text."""
    between = np.abs(logit_RWV - other_RWV)
    logps = [_log_probabilities(each, token_RW) for each in (logit_RWV, other_RWV)]
    apart = np.abs(logps[0] - logps[1])
    return {
        "logit_mean": float(between.mean()),
        "logit_largest": float(between.max()),
        "logp_mean": float(apart.mean()),
        "logp_largest": float(apart.max()),
        "argmax_equal": float((logit_RWV.argmax(-1) == other_RWV.argmax(-1)).mean()),
    }


def _log_probabilities(logit_RWV: np.ndarray, token_RW: np.ndarray) -> np.ndarray:
    """Log-probability of each token but the first of a row."""
    before_RWV = logit_RWV[:, :-1].astype(np.float64)
    total_RW = np.log(np.exp(before_RWV - before_RWV.max(-1, keepdims=True)).sum(-1)) + before_RWV.max(-1)
    return np.take_along_axis(before_RWV, token_RW[:, 1:, None], -1)[..., 0] - total_RW


def measure(given: Given) -> Figures:
    """Compare logits on GSM8K text with transformers' in float32, and each one's bfloat16 with that."""
    token_RW = text_rows(given)
    theirs = their_logits(their_model(given), token_RW)
    theirs_bf16 = gap(their_logits(their_model(given, torch.bfloat16), token_RW), theirs, token_RW)
    config, params = our_model(given.model)
    ours = our_logits(params, config, token_RW)
    rounded = our_logits(in_bfloat16(params, config), config, token_RW, jnp.bfloat16)
    ours_bf16 = gap(rounded, ours, token_RW)
    return {
        "tokens": int(token_RW.size),
        "logit_size": float(np.abs(theirs).mean()),
        "float32": gap(ours, theirs, token_RW),
        "bfloat16": {
            "ours": ours_bf16,
            "theirs": theirs_bf16,
            "ratio": ours_bf16["logp_mean"] / theirs_bf16["logp_mean"],
        },
    }

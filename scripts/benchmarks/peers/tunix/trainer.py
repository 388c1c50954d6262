"""Model, optimizer, settings and clocks for Tunix's supervised and preference trainers."""

import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
import optax
from absl import logging
from flax import nnx

from scripts.benchmarks.peers import phases
from scripts.benchmarks.peers.phases import PREPARE, UPDATE
from scripts.benchmarks.peers.tunix import model as tunix_model

FLAGS = phases.parse("Steps of a Tunix trainer on a workload.", workload="smollm2_sft")
logging.set_verbosity(logging.ERROR)
TASK = phases.Task(FLAGS)
WORKLOAD, TOKENIZER = TASK.workload, phases.chat.tokenizer_of(TASK.model)
CLOCK = phases.Phases(warmup=FLAGS.warmup, counted=FLAGS.steps)
PACKAGES = ("google-tunix", "jax", "flax", "optax", "transformers")


def load() -> Any:
    """Return the workload's model, without rematerialization."""
    return tunix_model.load(TASK.model)


def optimizer() -> optax.GradientTransformation:
    """Return gradient clipping followed by AdamW."""
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(phases.LEARNING_RATE, weight_decay=0.0))


def settings_of(rows: int) -> dict[str, Any]:
    """Return settings of one update a step, in microbatches of `rows` records.

    Raises:
      ValueError: `rows` does not divide the records of an update.
    """
    if WORKLOAD.prompts % rows:
        raise ValueError(f"microbatches of {rows} do not divide the {WORKLOAD.prompts} records of an update")
    return {
        "eval_every_n_steps": 10**9,
        "max_steps": CLOCK.total,
        "gradient_accumulation_steps": WORKLOAD.prompts // rows,
    }


def padded(rows: Sequence[Sequence[int]], width: int, *, left: bool = False) -> tuple[np.ndarray, np.ndarray]:
    """Return token ids padded to a width, and the mask that is true on tokens and false on padding."""
    token_RW, mask_RW = np.zeros((len(rows), width), np.int32), np.zeros((len(rows), width), bool)
    for index, ids in enumerate(rows):
        part = slice(width - len(ids), None) if left else slice(len(ids))
        token_RW[index, part], mask_RW[index, part] = ids, True
    return token_RW, mask_RW


def train(trainer: Any, batch_of: Callable[[list[dict[str, Any]]], Any], *, rows: int) -> list[float]:
    """Run the steps with every phase clocked, and return the loss of each step.

    Args:
      batch_of: Function that makes a microbatch from records.
      rows: Number of records of a microbatch.
    """
    records, losses = TASK.records(steps=CLOCK.total), list[float]()
    buffer, written, began = trainer._buffer_metrics, trainer._write_train_metrics, [0.0]

    def prepared(batch: Any) -> None:
        jax.block_until_ready(batch)
        began[0] = time.perf_counter()

    def buffered(*args: Any, loss: Any, **named: Any) -> Any:
        jax.block_until_ready((loss, nnx.state(trainer.model)))
        CLOCK.add(UPDATE, time.perf_counter() - began[0])
        return buffer(*args, loss=loss, **named)

    def end() -> None:
        if trainer._buffered_train_metrics is None:  # the trainer is closing
            return written()
        losses.append(round(float(np.mean(trainer._buffered_train_metrics.losses)), 5))
        written()
        CLOCK.end_step()

    prepares = PREPARE if hasattr(trainer, "ref_model") else None
    CLOCK.watch(trainer, "_prepare_inputs", lambda *_: prepares, after=prepared)
    trainer._buffer_metrics, trainer._write_train_metrics = buffered, end
    CLOCK.begin()
    with jax.set_mesh(tunix_model.MESH):
        trainer.train(batch_of(records[start : start + rows]) for start in range(0, len(records), rows))
    if not CLOCK.finished:
        raise RuntimeError(f"the trainer stopped after {len(CLOCK.steps)} of {CLOCK.total} steps")
    return losses

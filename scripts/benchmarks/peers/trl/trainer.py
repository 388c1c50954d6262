"""Settings of transformers' trainer, the base of TRL's trainers, and clocks on its phases."""

from typing import Any

import transformers

from scripts.benchmarks.peers.phases import LEARNING_RATE, UPDATE, Phases


class Steps(transformers.TrainerCallback):
    """Callback that marks the start and end of steps on the clock, and keeps the logged losses."""

    def __init__(self, clock: Phases) -> None:
        self._clock = clock
        self.losses: list[float] = []

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self._clock.begin()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self._clock.end_step()

    def on_log(self, *_: Any, **named: Any) -> None:
        if "loss" in named["logs"]:
            self.losses.append(round(float(named["logs"]["loss"]), 5))


def watch_updates(trainer: Any, clock: Phases) -> None:
    """Clock the forward and backward passes, clipping and the optimizer as the update."""
    clock.watch(trainer, "compute_loss", UPDATE)
    clock.watch(trainer.accelerator, "backward", UPDATE)
    clock.watch(trainer.accelerator, "clip_grad_norm_", UPDATE)
    trainer.create_optimizer()
    clock.watch(trainer.optimizer, "step", UPDATE)


def settings_of(folder: str, *, micro: int, updates: int, rows: int) -> dict[str, Any]:
    """Return settings of one update a step on `rows` rows, in the order of the data set.

    Raises:
      ValueError: The microbatch size does not divide the rows.
    """
    if rows % micro:
        raise ValueError(f"--micro {micro} does not divide the {rows} rows of an update")
    return {
        "output_dir": folder,
        "use_cpu": True,
        "bf16": False,
        "per_device_train_batch_size": micro,
        "gradient_accumulation_steps": rows // micro,
        "gradient_checkpointing": False,
        "learning_rate": LEARNING_RATE,
        "lr_scheduler_type": "constant",
        "weight_decay": 0.0,
        "max_grad_norm": 1.0,
        "max_steps": updates,
        "train_sampling_strategy": "sequential",
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
    }

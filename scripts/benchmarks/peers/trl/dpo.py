"""Steps of TRL's DPOTrainer on a workload, on CPU: policy and reference. Prints one JSON line.

    python -m scripts.benchmarks.peers.trl.dpo --workload smollm2_dpo --models DIR

Run this in an environment with trl 1.16.0.

The reference's forward pass is clocked as preparation; the policy has one forward and one backward pass.
"""

import tempfile
from typing import Any

import torch
import transformers
from datasets import Dataset
from trl import DPOConfig, DPOTrainer

from scripts.benchmarks.peers import phases
from scripts.benchmarks.peers.phases import PREPARE, UPDATE, bench
from scripts.benchmarks.peers.trl.trainer import Steps, settings_of, watch_updates

FLAGS = phases.parse(__doc__, workload="smollm2_dpo")
TASK = phases.Task(FLAGS)
WORKLOAD = TASK.workload
CLOCK = phases.Phases(warmup=FLAGS.warmup, counted=FLAGS.steps)


def load() -> Any:
    """Return the workload's model."""
    causal = transformers.AutoModelForCausalLM
    return causal.from_pretrained(TASK.model, dtype=torch.float32, attn_implementation="sdpa")


def train(folder: str) -> Steps:
    """Run the steps with every phase clocked."""
    transformers.logging.set_verbosity_error()
    records, steps = TASK.records(steps=CLOCK.total), Steps(CLOCK)
    tokenizer = phases.chat.tokenizer_of(TASK.model)
    pairs = {"prompt": [each["text"] for each in records]}
    for column, field in (("chosen", "solution"), ("rejected", "rejected")):
        pairs[column] = [each[field] + tokenizer.eos_token for each in records]
    common = settings_of(folder, micro=FLAGS.micro // 2, updates=CLOCK.total, rows=WORKLOAD.prompts)
    trainer = DPOTrainer(
        model=load(),
        ref_model=load(),
        args=DPOConfig(**common, max_length=WORKLOAD.prompt_tokens + WORKLOAD.new_tokens, beta=0.1),
        train_dataset=Dataset.from_dict(pairs),
        processing_class=tokenizer,
        callbacks=[steps],
    )
    watch_updates(trainer, CLOCK)
    CLOCK.watch(trainer.ref_model, "forward", PREPARE, within=UPDATE)  # `compute_loss` calls it
    trainer.train()
    return steps


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as output, bench.Memory() as memory:
        losses = train(output).losses
    CLOCK.report("trl_dpo", FLAGS.workload, memory, ("trl", "torch", "transformers"), losses=losses)

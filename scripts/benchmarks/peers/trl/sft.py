"""Steps of TRL's SFTTrainer on a workload, on CPU. Prints one JSON line.

    python -m scripts.benchmarks.peers.trl.sft --workload smollm2_sft --models DIR

Run this in an environment with trl 1.16.0.

The loss covers solutions, not prompts. Rows are padded to the longest row of the microbatch; examples have nearly the
same length, so packing would gain nothing.
"""

import tempfile

import torch
import transformers
from datasets import Dataset
from trl import SFTConfig, SFTTrainer

from scripts.benchmarks.peers import phases
from scripts.benchmarks.peers.phases import bench
from scripts.benchmarks.peers.trl.trainer import Steps, settings_of, watch_updates

FLAGS = phases.parse(__doc__, workload="smollm2_sft")
TASK = phases.Task(FLAGS)
WORKLOAD = TASK.workload
CLOCK = phases.Phases(warmup=FLAGS.warmup, counted=FLAGS.steps)


def train(folder: str) -> Steps:
    """Run the steps with every phase clocked."""
    transformers.logging.set_verbosity_error()
    causal = transformers.AutoModelForCausalLM
    records, steps = TASK.records(steps=CLOCK.total), Steps(CLOCK)
    tokenizer = phases.chat.tokenizer_of(TASK.model)
    texts = {"prompt": [each["text"] for each in records]}
    texts["completion"] = [each["solution"] + tokenizer.eos_token for each in records]
    trainer = SFTTrainer(
        model=causal.from_pretrained(TASK.model, dtype=torch.float32, attn_implementation="sdpa"),
        args=SFTConfig(
            **settings_of(folder, micro=FLAGS.micro, updates=CLOCK.total, rows=WORKLOAD.prompts),
            max_length=WORKLOAD.prompt_tokens + WORKLOAD.new_tokens,
        ),
        train_dataset=Dataset.from_dict(texts),
        processing_class=tokenizer,
        callbacks=[steps],
    )
    watch_updates(trainer, CLOCK)
    trainer.train()
    return steps


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as output, bench.Memory() as memory:
        losses = train(output).losses
    CLOCK.report("trl_sft", FLAGS.workload, memory, ("trl", "torch", "transformers"), losses=losses)

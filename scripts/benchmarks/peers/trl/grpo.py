"""Steps of TRL's GRPOTrainer on a workload, on CPU with transformers' generation. Prints one JSON line.

    python -m scripts.benchmarks.peers.trl.grpo --workload fixed --models DIR

Run this in an environment with trl 1.16.0.

TRL's fastest settings on CPU: no gradient checkpointing, scaled dot-product attention, a dynamic cache, no compilation.
"""

import tempfile
from typing import Any

import torch
import transformers
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

from scripts.benchmarks.peers import phases
from scripts.benchmarks.peers.phases import PREPARE, bench
from scripts.benchmarks.peers.trl.trainer import Steps, settings_of, watch_updates

FLAGS = phases.parse(__doc__, workload="fixed")
TASK = phases.Task(FLAGS)
WORKLOAD = TASK.workload
CLOCK = phases.Phases(warmup=FLAGS.warmup, counted=FLAGS.steps)


def reward(completions: list[str], **_: Any) -> list[float | None]:
    """Return the reward of each response."""
    return [TASK.reward(text) for text in completions]


def settings(folder: str) -> GRPOConfig:
    """Return settings with one update a step."""
    common = settings_of(folder, micro=FLAGS.micro, updates=CLOCK.total, rows=WORKLOAD.sequences)
    del common["train_sampling_strategy"]  # GRPOTrainer has its own sampler
    return GRPOConfig(
        **common,
        shuffle_dataset=False,
        num_generations=WORKLOAD.responses,
        max_completion_length=WORKLOAD.new_tokens,
        num_iterations=1,
        loss_type="grpo",
        beta=phases.BETA,
        temperature=1.0,
        top_p=1.0,
        top_k=0,
    )


def train(folder: str) -> None:
    """Run the steps with every phase clocked."""
    transformers.logging.set_verbosity_error()
    causal = transformers.AutoModelForCausalLM
    model = causal.from_pretrained(TASK.model, dtype=torch.float32, attn_implementation="sdpa")
    model.generation_config.eos_token_id = None  # only the tokenizer's end token counts
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=reward,
        args=settings(folder),
        train_dataset=Dataset.from_dict({"prompt": TASK.texts(steps=CLOCK.total)}),
        processing_class=TASK.tokenizer(),
        callbacks=[Steps(CLOCK)],
    )

    def passed(*_: Any, **__: Any) -> str | None:
        return None if torch.is_grad_enabled() else PREPARE  # the update's own forward pass is inside `compute_loss`

    def generated(result: Any) -> None:
        CLOCK.generated(TASK, [len(tokens) for tokens in result[0]])

    CLOCK.watch(trainer, "_generate_single_turn", "generate", after=generated)
    CLOCK.watch(trainer, "_get_per_token_logps_and_entropies", passed)
    watch_updates(trainer, CLOCK)
    trainer.train()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as output, bench.Memory() as memory:
        train(output)
    CLOCK.report("trl_grpo", FLAGS.workload, memory, ("trl", "torch", "transformers"))

"""Seconds and peak memory of one update of TRL's GRPOTrainer on one long sequence. Prints one JSON line.

    python -m scripts.benchmarks.peers.trl.long_rows --preset small --tokens 4096 --trained 512 --models DIR

Run this in an environment with trl 1.16.0.

TRL's loss with gradient checkpointing, backward, clipping and AdamW; scaled dot-product attention, float32.
"""

import argparse
import tempfile
import time
from typing import Any

import torch
import transformers
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

from scripts.benchmarks import workload as bench
from scripts.benchmarks.peers import long_row


def no_reward(completions: list[str], **_: Any) -> list[float | None]:
    """Return no scores: the advantages of the update are inputs."""
    return [None] * len(completions)


def trainer_of(flags: argparse.Namespace, folder: str) -> Any:
    """Return a trainer on the preset's checkpoint, ready to update."""
    transformers.logging.set_verbosity_error()
    place = bench.checkpoint(flags.preset, flags.models)
    model = transformers.AutoModelForCausalLM.from_pretrained(place, dtype=torch.float32, attn_implementation="sdpa")
    settings = GRPOConfig(
        output_dir=folder,
        use_cpu=True,
        bf16=False,
        per_device_train_batch_size=2,
        num_generations=2,
        max_completion_length=flags.trained,
        gradient_checkpointing=True,
        loss_type="grpo",
        beta=0.04,
        learning_rate=1e-6,
        lr_scheduler_type="constant",
        max_steps=1,
        report_to=[],
    )
    trainer: Any = GRPOTrainer(
        model=model,
        reward_funcs=no_reward,
        args=settings,
        train_dataset=Dataset.from_dict({"prompt": ["t2"]}),
        processing_class=bench.tokenizer(bench.PRESETS[flags.preset], outside=True),
    )
    trainer.create_optimizer()
    trainer.current_gradient_accumulation_steps = 1
    trainer.model.gradient_checkpointing_enable({"use_reentrant": False})
    trainer.model.train()
    return trainer


def main() -> None:
    """Update, and print."""
    flags = long_row.arguments(__doc__ or "")
    token_BT = torch.randint(2, bench.PRESETS[flags.preset].vocab, (1, flags.tokens))
    prompt_BT, completion_BT = token_BT[:, : -flags.trained], token_BT[:, -flags.trained :]
    logp_BT = torch.full(completion_BT.shape, -9.0)
    inputs: dict[str, Any] = {
        "prompt_ids": prompt_BT,
        "prompt_mask": torch.ones_like(prompt_BT),
        "completion_ids": completion_BT,
        "completion_mask": torch.ones_like(completion_BT),
        "advantages": torch.ones(1),
        "old_per_token_logps": logp_BT,
        "ref_per_token_logps": logp_BT,
    }
    times = []
    with tempfile.TemporaryDirectory() as folder, bench.Memory() as memory:
        trainer = trainer_of(flags, folder)
        for _ in range(1 + flags.repeats):
            start = time.perf_counter()
            trainer.accelerator.backward(trainer.compute_loss(trainer.model, inputs))
            trainer.accelerator.clip_grad_norm_(trainer.model.parameters(), 1.0)
            trainer.optimizer.step()
            trainer.optimizer.zero_grad()
            times.append(time.perf_counter() - start)
    long_row.report(flags, times, memory, "trl", "torch", "transformers")


if __name__ == "__main__":
    main()

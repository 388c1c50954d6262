"""Steps of TRL's GRPOTrainer on a workload, on CPU with transformers' generation. Prints one JSON line.

    python trl_grpo.py --workload fixed --models DIR      # in an environment with trl 1.16.0

Its fastest settings here: no gradient checkpointing, scaled dot-product attention, a dynamic cache, nothing compiled.
"""

import tempfile
from typing import Any

import phases
from phases import PREPARE, UPDATE, bench

FLAGS = phases.parse(__doc__, workload="fixed")

import torch  # noqa: E402  (after its environment is set)
import transformers  # noqa: E402
from datasets import Dataset  # noqa: E402
from trl import GRPOConfig, GRPOTrainer  # noqa: E402

WORKLOAD = bench.workload_of(FLAGS)
CLOCK = phases.Phases(warmup=FLAGS.warmup, counted=FLAGS.steps)


class Steps(transformers.TrainerCallback):
    """Tells the clock where steps begin and end."""

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        CLOCK.begin()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        CLOCK.end_step()


def reward(completions: list[str], **_: Any) -> list[float | None]:
    """Of each response."""
    return [phases.reward_of(text) for text in completions]


def settings(folder: str) -> GRPOConfig:
    """One update a step."""
    if WORKLOAD.sequences % FLAGS.micro:
        raise ValueError(f"--micro {FLAGS.micro} does not divide the {WORKLOAD.sequences} sequences of a step")
    return GRPOConfig(
        output_dir=folder,
        use_cpu=True,
        bf16=False,
        per_device_train_batch_size=FLAGS.micro,
        gradient_accumulation_steps=WORKLOAD.sequences // FLAGS.micro,
        gradient_checkpointing=False,
        num_generations=WORKLOAD.responses,
        max_completion_length=WORKLOAD.new_tokens,
        num_iterations=1,
        loss_type="grpo",
        beta=phases.BETA,
        temperature=1.0,
        top_p=1.0,
        top_k=0,
        learning_rate=phases.LEARNING_RATE,
        lr_scheduler_type="constant",
        max_grad_norm=1.0,
        max_steps=CLOCK.total,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )


def train(folder: str) -> None:
    """Run the steps with every phase clocked."""
    transformers.logging.set_verbosity_error()
    place = bench.checkpoint(WORKLOAD.preset, FLAGS.models)
    model = transformers.AutoModelForCausalLM.from_pretrained(place, dtype=torch.float32, attn_implementation="sdpa")
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=reward,
        args=settings(folder),
        train_dataset=Dataset.from_dict({"prompt": phases.texts_of(WORKLOAD, steps=CLOCK.total)}),
        processing_class=phases.tokenizer_of(WORKLOAD),
        callbacks=[Steps()],
    )

    def passed(*_: Any, **__: Any) -> str | None:
        return None if torch.is_grad_enabled() else PREPARE  # the trained pass is inside `compute_loss`

    def generated(result: Any) -> None:
        CLOCK.generated(WORKLOAD, [len(tokens) for tokens in result[0]])

    CLOCK.watch(trainer, "_generate_single_turn", "generate", after=generated)
    CLOCK.watch(trainer, "_get_per_token_logps_and_entropies", passed)
    CLOCK.watch(trainer, "compute_loss", UPDATE)
    CLOCK.watch(trainer.accelerator, "backward", UPDATE)
    CLOCK.watch(trainer.accelerator, "clip_grad_norm_", UPDATE)
    trainer.create_optimizer()
    CLOCK.watch(trainer.optimizer, "step", UPDATE)
    trainer.train()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as output, bench.Memory() as memory:
        train(output)
    CLOCK.report("trl_grpo", FLAGS.workload, memory, ("trl", "torch", "transformers"))

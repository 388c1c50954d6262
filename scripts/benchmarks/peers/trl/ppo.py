"""Steps of TRL's PPOTrainer on a workload, on CPU: policy, value model, reference. Prints one JSON line.

    python -m scripts.benchmarks.peers.trl.ppo --workload ppo --models DIR

Run this in an environment with trl 1.12.0, the last with PPO.

PPOTrainer has no groups, so every prompt has one response. Old log-probabilities come from generation.
"""

import tempfile
from types import SimpleNamespace
from typing import Any

import torch
import transformers
from datasets import Dataset
from trl.experimental.ppo import PPOConfig, PPOTrainer, ppo_trainer

from scripts.benchmarks.peers import phases
from scripts.benchmarks.peers.phases import PREPARE, UPDATE, bench

FLAGS = phases.parse(__doc__, workload="ppo")
TASK = phases.Task(FLAGS)
WORKLOAD, TOKENIZER = TASK.workload, TASK.tokenizer()
CLOCK = phases.Phases(warmup=FLAGS.warmup, counted=FLAGS.steps)


class Finished(Exception):
    """Exception that ends the trainer's loop after all steps; the trainer offers no other way."""


class Steps(transformers.TrainerCallback):
    """Callback that marks the start and end of steps on the clock."""

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        CLOCK.begin()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        CLOCK.end_step()
        if CLOCK.finished:
            raise Finished


class Reward(torch.nn.Module):
    """Reward model in the form that the trainer expects: a backbone, and a head that scores its hidden states."""

    base_model_prefix = "backbone"

    def __init__(self) -> None:
        super().__init__()
        self.unused = torch.nn.Parameter(torch.zeros(1))

    def backbone(self, input_ids: torch.Tensor, **_: Any) -> SimpleNamespace:
        """Return the reward of each row's response as hidden states, at every position."""
        texts = TOKENIZER.batch_decode(input_ids[:, WORKLOAD.prompt_tokens :])
        reward_R = torch.tensor([TASK.reward(text) for text in texts])
        return SimpleNamespace(hidden_states=[reward_R[:, None, None].expand(-1, input_ids.shape[1], 1)])

    def score(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden


def settings(folder: str) -> PPOConfig:
    """Return settings with one update a step."""
    if WORKLOAD.responses != 1 or WORKLOAD.sequences % FLAGS.micro:
        raise ValueError(f"needs one response to a prompt, and prompts that --micro {FLAGS.micro} divides: {WORKLOAD}")
    return PPOConfig(
        output_dir=folder,
        use_cpu=True,
        bf16=False,
        per_device_train_batch_size=FLAGS.micro,
        gradient_accumulation_steps=WORKLOAD.prompts // FLAGS.micro,
        gradient_checkpointing=False,
        num_mini_batches=1,
        num_ppo_epochs=1,
        local_rollout_forward_batch_size=WORKLOAD.prompts,
        total_episodes=WORKLOAD.prompts * CLOCK.total,
        response_length=WORKLOAD.new_tokens,
        stop_token_id=None,
        temperature=1.0,
        kl_coef=phases.BETA,
        gamma=1.0,
        lam=0.95,
        learning_rate=phases.LEARNING_RATE,
        lr_scheduler_type="constant",
        num_sample_generations=0,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )


def train(folder: str) -> None:
    """Run the steps with every phase clocked."""
    transformers.logging.set_verbosity_error()
    place = TASK.model
    causal, scoring = transformers.AutoModelForCausalLM, transformers.AutoModelForSequenceClassification
    reward, reference = Reward(), causal.from_pretrained(place, dtype=torch.float32)
    prompts = TOKENIZER(TASK.texts(steps=CLOCK.total))["input_ids"]
    trainer = PPOTrainer(
        args=settings(folder),
        processing_class=TOKENIZER,
        model=causal.from_pretrained(place, dtype=torch.float32),
        ref_model=reference,
        reward_model=reward,
        value_model=scoring.from_pretrained(place, num_labels=1, dtype=torch.float32),
        train_dataset=Dataset.from_dict({"input_ids": prompts}),
        data_collator=transformers.DataCollatorWithPadding(TOKENIZER, "max_length", WORKLOAD.prompt_tokens),
        callbacks=[Steps()],
    )
    scored = trainer.ref_model

    def generated(result: Any) -> None:
        rows, length = result[0].shape
        CLOCK.generated(TASK, [length - WORKLOAD.prompt_tokens] * rows)

    CLOCK.watch(ppo_trainer, "batch_generation", "generate", after=generated)
    CLOCK.watch(ppo_trainer, "forward", lambda model, *_: PREPARE if model is scored else UPDATE)
    CLOCK.watch(ppo_trainer, "get_reward", lambda model, *_: None if model is reward else PREPARE)
    CLOCK.watch(trainer.accelerator, "backward", UPDATE)
    CLOCK.watch(trainer.optimizer, "step", UPDATE)
    try:
        trainer.train()
    except Finished:
        return
    raise RuntimeError(f"the trainer stopped after {len(CLOCK.steps)} of {CLOCK.total} steps")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as output, bench.Memory() as memory:
        train(output)
    CLOCK.report("trl_ppo", FLAGS.workload, memory, ("trl", "torch", "transformers"))

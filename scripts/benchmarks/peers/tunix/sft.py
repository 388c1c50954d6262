"""Steps of Tunix's PeftTrainer on a workload, all weights trained, on CPU. Prints one JSON line.

    python -m scripts.benchmarks.peers.tunix.sft --workload smollm2_sft --models DIR

Run this in an environment with google-tunix 0.1.7.

Tunix's loss is the mean over the tokens of a microbatch, averaged over microbatches.
"""

from typing import Any

from tunix.rl import common
from tunix.sft.peft_trainer import PeftTrainer, TrainingConfig, TrainingInput

from scripts.benchmarks.peers.phases import bench
from scripts.benchmarks.peers.tunix import trainer as ours

WIDTH = ours.WORKLOAD.prompt_tokens + ours.WORKLOAD.new_tokens


def batch_of(records: list[dict[str, Any]]) -> TrainingInput:
    """Return prompts and solutions as one batch; the mask covers the solutions."""
    prompts = [ours.TOKENIZER(each["text"])["input_ids"] for each in records]
    solutions = [ours.TOKENIZER(each["solution"] + ours.TOKENIZER.eos_token)["input_ids"] for each in records]
    token_RW, mask_RW = ours.padded([p + s for p, s in zip(prompts, solutions, strict=True)], WIDTH)
    for row, prompt in enumerate(prompts):
        mask_RW[row, : len(prompt)] = False
    return TrainingInput(input_tokens=token_RW, input_mask=mask_RW)


def model_input(batch: TrainingInput) -> dict[str, Any]:
    """Return the arguments of the loss; padding follows all tokens, so the causal mask already hides the padding."""
    everything = batch.input_tokens >= 0
    return {
        "input_tokens": batch.input_tokens,
        "input_mask": batch.input_mask,
        "positions": common.build_positions_from_mask(everything),
        "attention_mask": common.make_causal_attn_mask(everything),
    }


def main() -> list[float]:
    """Train; return the losses."""
    settings = TrainingConfig(**ours.settings_of(ours.FLAGS.micro))
    trainer = PeftTrainer(ours.load(), ours.optimizer(), settings).with_gen_model_input_fn(model_input)
    return ours.train(trainer, batch_of, rows=ours.FLAGS.micro)


if __name__ == "__main__":
    with bench.Memory() as memory:
        losses = main()
    ours.CLOCK.report("tunix_sft", ours.FLAGS.workload, memory, ours.PACKAGES, losses=losses)

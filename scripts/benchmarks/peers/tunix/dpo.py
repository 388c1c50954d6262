"""Steps of Tunix's DPOTrainer on a workload, on CPU: policy and reference. Prints one JSON line.

    python -m scripts.benchmarks.peers.tunix.dpo --workload smollm2_dpo --models DIR

Run this in an environment with google-tunix 0.1.7.
"""

from typing import Any

from tunix.sft.dpo.dpo_trainer import DPOTrainer, DPOTrainingConfig, TrainingInput

from scripts.benchmarks.peers.phases import bench
from scripts.benchmarks.peers.tunix import trainer as ours


def batch_of(records: list[dict[str, Any]]) -> TrainingInput:
    """Return left-padded prompts, with the two answers to each prompt."""
    fields: dict[str, Any] = {}
    end, sizes = ours.TOKENIZER.eos_token, ours.WORKLOAD
    for name, field in (("chosen", "solution"), ("rejected", "rejected")):
        ids = [ours.TOKENIZER(each[field] + end)["input_ids"] for each in records]
        fields[f"{name}_ids"], fields[f"{name}_mask"] = ours.padded(ids, sizes.new_tokens)
    prompts = [ours.TOKENIZER(each["text"])["input_ids"] for each in records]
    fields["prompt_ids"], fields["prompt_mask"] = ours.padded(prompts, sizes.prompt_tokens, left=True)
    return TrainingInput(**fields)


def main() -> list[float]:
    """Train; return the losses."""
    pairs = max(1, ours.FLAGS.micro // 2)
    settings = DPOTrainingConfig(**ours.settings_of(pairs), beta=0.1)
    return ours.train(DPOTrainer(ours.load(), ours.load(), ours.optimizer(), settings), batch_of, rows=pairs)


if __name__ == "__main__":
    with bench.Memory() as memory:
        losses = main()
    ours.CLOCK.report("tunix_dpo", ours.FLAGS.workload, memory, ours.PACKAGES, losses=losses)

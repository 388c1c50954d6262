"""Generation of transformers' model alone. Prints one JSON line.

    python -m scripts.benchmarks.peers.trl.generate --models DIR --rows 32

Run this in an environment with trl.
"""

import json
import time
from statistics import median

import torch
import transformers

from scripts.benchmarks.peers import phases

FLAGS = phases.parse(__doc__, workload="smollm2_grpo", rows=32)
TIMES = 3


def main() -> None:
    """Run the command."""
    task = phases.Task(FLAGS)
    tokenizer, size = task.tokenizer(), task.workload
    texts = [record["text"] for record in task.records(steps=1)]
    model = transformers.AutoModelForCausalLM.from_pretrained(task.model, dtype=torch.float32)
    asked = [texts[index // size.responses] for index in range(FLAGS.rows)]
    given = tokenizer(asked, return_tensors="pt", padding=True, add_special_tokens=False)
    how = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0, "pad_token_id": tokenizer.pad_token_id}
    seconds = []
    for _ in range(TIMES + 1):
        start = time.perf_counter()
        with torch.no_grad():
            tokens = model.generate(
                **given, **how, max_new_tokens=size.new_tokens, min_new_tokens=size.new_tokens, eos_token_id=None
            )
        seconds.append(time.perf_counter() - start)
        task.check_lengths([tokens.shape[1] - given["input_ids"].shape[1]] * FLAGS.rows)
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    print(json.dumps({"generate_s": round(median(seconds[1:]), 3), "versions": versions}))


if __name__ == "__main__":
    main()

"""Mean log-probability per token of the first solutions, by transformers' model. Prints one JSON line.

    python -m scripts.benchmarks.peers.trl.logp --workload smollm2_sft --models DIR --rows 4

Run this in an environment with trl.

`compare_peers.py` compares the values with ours: both sides read one checkpoint and tokenize the records equally.
"""

import json

import torch
import transformers

from scripts.benchmarks.peers import phases

FLAGS = phases.parse(__doc__, workload="smollm2_sft", rows=4)


def main() -> None:
    """Run the command."""
    task, found = phases.Task(FLAGS), []
    tokenizer = phases.chat.tokenizer_of(task.model)
    model = transformers.AutoModelForCausalLM.from_pretrained(task.model, dtype=torch.float32)
    for record in task.records(steps=1)[: FLAGS.rows]:
        prompt, solution = (tokenizer(text)["input_ids"] for text in (record["text"], record["solution"]))
        token_RW = torch.tensor([[*prompt, *solution, tokenizer.eos_token_id]])
        with torch.no_grad():
            logp_WV = torch.log_softmax(model(token_RW).logits[0], dim=-1)
        index_W = torch.arange(len(prompt) - 1, token_RW.shape[1] - 1)
        found.append(float(logp_WV[index_W, token_RW[0, len(prompt) :]].mean()))
    print(json.dumps({"logp": found}))


if __name__ == "__main__":
    main()

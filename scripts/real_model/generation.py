"""Benchmark of generation alone, beside transformers: seconds of responses of SmolLM2 that all have equal lengths.

    python -m scripts.real_model.generation [--rows 32 1] [--environments DIR] [--models DIR]
    python -m scripts.real_model.generation --ours 32      # one process of ours, prints one JSON line

Sampling at temperature 1, float32, without a stop token. Prompts are the first of `smollm2_grpo`; 32 responses are 4 to
each of 8 prompts. Both sides generate once without counting, then three times. Writes results/generation.json and the
table in docs/benchmarks.md.
"""

import argparse
import json
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

from scripts import pages
from scripts.benchmarks import chat_workload as chat
from scripts.benchmarks import compare_peers
from scripts.benchmarks import workload as bench

TIMES = 3
WORKLOAD = chat.WORKLOADS["smollm2_grpo"]


def ours(rows: int, models: Path) -> dict[str, Any]:
    """Generate with the engine of `serve`, which has 32 slots whatever the number of rows."""
    from jaxrlhf.config import Sampling
    from jaxrlhf.engine import Request
    from jaxrlhf.trainer.served_policy.flags import EngineSizes
    from jaxrlhf.trainer.served_policy.load import load_policy

    model = chat.checkpoint(models)
    context = WORKLOAD.prompt_tokens + WORKLOAD.new_tokens
    sizes = EngineSizes(slots=32, context_tokens=context, response_tokens=WORKLOAD.new_tokens, dtype="float32")
    policy = load_policy(str(model), sizes)
    records = chat.read_records(chat.records_file(WORKLOAD, models, model), count=WORKLOAD.prompts)
    prompts = [policy.tokenizer(record["text"], add_special_tokens=False)["input_ids"] for record in records]
    asked = [tuple(prompts[index // WORKLOAD.responses]) for index in range(rows)]
    requests = [Request(index, prompt, stop_tokens=()) for index, prompt in enumerate(asked)]
    seconds = []
    for seed in range(TIMES + 1):
        start = time.perf_counter()
        completions = policy.engine.generate(requests, Sampling(), seed=seed)
        seconds.append(time.perf_counter() - start)
        lengths = {len(completion.tokens) for completion in completions}
        if lengths != {WORKLOAD.new_tokens}:
            raise ValueError(f"responses of {lengths} tokens where all should have {WORKLOAD.new_tokens}")
    return {"generate_s": round(median(seconds[1:]), 3), "versions": bench.versions("jax", "jaxlib")}


def table(measured: dict[str, Any]) -> str:
    """Return the table of docs/benchmarks.md."""
    lines = ["| responses of 128 tokens | jaxrlhf s | transformers s | ratio |", "|---|---|---|---|"]
    for rows, each in measured["rows"].items():
        one, other = each["jaxrlhf"]["generate_s"], each["transformers"]["generate_s"]
        lines.append(f"| {rows} | {one:.3g} | {other:.3g} | {one / other:.2f} |")
    about = measured["about"]
    return "\n".join([*lines, "", f"{about['processor']}, float32, commit `{about['commit']}`."])


def main() -> None:
    """Measure and write; with `--ours`, measure only our side and print it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ours", type=int, help="number of responses of a single measurement of ours")
    parser.add_argument("--rows", type=int, nargs="+", default=[32, 1], help="numbers of responses")
    parser.add_argument("--environments", type=Path, default=Path("bench_environments"), help="where the peers live")
    parser.add_argument("--models", type=Path, default=Path("bench_models"), help="where checkpoints are kept")
    parser.add_argument("--limit-s", type=float, default=600.0, help="time limit of one process")
    pages.add_folders(parser)
    flags = parser.parse_args()
    flags.models, flags.environments = flags.models.absolute(), flags.environments.absolute()
    if flags.ours:
        print(json.dumps(ours(flags.ours, flags.models)))
        return
    found: dict[str, Any] = {"about": bench.about("jax"), "rows": {}}
    theirs = compare_peers.environment("trl", flags.environments)
    for rows in flags.rows:
        where = ["--models", str(flags.models)]
        commands = {
            "jaxrlhf": [sys.executable, "-m", "scripts.real_model.generation", "--ours", str(rows), *where],
            "transformers": [theirs, "-m", "scripts.benchmarks.peers.trl.generate", "--rows", str(rows), *where],
        }
        records = {
            name: compare_peers.run(command, limit_s=flags.limit_s, settings={}) for name, command in commands.items()
        }
        print(rows, json.dumps(records), flush=True)
        if failed := {name: record["failed"] for name, record in records.items() if "failed" in record}:
            raise SystemExit(f"{rows} responses could not be measured, and nothing was written: {failed}")
        found["rows"][rows] = records
    compare_peers.write(flags.results / "generation.json", found)
    pages.renew(flags.docs / "benchmarks.md", {"generation": table(found)})


if __name__ == "__main__":
    main()

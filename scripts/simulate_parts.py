"""Simulates what it gains to learn from a step in parts, by the lengths of the workload `longtail`.

    python scripts/simulate_parts.py [--write]

Generation has a pool of its own, a slot for every response, and takes as long for a token of one slot as of all: so a
group is complete after as many tokens as its longest response has, and generation ends with the longest of all.
Learning takes as long as its share of the tokens, on another pool, part after part. With `--write` it writes
`docs/staleness_parts_predicted.json` and the table in docs/async.md.
"""

import argparse
import json
from pathlib import Path

import bench_workload as bench
import numpy as np
from pages import written

DOCS = Path(__file__).parents[1] / "docs"
STEPS, SEED = 2000, 0
PARTS = (1, 2, 4, 8)
LEARNING = (0.5, 1.0, 2.0)
"""Seconds of learning from a step over those of generating it, in the mean."""


def simulated(parts: int, learning: float) -> dict[str, float]:
    """Mean seconds of a step over those of generating it and of learning from it in turns, and idle shares."""
    workload, rng = bench.WORKLOADS["longtail"], np.random.default_rng(SEED)
    shape = STEPS, workload.prompts, workload.responses
    length_SPG = np.minimum(rng.geometric(bench.END_PROBABILITY, shape), workload.new_tokens)
    longest_SP, tokens_SP = length_SPG.max(axis=2), length_SPG.sum(axis=2)
    generate_S = longest_SP.max(axis=1)
    order_SP = np.argsort(longest_SP, axis=1, kind="stable")
    by_part = STEPS, parts, workload.prompts // parts
    ready_Sn = np.take_along_axis(longest_SP, order_SP, axis=1).reshape(by_part).max(axis=2)
    share_Sn = np.take_along_axis(tokens_SP, order_SP, axis=1).reshape(by_part).sum(axis=2) / tokens_SP.sum(1).mean()
    learn_Sn = learning * generate_S.mean() * share_Sn
    done_S = np.zeros(STEPS)
    for part in range(parts):
        done_S = np.maximum(done_S, ready_Sn[:, part]) + learn_Sn[:, part]
    return {
        "times": float((generate_S + learn_Sn.sum(axis=1)).mean() / done_S.mean()),
        "first_ready": float((ready_Sn[:, 0] / generate_S).mean()),
        "generation_idle": float(1 - generate_S.mean() / done_S.mean()),
        "policy_idle": float(1 - learn_Sn.sum(axis=1).mean() / done_S.mean()),
    }


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--write", action="store_true", help="write docs/")
    flags = parser.parse_args()
    found = {f"{parts}": {f"{learning:g}": simulated(parts, learning) for learning in LEARNING} for parts in PARTS}
    headings = [f"learning {learning:g} of generating: times; idle" for learning in LEARNING]
    lines = [f"| parts | first is there at | {' | '.join(headings)} |", "|" + "---|" * (2 + len(LEARNING))]
    for parts, rows in found.items():
        cells = [f"{row['times']:.2f}; {row['generation_idle']:.0%}, {row['policy_idle']:.0%}" for row in rows.values()]
        lines.append(f"| {parts} | {next(iter(rows.values()))['first_ready']:.0%} | {' | '.join(cells)} |")
    table = "\n".join(lines)
    print(table)
    if flags.write:
        (DOCS / "staleness_parts_predicted.json").write_text(json.dumps(found, indent=1) + "\n")
        document = DOCS / "async.md"
        document.write_text(written(document.read_text(), {"parts predicted": table}))


if __name__ == "__main__":
    main()

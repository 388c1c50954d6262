"""Simulation of the gain of learning from a step in parts, with response lengths of the workload `longtail`.

    python scripts/simulate_parts.py [--write]

Generation has a separate pool with a slot for every response, and a decode step takes the same time for one slot as for
all slots. A group is therefore complete after as many decode steps as its longest response has tokens, and generation
ends with the longest response of all. Another pool learns from the parts one after the other; the time of a part is
proportional to its tokens. The simulator is the one of `jaxrlhf.plan`. `--write` writes
`docs/staleness_parts_predicted.json` and the table in docs/async.md.
"""

import argparse
import json
from dataclasses import replace

import bench_workload as bench
import numpy as np
from compare_schedules import GeometricLengths
from pages import DOCS, renew

from jaxrlhf.planner.schedules.simulation import Schedule, StepTimes, simulate

STEPS, SEED = 2000, 0
PARTS = (1, 2, 4, 8)
LEARNING = (0.5, 1.0, 2.0)
"""Mean seconds of learning from a step, divided by the mean seconds of generating the step."""


def simulated(parts: int, learning: float) -> dict[str, float]:
    """Return the speedup over taking turns, the arrival of the first part as a share of a round, and idle shares."""
    workload = bench.WORKLOADS["longtail"]
    lengths = GeometricLengths(bench.END_PROBABILITY, workload.new_tokens)
    sizes = {"groups": workload.prompts, "copies": workload.responses, "steps": STEPS, "seed": SEED}
    slots = workload.prompts * workload.responses
    times = StepTimes(
        slots=slots,
        active_N=np.array([1, slots]),
        decode_s_N=np.ones(2),
        cache_s=0.0,
        capacities=(workload.new_tokens,),
        prefill_s=(0.0, 0.0, 0.0),
        round_s=0.0,
        learn_s=0.0,
        prompt_tokens=0.0,
    )
    generate_s = simulate(Schedule(), times, lengths, **sizes).step_s
    times = replace(times, learn_s=learning * generate_s)
    found = simulate(Schedule(apart=True, stream_parts=parts), times, lengths, **sizes)
    first = [update.start_s for update in found.updates[::parts]]
    ready = [(at - one.start_s) / (one.end_s - one.start_s) for at, one in zip(first, found.rounds, strict=True)]
    return {
        "times": (generate_s + times.learn_s) / found.step_s,
        "first_ready": float(np.mean(ready)),
        "generation_idle": found.generation_idle,
        "policy_idle": found.learning_idle,
    }


def main() -> None:
    """Run the command."""
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
        renew(DOCS / "async.md", {"parts predicted": table})


if __name__ == "__main__":
    main()

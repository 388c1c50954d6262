"""Comparison of GRPO with AdamW's moments in float32 and in bfloat16, from the same policies.

    python -m scripts.learning.moments [--seeds 2]

Prints the accuracy, and writes `moments.json`: greedy accuracy on held-out problems and mean score of the sampled
responses, by step. `task.py` defines the task.
"""

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

import jaxrlhf
from jaxrlhf.config import GRPO, Evaluation, Pretrained
from jaxrlhf.tracking.plots import read_curves
from scripts.learning import algorithms, task
from scripts.pages import RESULTS

DTYPES = ("float32", "bfloat16")
SHOWN = ("eval/accuracy", "score/mean")


def learn(folder: Path, policy: Pretrained, dtype: str, seed: int) -> dict[str, dict[int, float]]:
    """Run once; return the curves by name and step."""
    workdir = folder / f"{dtype}_{seed}"
    evaluation = Evaluation(every_steps=algorithms.EVERY_STEPS, problems=task.HELD_OUT)
    settings: dict[str, Any] = {"seed": seed, "evaluation": evaluation, "workdir": str(workdir)}
    jaxrlhf.run(task.task(folder, GRPO(), policy, actor=task.training(4e-3, state_dtype=dtype), **settings))
    curves = read_curves(workdir / "metrics.jsonl")
    return {name: curves[name] for name in SHOWN if name in curves}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=2)
    seeds = parser.parse_args().seeds
    found: dict[str, list[dict[str, dict[int, float]]]] = {dtype: [] for dtype in DTYPES}
    with tempfile.TemporaryDirectory() as place:
        folder = task.write_records(Path(place))
        for seed in range(seeds):
            policy = task.exported(folder, "guess", seed=seed)
            for dtype in DTYPES:
                found[dtype].append(learn(folder, policy, dtype, seed))
                accuracy = list(found[dtype][-1]["eval/accuracy"].values())
                print(dtype, seed, np.round(accuracy, 2), flush=True)
    result = {"about": algorithms.about(seeds), "runs": found}
    (RESULTS / "moments.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

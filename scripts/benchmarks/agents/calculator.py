"""Benchmark of GRPO steps on products with a calculator, next to Tunix's agentic learner from the same weights.

    python -m scripts.benchmarks.agents.calculator [--steps 6] [--policy DIR] [--environments DIR]

Both start from the policy of the cold start of `tools_arithmetic`, which is trained here unless `--policy` names a
policy. A step has 8 problems with 8 episodes each, one update of AdamW at a learning rate of 3e-4, clipping at 0.2 and
no KL. Scores are of each step's sampled episodes. Writes results/agents_tunix.json.
"""

import argparse
import json
import os
import tempfile
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import jaxrlhf
from jaxrlhf.config import Checkpointing, Config, Evaluation, Optimizer, Pretrained
from jaxrlhf.data.generated import products
from jaxrlhf.tracking.plots import read_curves
from scripts.benchmarks import workload as bench
from scripts.benchmarks.compare_peers import environment
from scripts.learning import agents
from scripts.pages import RESULTS

FILE = RESULTS / "agents_tunix.json"
PROMPTS, RESPONSES, LEARNING_RATE = 8, 8, 3e-4


def ours(policy: Path, folder: Path, steps: int) -> dict[str, Any]:
    """Run steps of this project; return their seconds and scores."""
    config = agents.calculator()
    config = replace(
        config,
        model=Pretrained(str(policy)),
        cold_start=None,
        rollout=replace(config.rollout, prompts_per_step=PROMPTS, responses_per_prompt=RESPONSES),
        actor=replace(config.actor, optimizer=Optimizer(learning_rate=LEARNING_RATE, weight_decay=0.0)),
        steps=steps,
        evaluation=Evaluation(every_steps=0, problems=PROMPTS),
        checkpoint=Checkpointing(every_steps=0, keep_best=0),
        workdir=str(folder / "run"),
    )
    jaxrlhf.run(config)
    curves = read_curves(config.folder / "metrics.jsonl")
    return {"seconds": list(curves["time/step_s"].values()), "score": list(curves["score/mean"].values())}


def tunix(policy: Path, folder: Path, steps: int, environments: Path) -> dict[str, Any]:
    """Run steps of Tunix; return their seconds and scores."""
    drawn = [{key: each[key] for key in ("prompt", "answer")} for each in products("train", steps * PROMPTS, 0)]
    (folder / "problems.json").write_text(
        json.dumps([drawn[at : at + PROMPTS] for at in range(0, len(drawn), PROMPTS)])
    )
    command = [environment("tunix", environments.absolute()), "-m", "scripts.benchmarks.peers.tunix.agents"]
    command += ["--policy", str(policy.absolute()), "--problems", str(folder / "problems.json")]
    command += ["--responses", str(RESPONSES), "--learning_rate", str(LEARNING_RATE)]
    return bench.printed(command)


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--policy", type=Path, help="Hugging Face directory of a cold start's policy")
    parser.add_argument("--environments", type=Path, default=Path("bench_environments"), help="where Tunix lives")
    flags = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        config: Config = agents.calculator()
        policy = flags.policy or Path(agents.imitating(config, folder, 0).path)
        found: dict[str, Any] = {}
        for name in ("jaxrlhf", "tunix"):
            load = os.getloadavg()[0]
            figures = (
                ours(policy, folder, flags.steps)
                if name == "jaxrlhf"
                else tunix(policy, folder, flags.steps, flags.environments)
            )
            found[name] = figures | {"load_before": load, "median_s": median(figures["seconds"][1:])}
            print(name, found[name], flush=True)
    ratio = found["jaxrlhf"]["median_s"] / found["tunix"]["median_s"]
    print("seconds of Tunix's:", ratio)
    FILE.write_text(json.dumps(found | {"ratio": ratio, "about": agents.about()}, indent=1) + "\n")


if __name__ == "__main__":
    main()

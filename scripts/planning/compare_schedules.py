"""Comparison of the planner's simulated schedules with the runs that `staleness.py` measured.

    python -m scripts.planning.compare_schedules

Lengths follow the workload `longtail`, where a response ends with probability 1/64 at each token. Predicted seconds
are the cost model's seconds on the CPU of predictions.json, times two factors: one for generating, one for
learning. The factors are fitted to the synchronous run only. Ages and recomputed tokens are counts and need no factor.
Writes `staleness_predicted.json` and the table in docs/async.md; takes seconds.
"""

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from jaxrlhf.config import Config
from jaxrlhf.planner.hardware import Hardware
from jaxrlhf.planner.problem import Lengths, question_of
from jaxrlhf.planner.schedules.predict import times_of
from jaxrlhf.planner.schedules.simulation import Schedule, StepTimes, simulate
from jaxrlhf.planner.search.mapping import search
from scripts.benchmarks import step
from scripts.benchmarks import workload as bench
from scripts.pages import DOCS, RESULTS, renew
from scripts.planning import staleness

STEPS, SEEDS = 8, 20
"""Number of steps of a run, and number of simulated runs of this length; `Compared.spread_s` is their spread."""


@dataclass(frozen=True)
class GeometricLengths:
    """Lengths of responses that end with the same probability at each token."""

    end_probability: float
    longest: int

    @property
    def mean(self) -> float:
        """Mean number of tokens, truncation at `longest` included."""
        return (1 - (1 - self.end_probability) ** self.longest) / self.end_probability

    def sample(self, rng: np.random.Generator, groups: int, copies: int) -> np.ndarray:
        """Sample the number of tokens of each response of each group, int64 `[P, G]`."""
        return np.minimum(rng.geometric(self.end_probability, (groups, copies)), self.longest).astype(np.int64)


@dataclass(frozen=True)
class Compared:
    """Prediction or measurement of a row of the table.

    Attributes:
      step_s: Seconds of a step.
      spread_s: Minimum and maximum seconds of a step: over the simulated runs, or over the steps of the measured run.
      generate_s: Seconds of generating in a step.
      learn_s: Seconds of preparing and updating in a step.
      age_mean: Mean age of a trained token, in policy versions.
      recomputed: Tokens whose KV cache is computed again, as a share of the tokens of a step.
    """

    step_s: float
    spread_s: tuple[float, float]
    generate_s: float
    learn_s: float
    age_mean: float
    recomputed: float


def config_of(workload: bench.Workload, flags: Sequence[str], models: Path) -> Config:
    """Return the configuration of a row of `staleness.py` from its `benchmarks/step.py` flags."""
    pairs = dict(zip(flags[::2], flags[1::2], strict=True))
    model = bench.checkpoint(workload.preset, models).resolve()
    return step.config_of(
        workload,
        model,
        steps=STEPS,
        tokens_per_microbatch=2304,
        remat="auto",
        staleness=int(pairs.get("--staleness", 0)),
        over_provision=float(pairs.get("--over-provision", 1)),
        old_logp="bypass" if pairs.get("--old-logp") == "bypass" else "auto",
    )


def parts_of(config: Config, hardware: Hardware, lengths: GeometricLengths) -> tuple[Schedule, StepTimes]:
    """Return the schedule of a configuration, and the cost model's seconds of its parts."""
    workload, rollout = config.rollout, config.rollout
    prompt = (bench.SHORTEST_PROMPT + workload.max_prompt_tokens) / 2
    problem = question_of(config, hardware, lengths=Lengths(prompt, lengths.mean)).problem
    times = times_of(problem, search(problem, keep=1).plans[0])
    schedule = Schedule(rollout.staleness, rollout.over_provision)
    return schedule, replace(times, slots=rollout.responses_per_step)  # the engine's number of slots


def predicted(
    schedule: Schedule, times: StepTimes, lengths: GeometricLengths, rollout: Any, factors: tuple[float, float]
) -> Compared:
    """Predict a row; `factors` multiply the cost model's seconds of generating and of learning."""
    (generating, learning), (fixed, linear, square) = factors, times.prefill_s
    times = replace(
        times,
        decode_s_N=generating * times.decode_s_N,
        cache_s=generating * times.cache_s,
        prefill_s=(generating * fixed, generating * linear, generating * square),
        round_s=generating * times.round_s,
        learn_s=learning * times.learn_s,
    )
    sizes = {"groups": rollout.prompts_per_step, "copies": rollout.responses_per_prompt}
    runs = [simulate(schedule, times, lengths, steps=STEPS, seed=seed, **sizes) for seed in range(SEEDS)]

    def mean(name: str) -> float:
        return float(np.mean([getattr(run, name) for run in runs]))

    seconds = [run.step_s for run in runs]
    step_s, spread_s = float(np.mean(seconds)), (min(seconds), max(seconds))
    return Compared(step_s, spread_s, step_s - times.learn_s, times.learn_s, mean("age_mean"), mean("recomputed"))


def measured(run: Mapping[str, Any]) -> Compared:
    """Return the measurement of a run; the spread is over the steps after the second step."""
    learn_s = run["prepare_s"] + run["update_s"]
    again = run.get("staleness/recomputed_tokens", 0.0) / run["generated_tokens"]
    steps = sorted(run["steps"][2:])
    age = run.get("staleness/age_mean", 0.0)
    return Compared(run["step_s"], (steps[0], steps[-1]), run["generate_s"], learn_s, age, again)


def compared(models: Path) -> dict[str, dict[str, Any]]:
    """Predict every row of `staleness.py` and pair it with its measurement; the synchronous row comes first."""
    workload = bench.WORKLOADS["longtail"]
    saved = json.loads((RESULTS / "predictions.json").read_text())["about"]["hardware"]
    hardware = Hardware(**saved | {"devices_per_machine": 1})
    lengths = GeometricLengths(bench.END_PROBABILITY, workload.new_tokens)
    runs = json.loads((RESULTS / "staleness.json").read_text())["rows"]
    factors, found = (1.0, 1.0), {}
    for name, flags in staleness.ROWS.items():
        config = config_of(workload, flags, models)
        seen = measured(runs[name])
        arguments = *parts_of(config, hardware, lengths), lengths, config.rollout
        if name == "0":
            plain = predicted(*arguments, factors)
            factors = seen.generate_s / plain.generate_s, (seen.step_s - seen.generate_s) / plain.learn_s
        said = predicted(*arguments, factors)
        found[name] = {"predicted": asdict(said), "measured": asdict(seen)}
    return found


def table(rows: Mapping[str, Any]) -> str:
    """Return a Markdown table of predicted and measured values, with speedups over the synchronous row."""
    headings = ["staleness", "step s", "times", "generate s", "learn s", "mean age", "computed again"]
    lines = [f"| {' | '.join(headings)} |", "|" + "---|" * len(headings)]
    first = {side: rows["0"][side]["step_s"] for side in ("predicted", "measured")}
    for name, row in rows.items():
        said, seen = row["predicted"], row["measured"]
        cells = [name, f"{said['step_s']:.1f}, {seen['step_s']:.1f}"]
        cells.append(f"{first['predicted'] / said['step_s']:.2f}, {first['measured'] / seen['step_s']:.2f}")
        cells += [f"{said[part]:.1f}, {seen[part]:.1f}" for part in ("generate_s", "learn_s")]
        cells.append(f"{said['age_mean']:.2f}, {seen['age_mean']:.2f}")
        cells.append(f"{said['recomputed']:.0%}, {seen['recomputed']:.0%}")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", type=Path, default=Path("bench_models"), help="where checkpoints are kept")
    flags = parser.parse_args()
    rows = compared(flags.models)
    (RESULTS / "staleness_predicted.json").write_text(json.dumps(rows, indent=1) + "\n")
    text = table(rows)
    renew(DOCS / "async.md", {"predicted": text})
    print(text)


if __name__ == "__main__":
    main()

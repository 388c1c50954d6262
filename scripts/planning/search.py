"""Benchmark of the placement search, in CPU seconds of one core.

    python -m scripts.planning.search [--write]

The problems leave every choice open: any number of devices for a pool, fsdp, three ways to offload.
`--write` renews search.json and the table in docs/planning.md.
"""

import argparse
import json
import time
from dataclasses import asdict, dataclass

from rich.console import Console
from rich.markdown import Markdown

from jaxrlhf.planner.hardware import hardware
from jaxrlhf.planner.plan import PlacementProblem
from jaxrlhf.planner.search.mapping import search
from jaxrlhf.planner.workload import Role, Software
from scripts.benchmarks import workload as bench
from scripts.pages import DOCS, RESULTS, renew
from scripts.planning.reproduce_hybridflow import MODELS, STEP

CASES = {  # name and model size of each role; limit in seconds by number of devices
    "PPO": ((("actor", "7B"), ("critic", "13B"), ("reference", "7B"), ("reward", "13B")), {128: 2.0, 1024: 20.0}),
    "Safe-RLHF": (
        (
            ("actor", "7B"),
            ("critic", "7B"),
            ("cost_critic", "13B"),
            ("reference", "7B"),
            ("reward", "13B"),
            ("cost", "7B"),
        ),
        {128: 60.0},
    ),
}


@dataclass(frozen=True)
class Measured:
    """Measurement of one search.

    Attributes:
      cpu_s: CPU seconds, minimum of three searches.
      limit_s: Maximum CPU seconds that the search should take.
    """

    algorithm: str
    models: int
    devices: int
    placements: int
    allocations: int
    layouts: int
    cpu_s: float
    limit_s: float


def problem(roles: tuple[tuple[str, str], ...], devices: int) -> PlacementProblem:
    """Return the placement problem of these roles on machines with eight A100s."""
    found = []
    for name, size in roles:
        trained = name in ("actor", "critic", "cost_critic")
        head = "lm" if name in ("actor", "reference") else "value" if trained else "score"
        found.append(Role(name, MODELS[size], head, generates=name == "actor", trained=trained))  # type: ignore[arg-type]
    optimizers = tuple(f"{role.name}.optimizer" for role in found if role.trained)
    offloads = ((), optimizers, tuple(role.name for role in found))
    return PlacementProblem(tuple(found), STEP, Software(), hardware(f"a100x{devices // 8}x8"), offloads=offloads)


def measure(algorithm: str, devices: int) -> Measured:
    """Search three times; return the fastest."""
    roles, limits = CASES[algorithm]
    seconds = []
    for _ in range(3):
        start = time.process_time()
        found = search(problem(roles, devices))
        seconds.append(time.process_time() - start)
    counts = (found.placements, found.allocations, found.simulated)
    return Measured(algorithm, len(roles), devices, *counts, min(seconds), limits[devices])


def table(rows: list[Measured]) -> str:
    """Return the rows as a Markdown table."""
    lines = ["| models | devices | placements | allocations | layouts | seconds |", "|---|---|---|---|---|---|"]
    for row in rows:
        name = f"{row.models} ({row.algorithm})"
        lines.append(
            f"| {name} | {row.devices} | {row.placements} | {row.allocations} | {row.layouts} | {row.cpu_s:.1f} |"
        )
    return "\n".join(lines)


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="renew results and table")
    flags = parser.parse_args()
    rows = [measure(algorithm, devices) for algorithm, (_, limits) in CASES.items() for devices in limits]
    Console().print(Markdown(table(rows)))
    slow = [row for row in rows if row.cpu_s > row.limit_s]
    if flags.write:
        text = json.dumps({"about": bench.about("numpy"), "searches": [asdict(row) for row in rows]}, indent=2)
        (RESULTS / "search.json").write_text(text + "\n")
        renew(DOCS / "planning.md", {"search": table(rows)})
    if slow:
        raise SystemExit(f"slower than their limits: {slow}")


if __name__ == "__main__":
    main()

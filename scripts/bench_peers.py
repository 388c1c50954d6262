"""Measures this project, TRL and Tunix on the same workloads in turns, each run in a fresh process.

    python scripts/bench_peers.py [--workloads fixed longtail] [--rounds 3] [--peers trl tunix] [--draw]

Writes docs/peers.json after every run, so that a session cut short keeps what it measured and a later one renews only
what it runs; at the end (with `--draw`: only) the tables in docs/benchmarks.md and README, and docs/peers.png. The
peers' environments are made where they are missing, with this interpreter (Python 3.11) and pip.
"""

import argparse
import json
import multiprocessing
import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import bench_workload as bench

SCRIPTS = Path(__file__).parent
OURS = "jaxrlhf"
PINS = {
    "trl": {"torch": "2.13.0", "trl": "1.16.0"},
    "trl_ppo": {"torch": "2.13.0", "trl": "1.12.0"},  # the last with a PPO trainer
    "tunix": {"google-tunix": "0.1.7"},
}
FIGURES = ("step_s", "generate_s", "prepare_s", "update_s", "generated_tokens_per_s", "peak_rss_mb", "first_step_s")
WARM = "first_step_warm_s"
MICRO = {"big": 4}
"""Sequences in one pass of a peer; 16 in the other workloads."""

STEPS = {  # ours in all, of which two are warm-up; counted ones of each peer: half an hour a round on two cores
    "fixed": (7, {"trl": 3, "tunix": 3}),
    "fixed512": (4, {"trl": 1, "tunix": 1}),
    "longtail": (6, {"trl": 1, "tunix": 1}),
    "ppo": (6, {"trl": 2, "tunix": 1}),
    "big": (4, {"trl": 1, "tunix": 1}),
}
WARMUP = {("fixed", "tunix"): 2, ("ppo", "tunix"): 2}
"""Steps of a peer before the counted ones, where they are not one: Tunix compiles in the second step too."""

QUIET_CPUS, QUIET_S, PATIENCE_S = 0.1, 0.5, 60.0

Runs = dict[str, dict[str, list[dict[str, Any]]]]
"""Workload, framework, one record for each run."""


def environment(name: str, folder: Path) -> str:
    """The interpreter of a peer's environment, which is made, or repaired, if its pins are not there."""
    python = folder / name / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", str(folder / name)], check=True)
    pins = PINS[name]
    code = "import importlib.metadata as m, sys; print(*(m.version(name).split('+')[0] for name in sys.argv[1:]))"
    found = subprocess.run([str(python), "-c", code, *pins], capture_output=True, text=True)
    if found.stdout.split() != list(pins.values()):
        install = [str(python), "-m", "pip", "install", *(f"{name}=={pin}" for name, pin in pins.items())]
        subprocess.run(install, check=True)
    return str(python)


def environment_of(workload: str, framework: str) -> str:
    """Its name; PPO needs an older TRL."""
    return "trl_ppo" if (framework, bench.WORKLOADS[workload].algorithm) == ("trl", "ppo") else framework


def command_of(workload: str, framework: str, flags: argparse.Namespace) -> list[str]:
    """What measures a framework on a workload."""
    ours_steps, counted = STEPS[workload]
    where = ["--workload", workload, "--models", str(flags.models)]
    where += ["--preset", flags.preset] if flags.preset else []
    where += ["--new-tokens", str(flags.new_tokens)] if flags.new_tokens else []
    if framework == OURS:
        return [sys.executable, str(SCRIPTS / "bench_step.py"), *where, "--steps", str(ours_steps)]
    algorithm = bench.WORKLOADS[workload].algorithm
    python = environment(environment_of(workload, framework), flags.environments)
    script = str(SCRIPTS / "peers" / f"{framework}_{algorithm}.py")
    warmup = WARMUP.get((workload, framework), 1)
    sizes = {"micro": MICRO.get(workload, 16), "steps": counted[framework], "warmup": warmup}
    return [python, script, *where, *(text for name, size in sizes.items() for text in (f"--{name}", str(size)))]


def busy_s() -> float:
    """CPU seconds that all processes of the machine have used."""
    ticks = [int(field) for field in Path("/proc/stat").read_text().splitlines()[0].split()[1:]]
    return (sum(ticks[:3]) + sum(ticks[5:8])) / os.sysconf("SC_CLK_TCK")  # without idle, waiting, guests


def wait_for_quiet() -> float:
    """Wait until other processes rest; returns how many CPUs they use, which is more only when patience has ended."""
    end = time.monotonic() + PATIENCE_S
    while True:
        start, before = time.monotonic(), busy_s()
        time.sleep(QUIET_S)
        others = (busy_s() - before) / (time.monotonic() - start)
        if others < QUIET_CPUS or time.monotonic() > end:
            return others


def run(command: list[str], *, limit_s: float, settings: dict[str, str]) -> dict[str, Any]:
    """One process: its figures, or why it has none, and how busy the machine was before and beside it."""
    record: dict[str, Any] = {"date": time.strftime("%Y-%m-%d %H:%M"), "commit": bench.commit()}
    record["others_cpus_before"] = round(wait_for_quiet(), 2)
    start, busy, own = time.monotonic(), busy_s(), _children_s()
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit_s, env=os.environ | settings)
    except subprocess.TimeoutExpired:
        return record | {"failed": f"not done after {limit_s:.0f} s"}
    beside_s = busy_s() - busy - (_children_s() - own)
    record["others_cpus"] = round(max(0.0, beside_s / (time.monotonic() - start)), 2)
    if done.returncode:
        print(done.stderr[-3000:], file=sys.stderr)
        last = (done.stderr.strip().splitlines() or [""])[-1]
        return record | {"failed": f"exit status {done.returncode}: {last}"}
    return record | json.loads(done.stdout.strip().splitlines()[-1])


def _children_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def run_ours(command: list[str], *, limit_s: float) -> dict[str, Any]:
    """Two processes: one that compiles everything, and one that finds what the first has compiled."""
    with tempfile.TemporaryDirectory() as cache:
        settings = {"JAX_COMPILATION_CACHE_DIR": cache}
        cold = run(command, limit_s=limit_s, settings=settings)
        if "failed" in cold:
            return cold
        again = run([*command, "--steps", "2"], limit_s=limit_s, settings=settings)
    return again if "failed" in again else cold | {WARM: again["first_step_s"]}


def earlier_runs(path: Path) -> Runs:
    """The runs of earlier sessions on this machine.

    Raises:
      ValueError: The file is of another machine.
    """
    if not path.exists():
        return {}
    content, here = json.loads(path.read_text()), bench.processor()
    if content["machine"]["processor"] != here:
        raise ValueError(
            f"{path} was measured on {content['machine']['processor']}, and this is {here}; rename it to "
            f"{path.stem}_<name>.json, which shows it beside what is measured here, or use another folder: --docs"
        )
    return content["runs"]


def merged(old: Runs, workload: str, framework: str, record: dict[str, Any]) -> Runs:
    """The runs with one more, which replaces those of another commit; peers' too, so that all ran in one time."""
    before = [each for each in old.get(workload, {}).get(framework, []) if each["commit"] == record["commit"]]
    return {**old, workload: {**old.get(workload, {}), framework: [*before, record]}}


def summary(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Medians over the runs that succeeded; why the last one failed if none did."""
    good = [each for each in runs if "failed" not in each]
    if not good:
        return {"failed": runs[-1]["failed"]}
    names = [name for name in (*FIGURES, WARM) if name in good[0]]
    return {name: round(median(each[name] for each in good), 4) for name in names}


def document(runs: Runs) -> dict[str, Any]:
    """What is written: medians by workload and framework, what they were measured with, and every run."""
    versions: dict[str, dict[str, str]] = {}
    for workload, frameworks in runs.items():
        for framework, records in frameworks.items():
            for record in records:
                versions.setdefault(environment_of(workload, framework), {}).update(record.get("versions", {}))
    newest = max((each for names in runs.values() for kept in names.values() for each in kept), key=lambda r: r["date"])
    ordered = [name for name in bench.WORKLOADS if name in runs]
    return {
        **{name: {framework: summary(kept) for framework, kept in runs[name].items()} for name in ordered},
        "machine": {"processor": bench.processor(), "system": platform.platform()},
        "versions": versions,
        "commit": newest["commit"],
        "date": newest["date"],
        "runs": runs,
    }


def write(path: Path, content: dict[str, Any]) -> None:
    """Whole or not at all."""
    part = path.with_suffix(".part")
    part.write_text(json.dumps(content, indent=2) + "\n")
    part.replace(path)


def measure(flags: argparse.Namespace, path: Path) -> None:
    """All rounds."""
    runs = earlier_runs(path)
    make = multiprocessing.get_context("spawn").Process  # memory of this process would count as its children's peak
    for preset in {flags.preset or bench.WORKLOADS[name].preset for name in flags.workloads}:
        process = make(target=bench.checkpoint, args=(preset, flags.models))
        process.start()
        process.join()
        if process.exitcode:
            raise RuntimeError(f"the checkpoint of {preset} could not be written to {flags.models}")
    for turn in range(flags.rounds):
        for workload in flags.workloads:
            for framework in (OURS, *flags.peers):
                command = command_of(workload, framework, flags)
                if framework == OURS:
                    record = run_ours(command, limit_s=flags.limit_s)
                else:
                    record = run(command, limit_s=flags.limit_s, settings={})
                runs = merged(runs, workload, framework, record)
                write(path, document(runs))
                shown = {name: record[name] for name in ("failed", *FIGURES, WARM, "others_cpus") if name in record}
                print(f"round {turn + 1}", workload, framework, json.dumps(shown), flush=True)


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workloads", nargs="+", choices=bench.WORKLOADS, default=list(bench.WORKLOADS))
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--peers", nargs="*", choices=("trl", "tunix"), default=["trl", "tunix"])
    parser.add_argument("--environments", type=Path, default=Path("bench_environments"), help="where the peers live")
    parser.add_argument("--models", type=Path, default=Path("bench_models"), help="where checkpoints are kept")
    parser.add_argument("--limit-s", type=float, default=600.0, help="of one process")
    parser.add_argument("--preset", choices=bench.PRESETS, help="another model than the workloads': to try the script")
    parser.add_argument("--new-tokens", type=int, help="another limit than the workloads': to try the script")
    parser.add_argument("--docs", type=Path, default=SCRIPTS.parent / "docs", help="where the results are written")
    parser.add_argument("--draw", action="store_true", help="only tables and chart, from what was measured before")
    flags = parser.parse_args()
    flags.models, flags.environments = flags.models.absolute(), flags.environments.absolute()
    flags.docs.mkdir(parents=True, exist_ok=True)
    if not flags.draw:
        measure(flags, flags.docs / "peers.json")
    import peers_report  # matplotlib is in memory from here on

    peers_report.renew(flags.docs)


if __name__ == "__main__":
    main()

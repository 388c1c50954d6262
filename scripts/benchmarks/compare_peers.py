"""Benchmark of this project, TRL and Tunix on the same workloads in turn, each run in a fresh process.

    python -m scripts.benchmarks.compare_peers [--workloads fixed ppo] [--rounds 3] [--peers trl tunix] [--missing]

Writes results/peers.json after every process, or results/peers_<machine>.json if results/peers.json is from another
machine. An interrupted command keeps the finished measurements, and `--missing` then runs the rest. At the end the
command writes the tables in docs/benchmarks.md and README, and docs/peers.png; with `--draw` it does only this. Missing
environments of the peers are created with this interpreter (Python 3.11) and pip.
"""

import argparse
import json
import multiprocessing
import os
import platform
import re
import resource
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from scripts.benchmarks import chat_workload as chat
from scripts.benchmarks import workload as bench
from scripts.pages import ROOT, add_folders

WORKLOADS = chat.WORKLOADS | bench.WORKLOADS
OURS = "jaxrlhf"
PEERS = "scripts.benchmarks.peers"
PINS = {
    "trl": {"torch": "2.13.0", "trl": "1.16.0"},
    "trl_ppo": {"torch": "2.13.0", "trl": "1.12.0"},  # the last version with a PPO trainer
    "tunix": {"google-tunix": "0.1.7"},
}
FIGURES = ("step_s", "generate_s", "prepare_s", "update_s", "generated_tokens_per_s", "peak_rss_mb", "first_step_s")
STEP_ENDS = {"to_first_step_s": 0, "to_third_step_s": 2}
"""Index of the step of each figure: seconds from the start of the process to the end of the step."""
WARM = "first_step_warm_s"
KEPT = {name: f"kept_{name}" for name in STEP_ENDS}
"""Names of the same seconds with a warm compilation cache of an earlier run."""
MICRO = {
    **dict.fromkeys([(name, peer) for name in ("big", "qwen") for peer in ("trl", "tunix")], 4),
    **dict.fromkeys([("smollm2_ppo", "trl"), ("smollm2_ppo", "tunix"), ("smollm2_grpo", "tunix")], 8),
}
"""Number of sequences in one pass of a peer by workload; 16 in the other workloads. More do not fit into 24 GB."""

STEPS: dict[str, tuple[int, dict[str, int]]] = {
    **dict.fromkeys(chat.WORKLOADS, (4, {"trl": 2, "tunix": 1})),
    "fixed": (7, {"trl": 3, "tunix": 3}),
    "fixed512": (4, {"trl": 1, "tunix": 1}),
    "longtail": (6, {"trl": 1, "tunix": 1}),
    "ppo": (6, {"trl": 2, "tunix": 1}),
    "big": (4, {"trl": 1, "tunix": 1}),
    "qwen": (4, {"trl": 1, "tunix": 1}),
}
"""Number of our steps, the first two of them warm-up, and number of counted steps of each peer."""
WARMUP = dict.fromkeys([(name, "tunix") for name in ("fixed", "ppo", *chat.WORKLOADS)], 2)
"""Number of warm-up steps of a peer, where it is not one: Tunix compiles in the second step too."""

QUIET_CPUS, QUIET_S, PATIENCE_S = 0.1, 0.5, 60.0

Runs = dict[str, dict[str, list[dict[str, Any]]]]
"""Records of runs, by workload and framework."""


def environment(name: str, folder: Path) -> str:
    """Return the interpreter of a peer's environment; create or repair the environment if its pins are not there."""
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
    """Return the name of the environment; PPO needs an older TRL."""
    return "trl_ppo" if (framework, WORKLOADS[workload].algorithm) == ("trl", "ppo") else framework


def command_of(workload: str, framework: str, flags: argparse.Namespace) -> list[str]:
    """Return the command that measures a framework on a workload."""
    ours_steps, counted = STEPS[workload]
    where = ["--workload", workload, "--models", str(flags.models)]
    real = workload in chat.WORKLOADS
    given = {"model": flags.model} if real else {"preset": flags.preset}
    given |= {"new-tokens": flags.new_tokens, "prompts": flags.prompts}
    where += [text for name, size in given.items() if size for text in (f"--{name}", str(size))]
    if framework == OURS:
        script = f"scripts.benchmarks.{'chat' if real else 'step'}"
        return [sys.executable, "-m", script, *where, "--steps", str(ours_steps)]
    algorithm = WORKLOADS[workload].algorithm
    python = environment(environment_of(workload, framework), flags.environments)
    script = f"{PEERS}.{framework}.{algorithm}"
    warmup = WARMUP.get((workload, framework), 1)
    size = WORKLOADS[workload]
    rows = (flags.prompts or size.prompts) * size.responses
    sizes = {"micro": min(rows, MICRO.get((workload, framework), 16)), "steps": counted[framework], "warmup": warmup}
    return [python, "-m", script, *where, *(text for name, size in sizes.items() for text in (f"--{name}", str(size)))]


def busy_s() -> float:
    """Return the CPU seconds that all processes of the machine have used."""
    ticks = [int(field) for field in Path("/proc/stat").read_text().splitlines()[0].split()[1:]]
    return (sum(ticks[:3]) + sum(ticks[5:8])) / os.sysconf("SC_CLK_TCK")  # without idle, iowait and guest time


def wait_for_quiet() -> float:
    """Wait until other processes are idle, at most `PATIENCE_S`; return the number of CPUs that they use."""
    end = time.monotonic() + PATIENCE_S
    while True:
        start, before = time.monotonic(), busy_s()
        time.sleep(QUIET_S)
        others = (busy_s() - before) / (time.monotonic() - start)
        if others < QUIET_CPUS or time.monotonic() > end:
            return others


def run(command: list[str], *, limit_s: float, settings: dict[str, str]) -> dict[str, Any]:
    """Run a process in the root folder; return figures or failure, and the CPUs of other processes."""
    record: dict[str, Any] = {"date": time.strftime("%Y-%m-%d %H:%M"), "commit": bench.commit()}
    record["others_cpus_before"] = round(wait_for_quiet(), 2)
    began, start, busy, own = time.time(), time.monotonic(), busy_s(), _children_s()
    try:
        environment = os.environ | settings
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit_s, cwd=ROOT, env=environment)
    except subprocess.TimeoutExpired:
        return record | {"failed": f"not done after {limit_s:.0f} s"}
    beside_s = busy_s() - busy - (_children_s() - own)
    record["others_cpus"] = round(max(0.0, beside_s / (time.monotonic() - start)), 2)
    if done.returncode:
        print(done.stderr[-3000:], file=sys.stderr)
        last = (done.stderr.strip().splitlines() or [""])[-1]
        return record | {"failed": f"exit status {done.returncode}: {last}"}
    figures = json.loads(done.stdout.strip().splitlines()[-1])
    ends = figures.pop("step_ends", [])
    to_ends = {name: round(ends[index] - began, 2) for name, index in STEP_ENDS.items() if index < len(ends)}
    return record | figures | to_ends


def _children_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def run_again(command: list[str], *, limit_s: float, cache: str) -> dict[str, Any]:
    """Return the seconds of our first steps in a process with a warm compilation cache."""
    again = run([*command, "--steps", "3"], limit_s=limit_s, settings={"JAX_COMPILATION_CACHE_DIR": cache})
    if "failed" in again:
        return {"kept_failed": again["failed"]}
    found = {kept: again[name] for name, kept in KEPT.items() if name in again}
    return found | ({WARM: again["first_step_s"]} if "first_step_s" in again else {})


def machine_file(results: Path) -> Path:
    """Return the path of this machine's runs: peers.json, or another file if peers.json is from another machine."""
    here = bench.processor()
    for path in (results / "peers.json", *sorted(results.glob("peers_*.json"))):
        if not path.exists() or json.loads(path.read_text())["machine"]["processor"] == here:
            return path
    return results / f"peers_{re.sub(r'[^a-z0-9]+', '_', here.lower())}.json"


class Results:
    """Runs of this machine, in a file that is rewritten after every change."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.runs: Runs = json.loads(path.read_text())["runs"] if path.exists() else {}

    def add(self, workload: str, framework: str, record: dict[str, Any]) -> None:
        """Add a run."""
        self.runs = merged(self.runs, workload, framework, record)
        write(self._path, document(self.runs))

    def amend(self, workload: str, framework: str, further: dict[str, Any]) -> None:
        """Add figures to the last run."""
        self.runs[workload][framework][-1] |= further
        write(self._path, document(self.runs))

    def has(self, workload: str, framework: str) -> bool:
        """Return whether a framework has a run that did not fail; ours also needs a second process, failed or not."""
        good = [each for each in self.runs.get(workload, {}).get(framework, []) if "failed" not in each]
        second = {WARM, "kept_failed", *KEPT.values()}
        return any(framework != OURS or second & {*each} for each in good)


def merged(old: Runs, workload: str, framework: str, record: dict[str, Any]) -> Runs:
    """Add a run to the runs; it replaces runs of other commits, also for peers, so that all runs are of one time."""
    before = [each for each in old.get(workload, {}).get(framework, []) if each["commit"] == record["commit"]]
    return {**old, workload: {**old.get(workload, {}), framework: [*before, record]}}


def summary(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Return medians over the successful runs, or the failure of the last run if no run succeeded."""
    good = [each for each in runs if "failed" not in each]
    if not good:
        return {"failed": runs[-1]["failed"]}
    found = {}
    for name in (*FIGURES, *STEP_ENDS, WARM, *KEPT.values(), "logp_difference"):
        if measured := [each[name] for each in good if name in each]:
            found[name] = round(median(measured), 8 if name == "logp_difference" else 4)
    return found


def document(runs: Runs) -> dict[str, Any]:
    """Return the content of the file: medians by workload and framework, machine and versions, and every run."""
    versions: dict[str, dict[str, str]] = {}
    for workload, frameworks in runs.items():
        for framework, records in frameworks.items():
            for record in records:
                versions.setdefault(environment_of(workload, framework), {}).update(record.get("versions", {}))
    newest = max((each for names in runs.values() for kept in names.values() for each in kept), key=lambda r: r["date"])
    ordered = [name for name in WORKLOADS if name in runs]
    return {
        **{name: {framework: summary(kept) for framework, kept in runs[name].items()} for name in ordered},
        "machine": {"processor": bench.processor(), "system": platform.platform()},
        "versions": versions,
        "commit": newest["commit"],
        "date": newest["date"],
        "runs": runs,
    }


def write(path: Path, content: dict[str, Any]) -> None:
    """Write a JSON file atomically."""
    part = path.with_suffix(".part")
    part.write_text(json.dumps(content, indent=2) + "\n")
    part.replace(path)


def prepare(flags: argparse.Namespace) -> None:
    """Write the checkpoints and records that the workloads read.

    Raises:
      RuntimeError: A checkpoint or a record file could not be written.
    """
    make = multiprocessing.get_context("spawn").Process  # this process's memory would count in its children's peak
    for name in flags.workloads:
        if name in chat.WORKLOADS:
            process = make(target=_prepare_chat, args=(name, flags))
        else:
            process = make(target=bench.checkpoint, args=(flags.preset or WORKLOADS[name].preset, flags.models))
        process.start()
        process.join()
        if process.exitcode:
            raise RuntimeError(f"what {name} reads could not be written to {flags.models}")


def _prepare_chat(name: str, flags: argparse.Namespace) -> None:
    model = flags.model or chat.checkpoint(flags.models)
    sizes = {field: size for field in ("prompts", "new_tokens") if (size := getattr(flags, field))}
    chat.records_file(replace(WORKLOADS[name], **sizes), flags.models, model)


def difference_of_models(workload: str, flags: argparse.Namespace) -> dict[str, float]:
    """Return the largest difference of our and transformers' log-probabilities of the same solutions, as a figure.

    Raises:
      ValueError: The log-probabilities differ; the two sides would not be measured on the same work.
    """
    rows = min(4, flags.prompts or 4)
    ours = [*command_of(workload, OURS, flags), "--logp", str(rows)]
    theirs = command_of(workload, "trl", flags)
    theirs[2] = f"{PEERS}.trl.logp"
    commands = ours, [*theirs, "--rows", str(rows)]
    found = [bench.printed(command, stderr=subprocess.DEVNULL)["logp"] for command in commands]
    return {"logp_difference": chat.largest_difference(*found)}


def measure(flags: argparse.Namespace, path: Path) -> None:
    """Run all rounds."""
    prepare(flags)
    results = Results(path)
    for turn in range(flags.rounds):
        for workload in flags.workloads:
            for framework in (OURS, *flags.peers):
                if flags.missing and results.has(workload, framework):
                    continue
                _measure_one(workload, framework, flags, results)
                record = results.runs[workload][framework][-1]
                names = ("failed", *FIGURES, *STEP_ENDS, WARM, *KEPT.values(), "losses", "others_cpus")
                shown = {name: record[name] for name in names if name in record}
                print(f"round {turn + 1}", workload, framework, json.dumps(shown), flush=True)


def _measure_one(workload: str, framework: str, flags: argparse.Namespace, results: Results) -> None:
    """Run a framework once; run ours a second time with the compilation cache of the first process."""
    command = command_of(workload, framework, flags)
    if framework != OURS:
        results.add(workload, framework, run(command, limit_s=flags.limit_s, settings={}))
        return
    with tempfile.TemporaryDirectory() as cache:
        cold = run(command, limit_s=flags.limit_s, settings={"JAX_COMPILATION_CACHE_DIR": cache})
        results.add(workload, framework, cold)
        if "failed" not in cold:
            results.amend(workload, framework, run_again(command, limit_s=flags.limit_s, cache=cache))
    if workload in chat.WORKLOADS and "trl" in flags.peers:
        results.amend(workload, framework, difference_of_models(workload, flags))


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=list(WORKLOADS))
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--peers", nargs="*", choices=("trl", "tunix"), default=["trl", "tunix"])
    parser.add_argument("--environments", type=Path, default=Path("bench_environments"), help="where the peers live")
    parser.add_argument("--models", type=Path, default=Path("bench_models"), help="where checkpoints are kept")
    parser.add_argument("--limit-s", type=float, default=1800.0, help="time limit of one process")
    parser.add_argument("--preset", choices=bench.PRESETS, help="another model than the workloads': to try the script")
    parser.add_argument("--new-tokens", type=int, help="another limit than the workloads': to try the script")
    parser.add_argument("--prompts", type=int, help="another number of prompts than the workloads': to try the script")
    parser.add_argument("--model", type=Path, help="another chat checkpoint than SmolLM2: to try the script")
    parser.add_argument("--missing", action="store_true", help="only frameworks without a run on this machine")
    add_folders(parser)
    parser.add_argument("--draw", action="store_true", help="only tables and chart, from what was measured before")
    flags = parser.parse_args()
    flags.models, flags.environments = flags.models.absolute(), flags.environments.absolute()
    for folder in (flags.results, flags.docs):
        folder.mkdir(parents=True, exist_ok=True)
    if not flags.draw:
        measure(flags, machine_file(flags.results))
    from scripts.benchmarks import peers_report  # matplotlib is in memory from here on

    peers_report.renew(flags.results, flags.docs)


if __name__ == "__main__":
    main()

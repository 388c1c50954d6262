"""Comparison of two checkouts of jaxrlhf: metrics of short runs, bit by bit.

    python -m scripts.tools.compare_checkouts ../before . --cases ppo_arithmetic lora --out comparison.json

A change that moves or rewrites code must leave every metric of these runs equal to the last bit. Seconds, bytes and
compile counts are not compared. Both checkouts run with this interpreter, one after the other, each from its own
folder. With `--keep`, runs of `before` that the folder already has are not repeated.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

LORA = """
from dataclasses import replace
from jaxrlhf.config import FormatReward, Lora, Rewards, load

def get_config():
    run = load("grpo_arithmetic")
    digits = Rewards(parts=(FormatReward(pattern=r"(?s).*[0-9].*", weight=1.0),))
    return replace(run, name="lora", cold_start=None, rewards=digits, actor=replace(run.actor, lora=Lora(rank=4)))
"""
EIGHT = "--actor.layout.data 2 --actor.layout.fsdp 2 --actor.layout.tensor 2"
LAYOUTS = f"{EIGHT} --algorithm.critic.layout.data 4 --algorithm.critic.layout.fsdp 2"
RAY = "--cluster ray --devices 4 --cluster.devices-per-host 2 --actor.layout.fsdp 4 --algorithm.critic.layout.fsdp 4"
UNCOMPARED = ("time/", "compile/", "memory/", "throughput/", "reward/overlapped_fraction", "transfer/", "offload/")
"""Prefixes of metrics that depend on the machine and on timing; these metrics are not compared."""


@dataclass(frozen=True)
class Case:
    """A short run.

    Attributes:
      config: Name of a shipped configuration.
      arguments: Further command-line arguments.
      steps: Number of steps after the cold start.
      devices: Number of CPU devices of the process.
      source: Text of a configuration file, written to a file that replaces the shipped `config`.
    """

    config: str
    arguments: str = ""
    steps: int = 4
    devices: int = 1
    source: str | None = field(default=None, repr=False)


CASES = {
    "ppo_arithmetic": Case("ppo_arithmetic"),
    "grpo_arithmetic": Case("grpo_arithmetic"),
    "dapo": Case("dapo_arithmetic", steps=2),
    "safe_rlhf": Case("safe_rlhf_digits", steps=8),
    "lora": Case("lora", source=LORA),
    "eight_devices": Case("ppo_arithmetic", LAYOUTS, steps=3, devices=8),
    "ray": Case("ppo_arithmetic", RAY, steps=2),
}


def main() -> int:
    """Run the cases in both checkouts and print a table; 1 if a number differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", type=Path)
    parser.add_argument("after", type=Path)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--keep", type=Path, help="folder for the runs; those of `before` found there are not repeated")
    parser.add_argument("--out", type=Path, help="JSON file for the differences")
    flags = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        runs = flags.keep or Path(temporary)
        found = {}
        for name in flags.cases:
            before = metrics_of(flags.before, name, runs / "before" / name, again=False)
            after = metrics_of(flags.after, name, runs / "after" / name, again=True)
            found[name] = differences(before, after)
            count = sum(len(compared(record)) for record in before)
            print(f"{name}: {count} numbers of {len(before)} records, {len(found[name])} differ", flush=True)
            for line in found[name][:8]:
                print(f"  {line}")
    if flags.out is not None:
        flags.out.write_text(json.dumps(found, indent=1))
    return int(any(found.values()))


def metrics_of(checkout: Path, name: str, workdir: Path, *, again: bool) -> list[dict[str, Any]]:
    """Run a case in a checkout; return the metrics records of its cold start, steps and evaluations.

    Args:
      again: Whether to repeat a run that is already in `workdir`.
    """
    case, written = CASES[name], workdir / "metrics.jsonl"
    if again or not written.exists():
        shutil.rmtree(workdir, ignore_errors=True)
        workdir.mkdir(parents=True, exist_ok=True)
        config = f"{case.config}.py"
        if case.source is not None:
            config = str(workdir.parent / config)
            Path(config).write_text(case.source)
        command = [sys.executable, "-m", "jaxrlhf.train", "--config", config, "--workdir", str(workdir), "--no-resume"]
        command += ["--steps", str(case.steps), "--evaluation.every-steps", "0", "--checkpoint.every-steps", "0"]
        environment = os.environ | {
            "PYTHONPATH": str(checkout.resolve()),
            "JAX_PLATFORMS": "cpu",
            "JAX_NUM_CPU_DEVICES": str(case.devices),
        }
        if case.devices > 1 or case.arguments == RAY:
            environment["NPROC"] = "32"  # in a collective of many devices each device blocks a thread
        done = subprocess.run(
            [*command, *case.arguments.split()], cwd=checkout, env=environment, capture_output=True, text=True
        )
        if done.returncode:
            raise SystemExit(f"{name} in {checkout} failed:\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}")
    files = [path for path in sorted(workdir.rglob("*.jsonl")) if path.name in ("metrics.jsonl", "evaluation.jsonl")]
    return [json.loads(line) for path in files for line in path.read_text().splitlines()]


def compared(record: dict[str, Any]) -> dict[str, Any]:
    """Return the entries of a record that have to be equal."""
    return {name: value for name, value in record.items() if not name.startswith(UNCOMPARED)}


def differences(before: list[dict[str, Any]], after: list[dict[str, Any]]) -> list[str]:
    """Return a line for every number that differs in any bit, or that only one run has."""
    if len(before) != len(after):
        return [f"{len(before)} records before, {len(after)} after"]
    lines = []
    for index, (old, new) in enumerate(zip(map(compared, before), map(compared, after), strict=True)):
        for name in sorted(old.keys() | new.keys()):
            if old.get(name) != new.get(name):
                lines.append(f"record {index} {name}: {old.get(name)} before, {new.get(name)} after")
    return lines


if __name__ == "__main__":
    sys.exit(main())

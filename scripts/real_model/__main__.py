"""Measures this project's claims on a real chat model, SmolLM2-135M-Instruct, each in a fresh process.

    python scripts/tools/get_smollm2.py models
    python -m scripts.real_model [--claims logits sampler] [--gsm8k FOLDER] [--draw]

Writes `real_model.json` after every claim, so that a session cut short keeps what it measured and a later one renews
only what it runs; then the tables of docs/real_model.md (with `--draw`: these alone). All claims take about an hour on
two cores. Needs `jaxrlhf[test]`.
"""

import argparse
import importlib
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from scripts import pages
from scripts.benchmarks import workload as bench
from scripts.pages import DOCS, RESULTS, ROOT
from scripts.real_model import page

FILE, PAGE = RESULTS / "real_model.json", DOCS / "real_model.md"
MODEL = ROOT / "models" / "SmolLM2-135M-Instruct.Q4_1.gguf"
FUNCTIONS = {
    "logits": "logits:measure",
    "sampler": "sampler:measure",
    "greedy": "greedy:measure",
    "export": "exports:measure",
    "lora": "adapters:to_peft_and_back",
    "quantised": "adapters:quantised",
    "dpo": "preferences:dpo",
    "reward_model": "preferences:reward_model",
    "grpo_gsm8k": "gsm8k:grpo",
    "ppo_gsm8k": "gsm8k:ppo",
    "killed": "resumed:killed",
    "stale": "resumed:stale",
    "devices": "devices:measure",
}
"""Function of each claim, in the modules beside this one."""


def alone(name: str, flags: argparse.Namespace) -> None:
    """Measure one claim in this process, and write its figures to a file."""
    from scripts.real_model.runs import Given

    module, function = FUNCTIONS[name].split(":")
    measure = getattr(importlib.import_module(f"scripts.real_model.{module}"), function)
    with tempfile.TemporaryDirectory(prefix=f"{name}_") as folder:
        figures = measure(Given(flags.model.resolve(), flags.gsm8k, Path(folder)))
    flags.out.write_text(json.dumps(figures))


def measured(name: str, flags: argparse.Namespace) -> dict[str, Any] | None:
    """Measure one claim in a fresh process; None if the process failed."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "figures.json"
        command = [sys.executable, "-m", "scripts.real_model", "--alone", name, "--out", str(out)]
        command += ["--model", str(flags.model.absolute()), "--gsm8k", flags.gsm8k]
        start = time.perf_counter()
        settings = {"JAX_PLATFORMS": "cpu", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
        if subprocess.run(command, cwd=ROOT, env=os.environ | settings).returncode:
            return None
        return {
            "date": time.strftime("%Y-%m-%d %H:%M"),
            "commit": bench.commit(),
            "seconds": round(time.perf_counter() - start, 1),
            "machine": bench.about("jax", "transformers")["processor"],
            "figures": json.loads(out.read_text()),
        }


def draw() -> None:
    """Write the tables of the page."""
    files = (json.loads(file.read_text()) for file in sorted(RESULTS.glob("peers*.json")))
    peers: dict[str, Any] = next((measured for measured in files if "smollm2_grpo" in measured), {})
    pages.renew(PAGE, page.parts(_results(), peers))


def _results() -> page.Measured:
    return json.loads(FILE.read_text()) if FILE.is_file() else {}


def main() -> None:
    """Measure the claims that were asked for, and draw the page."""
    shown = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("python -m scripts.real_model", description=__doc__, formatter_class=shown)
    parser.add_argument("--claims", nargs="+", choices=FUNCTIONS, default=list(FUNCTIONS))
    parser.add_argument("--model", type=Path, default=MODEL, help="GGUF file of the model")
    parser.add_argument("--gsm8k", default="openai/gsm8k", help="GSM8K: a hub id, or a folder with test.jsonl")
    parser.add_argument("--draw", action="store_true", help="write the page from what is there, and measure nothing")
    parser.add_argument("--alone", choices=FUNCTIONS, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    flags = parser.parse_args()
    if flags.alone:
        alone(flags.alone, flags)
        return
    failed = []
    for name in () if flags.draw else flags.claims:
        entry = measured(name, flags)
        if entry is None:
            failed.append(name)
            continue
        print(name, json.dumps(entry["figures"]), flush=True)
        FILE.write_text(json.dumps(_results() | {name: entry}, indent=1) + "\n", encoding="utf-8")
    draw()
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()

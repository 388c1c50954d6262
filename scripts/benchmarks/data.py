"""Benchmark of seconds and memory until the first batch of large prompt files, without and with cached tokens.

    python -m scripts.benchmarks.data --prompts 100000 1000000 --tokenizer Qwen/Qwen2.5-0.5B-Instruct

Each start is a separate process. The files are synthetic, with a few dozen words a prompt. Memory is the peak of the
process minus its memory before it reads data: anonymous memory, and pages of mapped files, which the system can free
when other programs need memory. On a shared machine, CPU seconds are more reliable than wall-clock seconds.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from scripts.benchmarks import workload as bench
from scripts.pages import ROOT

WORDS = ("the", "train", "leaves", "at", "some", "hour", "and", "how", "many", "apples", "does", "each", "left")


def main() -> None:
    """Make each file, and start a process on it twice."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, nargs="+", default=[100_000, 1_000_000])
    parser.add_argument("--format", choices=("jsonl", "parquet"), default="jsonl")
    parser.add_argument("--tokenizer", help="directory or hub id; default: the embedded one")
    parser.add_argument("--start", metavar="FILE", help=argparse.SUPPRESS)  # flag of the child processes
    flags = parser.parse_args()
    if flags.start:
        print(json.dumps(start(flags.start, flags.tokenizer)))
        return
    print("| prompts | file | start | data there after | processor | memory of its own | mapped | kept on disk |")
    print("|---|---|---|---|---|---|---|---|")
    for prompts in flags.prompts:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / f"prompts.{flags.format}"
            make(path, prompts)
            for name in ("first", "later"):
                command = [sys.executable, "-m", "scripts.benchmarks.data", "--start", str(path)]
                command += ["--tokenizer", flags.tokenizer] if flags.tokenizer else []
                environment = os.environ | {"JAXRLHF_DATA_CACHE": f"{folder}/kept"}
                done = subprocess.run(command, cwd=ROOT, env=environment, check=True, capture_output=True, text=True)
                seconds, processor, own, mapped = json.loads(done.stdout.splitlines()[-1])
                kept = sum(file.stat().st_size for file in Path(folder, "kept").rglob("*") if file.is_file())
                sizes = [f"{size / 1e6:,.0f} MB" for size in (path.stat().st_size, own, mapped, kept)]
                print(
                    f"| {prompts:,} | {sizes[0]} | {name} | {seconds:.1f} s | {processor:.1f} s | "
                    f"{' | '.join(sizes[1:])} |",
                    flush=True,
                )


def make(path: Path, prompts: int) -> None:
    """Write a file of different prompts."""
    dice = random.Random(0)

    def record(number: int) -> dict[str, object]:
        text = " ".join([f"Question {number}:", *dice.choices(WORDS, k=dice.randrange(20, 60))])
        return {"prompt": text, "answer": number, "source": "made up"}

    if path.suffix == ".jsonl":
        with path.open("w") as file:
            file.writelines(json.dumps(record(number)) + "\n" for number in range(prompts))
        return
    import pyarrow
    import pyarrow.parquet

    schema = pyarrow.schema([("prompt", pyarrow.string()), ("answer", pyarrow.int64()), ("source", pyarrow.string())])
    with pyarrow.parquet.ParquetWriter(path, schema) as writer:
        for first in range(0, prompts, 50_000):
            records = [record(number) for number in range(first, min(first + 50_000, prompts))]
            writer.write_table(pyarrow.Table.from_pylist(records, schema=schema))


def start(path: str, tokenizer: str | None) -> tuple[float, float, int, int]:
    """Load the first batch; return wall-clock seconds, CPU seconds, and peak bytes of anonymous and mapped memory."""
    from jaxrlhf.config import PromptFile
    from jaxrlhf.data import Loader
    from jaxrlhf.data.sources import load_problems
    from jaxrlhf.data.tokenizer import load_tokenizer

    loaded = load_tokenizer(tokenizer)
    with bench.Held(period_s=0.1) as held:
        begun, busy = time.perf_counter(), time.process_time()
        problems = load_problems(PromptFile(path), loaded, split="train", max_prompt_tokens=512).problems
        Loader(problems, per_step=256, seed=0, fingerprint=problems.fingerprint).next()
        seconds, processor = time.perf_counter() - begun, time.process_time() - busy
    return seconds, processor, *held.peaks


if __name__ == "__main__":
    main()

"""Seconds and memory until the first batch of a large file of prompts, tokenised for the first time and kept.

    python scripts/bench_data.py --prompts 1000000 --tokenizer Qwen/Qwen2.5-0.5B-Instruct

Each start is a process of its own. The file is made up, with a few dozen words a prompt.
"""

import argparse
import json
import os
import random
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

WORDS = ("the", "train", "leaves", "at", "some", "hour", "and", "how", "many", "apples", "does", "each", "left")


def main() -> None:
    """Make the file, and start on it twice."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=1_000_000)
    parser.add_argument("--tokenizer", help="directory or hub id; default: the embedded one")
    parser.add_argument("--start", metavar="FILE", help=argparse.SUPPRESS)  # what the processes are given
    flags = parser.parse_args()
    if flags.start:
        print(json.dumps(start(flags.start, flags.tokenizer)))
        return
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "prompts.jsonl"
        make(path, flags.prompts)
        print(f"{flags.prompts} prompts, {path.stat().st_size / 1e6:.0f} MB")
        for name in ("first start", "later start"):
            command = [sys.executable, __file__, "--start", str(path)]
            command += ["--tokenizer", flags.tokenizer] if flags.tokenizer else []
            environment = os.environ | {"JAXRLHF_DATA_CACHE": f"{folder}/kept"}
            done = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
            seconds, first, peak, before = json.loads(done.stdout.splitlines()[-1])
            print(
                f"{name}: data after {seconds:.1f} s, first batch after {first:.1f} s; "
                f"peak memory {peak / 1e6:.0f} MB, of which imports {before / 1e6:.0f} MB"
            )
        kept = sum(file.stat().st_size for file in Path(folder, "kept").rglob("*") if file.is_file())
        print(f"kept on disk: {kept / 1e6:.0f} MB")


def make(path: Path, prompts: int) -> None:
    """Write a file of prompts, all different."""
    dice = random.Random(0)
    with path.open("w") as file:
        for number in range(prompts):
            text = " ".join([f"Question {number}:", *dice.choices(WORDS, k=dice.randrange(20, 60))])
            file.write(json.dumps({"prompt": text, "answer": number, "source": "made up"}) + "\n")


def start(path: str, tokenizer: str | None) -> tuple[float, float, int, int]:
    """Seconds until the data and the first batch are there, and peak bytes of the process: in all, and before."""
    from jaxrlhf.config import PromptFile
    from jaxrlhf.data import Loader
    from jaxrlhf.data.sources import load_problems
    from jaxrlhf.data.tokenizer import load_tokenizer

    loaded = load_tokenizer(tokenizer)
    before, begun = _peak_bytes(), time.perf_counter()
    problems = load_problems(PromptFile(path), loaded, split="train", max_prompt_tokens=512).problems
    seconds = time.perf_counter() - begun
    Loader(problems, per_step=256, seed=0, fingerprint=problems.fingerprint).next()
    return seconds, time.perf_counter() - begun, _peak_bytes(), before


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


if __name__ == "__main__":
    main()

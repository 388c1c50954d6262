"""Measures loading and saving a random checkpoint of 1 GB beside safetensors' own read. Prints one JSON line.

    python scripts/bench_load.py

Each measurement is a process of its own and runs twice: the first time compiles. Files are in the page cache, as they
have just been written. `extra_mb` is the most that a process has held beyond what it held before and the model itself.
"""

import argparse
import json
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import bench_peers
import bench_workload as bench

from jaxrlhf.models.config import ModelConfig

MB = 1e6
LIMIT_S = 600
KINDS = {"single": 10**12, "sharded": 200_000_000}
"""Bytes of a file."""


class Held:
    """The most memory that this process has of its own, files it maps left out, while the block runs."""

    def __init__(self, period_s: float = 0.002) -> None:
        self._period_s, self._done = period_s, threading.Event()

    def __enter__(self) -> "Held":
        self.before_bytes = self.peak_bytes = _held_bytes()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def _watch(self) -> None:
        while not self._done.wait(self._period_s):
            self.peak_bytes = max(self.peak_bytes, _held_bytes())

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()


def _held_bytes() -> int:
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon:"))
    return int(line.split()[1]) * 1024


def model(gigabytes: float) -> ModelConfig:
    """A Llama of about this size in float32."""
    layers = max(1, round((gigabytes - 0.26) / 0.067))
    return ModelConfig("llama", 32_000, 1024, 4096, layers, 16, 16, 64)


def make(folder: Path, gigabytes: float) -> dict[str, Any]:
    """Write the checkpoint, in one file and in several."""
    import jax

    from jaxrlhf import models

    config = model(gigabytes)
    params = jax.block_until_ready(jax.jit(models.init_params, static_argnums=(0, 1))(config, "lm", jax.random.key(0)))
    num_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    figures: dict[str, Any] = {"model_mb": round(num_bytes / MB)}
    for kind, file_bytes in KINDS.items():
        with Held() as held:
            start, busy = time.perf_counter(), time.process_time()
            models.save_params(params, config, folder / kind, max_shard_bytes=file_bytes)
            seconds, busy = time.perf_counter() - start, time.process_time() - busy
        extra = held.peak_bytes - held.before_bytes
        figures[f"save_{kind}"] = {"s": round(seconds, 2), "cpu_s": round(busy, 2), "extra_mb": round(extra / MB)}
    return figures


def load_ours(place: Path) -> Any:
    """On one device, as float32."""
    import jax

    from jaxrlhf import models

    return jax.block_until_ready(models.load_params(place, models.read_config(place), "lm"))


def load_safetensors(place: Path) -> Any:
    """As safetensors reads files into NumPy."""
    from safetensors.numpy import load_file

    return [load_file(file) for file in sorted(place.glob("*.safetensors"))]


LOADS = {"safetensors": load_safetensors, "ours": load_ours}


def measure(load: Callable[[Path], Any], place: Path) -> dict[str, Any]:
    """Load twice."""
    import jax

    figures: dict[str, Any] = {}
    jax.devices()
    for name in ("first", "again"):
        with Held() as held:
            start, busy = time.perf_counter(), time.process_time()
            loaded = load(place)
            seconds, busy = time.perf_counter() - start, time.process_time() - busy
        num_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(loaded))
        extra = held.peak_bytes - held.before_bytes - num_bytes
        figures[name] = {"s": round(seconds, 2), "cpu_s": round(busy, 2), "extra_mb": round(extra / MB)}
        del loaded
    return figures


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gigabytes", type=float, default=1.0)
    parser.add_argument("--part", nargs=2, help=argparse.SUPPRESS)
    flags = parser.parse_args()
    if flags.part:
        part, place = flags.part[0], Path(flags.part[1])
        print(json.dumps(make(place, flags.gigabytes) if part == "make" else measure(LOADS[part], place)))
        return

    command = [sys.executable, __file__, "--gigabytes", str(flags.gigabytes), "--part"]
    figures = {}
    with tempfile.TemporaryDirectory() as folder:
        parts = [("make", Path(folder)), *((part, Path(folder) / kind) for kind in KINDS for part in LOADS)]
        for part, place in parts:
            name = part if part == "make" else f"{part}_{place.name}"
            figures[name] = bench_peers.run([*command, part, str(place)], limit_s=LIMIT_S, settings={})
    print(json.dumps({"bench": "load", "gigabytes": flags.gigabytes, "machine": bench.processor(), **figures}))


if __name__ == "__main__":
    main()

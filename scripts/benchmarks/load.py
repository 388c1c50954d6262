"""Benchmark of loading and saving a random 1 GB checkpoint, next to safetensors' own loading. Prints one JSON line.

    python -m scripts.benchmarks.load

Each load has a separate process and runs twice: the first time compiles. Files are in the page cache, as they
have just been written. `extra_mb` is the peak memory of a process, minus its memory before the measurement and minus
the size of the model. `checkpoint` saves and restores the parameters as an item of a run's checkpoint; `checksums` and
`check` are the parts of both that checksums take, measured once more on the same files.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from jaxrlhf.models.config import ModelConfig
from scripts.benchmarks import compare_peers
from scripts.benchmarks import workload as bench

MB = 1e6
LIMIT_S, LOOK_S = 600, 0.002
KINDS = {"single": 10**12, "sharded": 200_000_000}
"""Maximum bytes of a file, by kind of checkpoint."""


def model(gigabytes: float) -> ModelConfig:
    """Return the configuration of a Llama of about this size in float32."""
    layers = max(1, round((gigabytes - 0.26) / 0.067))
    return ModelConfig("llama", 32_000, 1024, 4096, layers, 16, 16, 64)


def make(folder: Path, gigabytes: float) -> dict[str, Any]:
    """Write the checkpoint as one file and as several files; return the figures of saving."""
    import jax

    from jaxrlhf import models

    config = model(gigabytes)
    params = jax.block_until_ready(jax.jit(models.init_params, static_argnums=(0, 1))(config, "lm", jax.random.key(0)))
    num_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    figures: dict[str, Any] = {"model_mb": round(num_bytes / MB)}
    for kind, file_bytes in KINDS.items():
        save = partial(models.save_params, params, config, folder / kind, max_shard_bytes=file_bytes)
        figures[f"save_{kind}"] = taken(save)
    return figures


def checkpoint(folder: Path, gigabytes: float) -> dict[str, Any]:
    """Save and restore the parameters as an item of a checkpoint; return the figures of each part."""
    import jax

    from jaxrlhf import models
    from jaxrlhf.checkpoint import Checkpoints
    from jaxrlhf.checkpoint.items import TreeItem
    from jaxrlhf.runtime.checksums import damage_of, write_checksums

    config = model(gigabytes)
    held = [jax.block_until_ready(jax.jit(models.init_params, static_argnums=(0, 1))(config, "lm", jax.random.key(0)))]
    checkpoints = Checkpoints(folder / "checkpoints")
    item = TreeItem(lambda: held[0], lambda tree: held.__setitem__(0, jax.block_until_ready(tree)))

    def save() -> None:
        checkpoints.save(1, {"actor": item}, {})
        checkpoints.wait()

    figures = {"save": taken(save), "restore": taken(lambda: checkpoints.restore(1, {"actor": item}) and None)}
    figures["check"] = taken(partial(damage_of, checkpoints.folder(1, "actor"), checked=True))
    figures["checksums"] = taken(partial(write_checksums, checkpoints.folder(1, "actor")))  # no longer the checkpoint's
    checkpoints.close()
    return figures


def load_ours(place: Path) -> Any:
    """Load the checkpoint with jaxrlhf, on one device as float32."""
    import jax

    from jaxrlhf import models

    return jax.block_until_ready(models.load_params(place, models.read_config(place), "lm"))


def load_safetensors(place: Path) -> Any:
    """Load the files with safetensors, as NumPy arrays."""
    from safetensors.numpy import load_file

    return [load_file(file) for file in sorted(place.glob("*.safetensors"))]


LOADS = {"safetensors": load_safetensors, "ours": load_ours}


def measure(load: Callable[[Path], Any], place: Path) -> dict[str, Any]:
    """Load twice; return the figures of both times."""
    import jax

    jax.devices()
    return {name: taken(partial(load, place)) for name in ("first", "again")}


def taken(work: Callable[[], Any]) -> dict[str, Any]:
    """Run `work`; return wall-clock seconds, CPU seconds, and peak memory in addition to the result."""
    import jax

    with bench.Held(LOOK_S) as held:
        start, busy = time.perf_counter(), time.process_time()
        result = work()
        seconds, busy = time.perf_counter() - start, time.process_time() - busy
    extra = held.peaks[0] - sum(leaf.nbytes for leaf in jax.tree.leaves(result))
    return {"s": round(seconds, 2), "cpu_s": round(busy, 2), "extra_mb": round(extra / MB)}


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gigabytes", type=float, default=1.0)
    parser.add_argument("--part", nargs=2, help=argparse.SUPPRESS)
    flags = parser.parse_args()
    if flags.part:
        part, place = flags.part[0], Path(flags.part[1])
        made = {"make": make, "checkpoint": checkpoint}.get(part)
        print(json.dumps(made(place, flags.gigabytes) if made else measure(LOADS[part], place)))
        return

    command = [sys.executable, "-m", "scripts.benchmarks.load", "--gigabytes", str(flags.gigabytes), "--part"]
    figures = {}
    with tempfile.TemporaryDirectory() as folder:
        parts = [(part, Path(folder)) for part in ("checkpoint", "make")]
        parts += [(part, Path(folder) / kind) for kind in KINDS for part in LOADS]
        for part, place in parts:
            name = part if place == Path(folder) else f"{part}_{place.name}"
            figures[name] = compare_peers.run([*command, part, str(place)], limit_s=LIMIT_S, settings={})
    print(json.dumps({"bench": "load", "gigabytes": flags.gigabytes, "machine": bench.processor(), **figures}))


if __name__ == "__main__":
    main()

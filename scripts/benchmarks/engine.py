"""Benchmark of generation: tokens per second of the engine on one workload. Prints one JSON line.

    python -m scripts.benchmarks.engine --preset small --sequences 64 --prompt-tokens 64 --new-tokens 128

`bytes_per_s` counts the bytes that a decode step has to read: the weights once, and the filled part of the KV cache.
"""

import argparse
import json
import time
from pathlib import Path
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jaxrlhf.config import Sampling
from jaxrlhf.engine import Engine, Request
from jaxrlhf.models.attention.kernel_choice import choose_execution
from jaxrlhf.models.counts import weight_counts
from jaxrlhf.models.huggingface.config import read_config
from jaxrlhf.models.huggingface.load import load_params
from jaxrlhf.models.parameters import param_shapes
from scripts.benchmarks import workload as bench


def measure(flags: argparse.Namespace) -> dict[str, Any]:
    """Generate a few times; return medians. The first time compiles and is not counted."""
    preset = bench.PRESETS[flags.preset]
    config = read_config(str(bench.checkpoint(flags.preset, flags.models)))
    mesh = Mesh(np.array(jax.devices()[:1]), ("data",), axis_types=(AxisType.Auto,))
    dtype = jnp.dtype(jnp.float32 if jax.default_backend() == "cpu" else jnp.bfloat16)
    layout = jax.tree.map(lambda _: NamedSharding(mesh, PartitionSpec()), param_shapes(config, "lm"))
    weights = load_params(str(bench.checkpoint(flags.preset, flags.models)), config, "lm", layout)
    engine = Engine(
        config,
        mesh,
        slots=flags.slots or flags.sequences,
        prompts=-(-flags.sequences // flags.responses),
        max_prompt_tokens=flags.prompt_tokens,
        max_response_tokens=flags.new_tokens,
        stop_tokens=(bench.END,) if preset.ends else (),
        decode_tokens_per_dispatch=16,
        execution=choose_execution(config, dtype, mesh, row_axes=(), head_axes=(), decodes=True, cache=flags.cache),
    )
    engine.load(jax.tree.map(lambda leaf: leaf.astype(dtype), weights), version=0)
    groups = -(-flags.sequences // flags.responses)
    prompts = bench.prompts(bench.Workload(flags.preset, prompt_tokens=flags.prompt_tokens), count=groups)
    requests = [Request(index, prompts[index // flags.responses]) for index in range(flags.sequences)]
    times: list[float] = []
    tokens: list[int] = []
    for turn in range(flags.repeats + 1):
        start = time.perf_counter()
        completions = engine.generate(requests, Sampling(), seed=turn)
        times.append(time.perf_counter() - start)
        tokens.append(sum(len(completion.tokens) for completion in completions))
    seconds = median(times[1:])
    filled = sum(
        sum(range(len(request.prompt_tokens), len(request.prompt_tokens) + len(completion.tokens)))
        for request, completion in zip(requests, completions, strict=True)
    )
    steps = max(len(completion.tokens) for completion in completions)
    cache = filled * 2 * config.num_layers * config.num_kv_heads * config.head_dim * dtype.itemsize
    return {
        "generate_s": round(seconds, 4),
        "tokens_per_s": round(median(tokens[1:]) / seconds, 1),
        "first_s": round(times[0], 2),
        "bytes_per_s": round((steps * weight_counts(config).total * dtype.itemsize + cache) / seconds),
        "compilations": len(engine.compiled),
        "device": jax.devices()[0].device_kind,
    }


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--preset", choices=bench.PRESETS, default="small")
    parser.add_argument("--sequences", type=int, default=64)
    parser.add_argument("--responses", type=int, default=8, help="to a prompt")
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--slots", type=int, help="responses decoded together; all of them if not given")
    parser.add_argument("--cache", choices=("auto", "slots", "pages"), default="auto")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--models", type=Path, default=Path("bench_models"), help="where checkpoints are kept")
    flags = parser.parse_args()
    with bench.Memory() as memory:
        figures = measure(flags)
    sizes = {name: value for name, value in vars(flags).items() if name != "models"}
    print(json.dumps({"bench": "engine", **sizes, **figures, "peak_rss_mb": round(memory.peak_mb)}))


if __name__ == "__main__":
    main()

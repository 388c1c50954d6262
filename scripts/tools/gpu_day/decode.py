"""Benchmark of the engine: tokens per second, and the share of the card's memory bandwidth that decoding uses.

python -m scripts.tools.gpu_day.decode --size 0.5B --rows 8 64 256 --cache auto [--bandwidth 3.0e12]
"""

import argparse
import os
import time
from statistics import median

import jax
import numpy as np

from jaxrlhf import models
from jaxrlhf.config import Sampling
from jaxrlhf.engine import Engine, Request
from jaxrlhf.models.counts import weight_counts
from scripts.tools.gpu_day.report import SIZES, compute_dtype, one_device, random_params, refused, say


def measure(flags: argparse.Namespace, rows: int) -> None:
    """Generate a few times and print medians; the first time compiles and is not counted."""
    config, dtype, mesh = SIZES[flags.size], compute_dtype(), one_device()
    execution = models.choose_execution(config, dtype, mesh, row_axes=(), head_axes=(), decodes=True, cache=flags.cache)
    start = time.perf_counter()
    engine = Engine(
        config,
        mesh,
        slots=rows,
        prompts=rows,
        max_prompt_tokens=flags.prompt_tokens,
        max_response_tokens=flags.new_tokens,
        stop_tokens=(),
        decode_tokens_per_dispatch=flags.tokens_per_dispatch,
        execution=execution,
    )
    engine.load(random_params(config, dtype), version=0)
    dice = np.random.default_rng(0)
    prompts = dice.integers(2, config.vocab_size, (rows, flags.prompt_tokens))
    times: dict[int, list[float]] = {}
    for new_tokens in (1, flags.new_tokens):
        asked = [Request(index, tuple(map(int, row)), max_tokens=new_tokens) for index, row in enumerate(prompts)]
        for turn in range(4):
            begin = time.perf_counter()
            engine.generate(asked, Sampling(), seed=turn)
            times.setdefault(new_tokens, []).append(time.perf_counter() - begin)
    first_s = time.perf_counter() - start - sum(sum(each[1:]) for each in times.values())
    prefill_s, whole_s = (median(each[1:]) for each in times.values())
    decode_s = max(1e-9, whole_s - prefill_s)
    steps = flags.new_tokens - 1
    filled = rows * (flags.prompt_tokens + flags.new_tokens / 2)
    cache_bytes = filled * 2 * config.num_layers * config.num_kv_heads * config.head_dim * dtype(0).itemsize
    moved = steps * (weight_counts(config).total * dtype(0).itemsize + cache_bytes)
    memory = jax.devices()[0].memory_stats() or {}
    say(
        "decode",
        size=flags.size,
        rows=rows,
        cache=flags.cache,
        kernel=execution.pages_kernel or execution.decode_kernel,
        tokens_per_dispatch=flags.tokens_per_dispatch,
        flags=os.environ.get("DECODE_FLAGS", ""),
        prefill_tokens_per_s=round(rows * flags.prompt_tokens / prefill_s),
        decode_tokens_per_s=round(rows * steps / decode_s),
        step_ms=round(1e3 * decode_s / steps, 3),
        bytes_per_s=round(moved / decode_s),
        share_of_bandwidth=round(moved / decode_s / flags.bandwidth, 3),
        first_s=round(first_s, 1),
        compilations=len(engine.compiled),
        peak_gb=round(memory.get("peak_bytes_in_use", 0) / 1e9, 2),
    )


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--size", choices=SIZES, default="0.5B")
    parser.add_argument("--rows", type=int, nargs="+", default=[8, 64, 256])
    parser.add_argument("--cache", choices=("auto", "slots", "pages"), default="auto")
    parser.add_argument("--prompt-tokens", type=int, default=256)
    parser.add_argument("--new-tokens", type=int, default=256)
    parser.add_argument("--tokens-per-dispatch", type=int, default=16)
    parser.add_argument("--bandwidth", type=float, default=3.35e12, help="bytes a second of the card's memory")
    flags = parser.parse_args()
    for rows in flags.rows:
        try:
            measure(flags, rows)
        except Exception as error:  # continue with the next size
            say("decode", size=flags.size, rows=rows, cache=flags.cache, refused=refused(error))


if __name__ == "__main__":
    main()

"""Trial of the attention kernels on this device, and benchmark of attention over rows, forward and backward.

python -m scripts.tools.gpu_day.kernels
"""

import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jaxrlhf import models
from jaxrlhf.models.attention.attention import ROWS
from jaxrlhf.models.attention.score_mod import ScoreMod
from scripts.tools.gpu_day.report import SIZES, compute_dtype, one_device, refused, say, seconds

HEADS = {64: (14, 2), 128: (12, 2), 256: (8, 4)}
"""Number of query heads and of key-value heads, by head dimension."""
TRIED = ((64, None, None), (128, None, None), (256, None, None), (128, 1024, 50.0))
"""Head dimension, window and soft cap of each trial."""
ROW_HEADS = (16, 8, 128)
"""Query heads, key-value heads and head dimension of the timed attention."""


def choices() -> None:
    """Print the kernels that a run would choose for each trial: head dimension, window and soft cap."""
    mesh, whole = one_device(), SIZES["0.5B"]
    for head_dim, window, cap in TRIED:
        heads, kv_heads = HEADS[head_dim]
        sizes: dict[str, Any] = {"head_dim": head_dim, "num_heads": heads, "num_kv_heads": kv_heads}
        config = replace(whole, **sizes, num_layers=2, sliding_window=window, attn_logit_softcapping=cap)
        found: dict[str, Any] = {}
        start = time.perf_counter()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for cache in ("slots", "auto"):
                chosen = models.choose_execution(
                    config, jnp.bfloat16, mesh, row_axes=(), head_axes=(), decodes=True, cache=cache
                )
                found |= {"rows": chosen.rows_kernel, cache: chosen.pages_kernel or chosen.decode_kernel}
        say(
            "kernels",
            head_dim=head_dim,
            window=window,
            soft_cap=cap,
            rows=found["rows"],
            decode=found["slots"],
            pages=found["auto"],
            seconds=round(time.perf_counter() - start, 1),
            why=sorted({str(each.message)[:300] for each in caught}),
        )


def rates(widths: tuple[int, ...]) -> None:
    """Time attention of one causal row forward and backward, and JAX's cuDNN attention for comparison."""
    heads, kv_heads, head_dim = ROW_HEADS
    for width in widths:
        keys = jax.random.split(jax.random.key(0), 3)
        query, key, value = (
            jax.random.normal(each, (1, width, count, head_dim), compute_dtype())
            for each, count in zip(keys, (heads, kv_heads, kv_heads), strict=True)
        )
        segment = jnp.ones((1, width), jnp.int32)
        score_mod = ScoreMod(head_dim**0.5, None, None)
        programs: dict[str, Callable[..., Any]] = {
            "flash": lambda q, k, v, segment=segment, mod=score_mod: ROWS["flash"](q, k, v, segment, mod),
            "cudnn": lambda q, k, v: jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="cudnn"),
        }
        flops = 4 * heads * head_dim * width * (width + 1) / 2
        for name, attend in programs.items():
            forward = jax.jit(attend)
            backward = jax.jit(jax.grad(lambda *a, attend=attend: attend(*a).astype(jnp.float32).sum(), (0, 1, 2)))
            try:
                forward_s = seconds(partial(forward, query, key, value))
                backward_s = seconds(partial(backward, query, key, value))
                memory: Any = backward.lower(query, key, value).compile().memory_analysis()
            except Exception as error:  # an error of a kernel is a result too
                say("attention", kernel=name, width=width, refused=refused(error))
                continue
            say(
                "attention",
                kernel=name,
                width=width,
                forward_ms=round(1e3 * forward_s, 3),
                both_ms=round(1e3 * backward_s, 3),
                forward_tflops_per_s=round(flops / forward_s / 1e12, 1),
                both_tflops_per_s=round(3.5 * flops / backward_s / 1e12, 1),
                temporary_mb=round(memory.temp_size_in_bytes / 1e6, 1),
            )


if __name__ == "__main__":
    choices()
    rates((2048,) if jax.default_backend() == "cpu" else (2048, 8192, 32768))

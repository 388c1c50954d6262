"""Table of the attention kernels of every model family, compiled for chips that need not be attached.

    JAX_PLATFORMS=cpu python -m scripts.planning.kernel_table [--families qwen2 ...] [--chips h100 v5p ...] [--write]

A family is compiled as a few layers with heads of a published size, for one device of a chip, with the kernels that a
run chooses there. The compiled operations are packed rows forward and backward, prefill in chunks, and a decode step
with the KV cache in slots or in pages. `--write` renews kernels.json and the table in docs/accelerators.md after
every family. `jaxrlhf[compile]` installs the compilers; a family takes about 30 seconds for a GPU and a minute for a
TPU on two idle cores.
"""

import argparse
import itertools
import json
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from transformers import AutoConfig

from jaxrlhf import models
from jaxrlhf.models.attention.pages import PAGE_TOKENS, PagedCache, empty_pages
from jaxrlhf.models.config import ModelConfig
from jaxrlhf.models.execution import Execution
from jaxrlhf.models.huggingface.families import FAMILIES
from jaxrlhf.planner.hardware import hardware
from jaxrlhf.planner.topology import compiler_options, topology
from jaxrlhf.sharding.described import lowering_for
from scripts.pages import DOCS, RESULTS, renew

CHIPS = {"h100": "h100x1", "b200": "b200x1", "v5e": "v5e-1", "v5p": "v5p-8", "v6e": "v6e-1"}
"""Hardware name of each chip; programs are compiled for one device of the hardware."""

LAYERS = 4
"""Number of layers of a family; every kind of layer of the family occurs in them."""

WIDTH, SLOTS, CAPACITY = 4096, 32, 2048
"""Tokens of a packed row, number of slots, and cache positions of a slot."""

_BORROWING = {"layer_types": ["sliding_attention", "full_attention"] * 2, "num_kv_shared_layers": 2}
"""Two layers with a KV cache, and two layers that share it."""

SIZES: dict[str, dict[str, Any]] = {
    "qwen2": {"hidden_size": 3584, "num_attention_heads": 28, "num_key_value_heads": 4},
    "qwen3": {"num_key_value_heads": 8, "head_dim": 128},
    "llama": {"num_key_value_heads": 8},
    "olmo3": {"num_key_value_heads": 8},
    "gemma2": {"hidden_size": 3584, "num_attention_heads": 16, "num_key_value_heads": 8},
    "gemma3_text": {"layer_types": ["sliding_attention", "sliding_attention", "sliding_attention", "full_attention"]},
    "gemma4_text": _BORROWING | {"num_key_value_heads": 1, "hidden_size_per_layer_input": 256},
    "gemma3n_text": _BORROWING,
    "deepseek_v2": {"num_experts_per_tok": 6},
    "glm4_moe": {"head_dim": 128},
    "granitemoehybrid": {
        "layer_types": ["mamba", "mamba", "mamba", "attention"],
        "hidden_size": 1536,
        "num_attention_heads": 12,
        "num_key_value_heads": 4,
        "mamba_n_heads": 48,
        "mamba_d_state": 128,
        "num_local_experts": 64,
        "num_experts_per_tok": 6,
        "intermediate_size": 512,
    },
}
"""Fields of a published size, for families whose defaults in transformers' configuration match no published model."""

OPERATIONS = ("rows forward", "rows backward", "prefill", "decode", "pages")

Program = Callable[..., Any]


def config_of(family: str) -> ModelConfig:
    """Return a few narrow layers of a family with published heads: transformers' defaults, except for `SIZES`.

    An MLP replaces experts, because experts do not affect attention and take minutes to compile.
    """
    fields = AutoConfig.for_model(family, num_hidden_layers=LAYERS, **SIZES.get(family, {})).to_dict()
    with TemporaryDirectory() as directory:
        fields["architectures"] = [FAMILIES[family].causal]
        (Path(directory) / "config.json").write_text(json.dumps(fields), encoding="utf-8")
        config = models.read_config(directory)
    return replace(config, vocab_size=1024, hidden_size=1024, intermediate_size=2048, experts=None, dense_layers=0)


def execution_of(config: ModelConfig, mesh: Mesh, cache: Literal["slots", "auto"]) -> Execution:
    """Return the execution that a run chooses on a mesh."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # warnings about unused kernels, which the table shows
        return models.choose_execution(
            config, jnp.bfloat16, mesh, row_axes=("data",), head_axes=(), decodes=True, cache=cache
        )


def programs(config: ModelConfig, mesh: Mesh) -> Iterator[tuple[str, str, Program, tuple[Any, ...]]]:
    """Yield the operations of a family on a one-device mesh: name, kernel, function and shapes of the arguments."""
    execution, paged = (execution_of(config, mesh, cache) for cache in ("slots", "auto"))
    params = models.param_shapes(config, "lm", jnp.bfloat16)
    row = jax.ShapeDtypeStruct((1, WIDTH), jnp.int32)
    rows = params, row, row, row

    def forward(params, token_RW, position_RW, segment_RW):
        return models.hidden_states(params, config, token_RW, position_RW, segment_RW, execution=execution).hidden_RWD

    def backward(*rows):
        return jax.grad(lambda *rows: forward(*rows).astype(jnp.float32).sum(), allow_int=True)(*rows)

    yield "rows forward", execution.rows_kernel, forward, rows
    yield "rows backward", execution.rows_kernel, backward, rows

    prompts = jax.ShapeDtypeStruct((4, CAPACITY), jnp.int32)
    lengths, slots = (jax.ShapeDtypeStruct((count,), jnp.int32) for count in (4, SLOTS))
    prefill = partial(_prefill, config=config, execution=execution)
    yield "prefill", "xla", prefill, (params, prompts, lengths)

    layers = jax.eval_shape(lambda params: models.unstack_layers(params, config, execution=execution), params)

    def decode(layers, params, token_B, position_B, cache):
        output = models.decode(layers, params, config, token_B, position_B, cache, execution=execution)
        return output.hidden_BD, output.cache

    cache = jax.eval_shape(lambda: models.empty_cache(config, slots=SLOTS, capacity=CAPACITY, execution=execution))
    yield "decode", execution.decode_kernel, decode, (layers, params, slots, slots, cache)
    if paged.pages_kernel is None:
        return

    def decode_pages(layers, params, token_B, position_B, cache):
        output = models.decode(layers, params, config, token_B, position_B, cache.split(), execution=paged)
        return output.hidden_BD, cache.joined(output.cache)

    columns = CAPACITY // PAGE_TOKENS
    pages = jax.eval_shape(lambda: empty_pages(config, pages=SLOTS * columns, execution=paged))
    where: Any = jax.ShapeDtypeStruct((SLOTS, columns), jnp.int32)
    cache = PagedCache(pages, where)
    yield "pages", paged.pages_kernel, decode_pages, (layers, params, slots, slots, cache)


def _prefill(params, token_PS, length_P, *, config, execution):
    return models.prefill(params, config, token_PS, length_P, chunk_tokens=CAPACITY // 4, execution=execution)


def compiled(family: str, chip: str, operations: Sequence[str] = OPERATIONS) -> Iterator[dict[str, Any]]:
    """Compile each operation of a family for a chip; yield kernel, temporary bytes and seconds, or the error."""
    machine = hardware(CHIPS[chip])
    devices = topology(machine)[:1]
    mesh = Mesh(np.array(devices), ("data",))
    whole = NamedSharding(mesh, PartitionSpec())
    with lowering_for(devices):
        made = list(programs(config_of(family), mesh))
    for operation, kernel, function, shapes in made:
        if operation not in operations:
            continue
        row = {"family": family, "chip": chip, "operation": operation, "kernel": kernel}
        start = time.perf_counter()
        donated = (4,) if operation in ("decode", "pages") else ()
        arguments = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=whole), shapes)
        try:
            with lowering_for(devices):
                lowered = jax.jit(function, donate_argnums=donated).lower(*arguments)
            program = lowered.compile(compiler_options(machine))
        except Exception as error:  # the table reports whatever a compiler raises
            yield row | {"refused": f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"}
            continue
        memory = program.memory_analysis()
        assert memory is not None, "a compiler of accelerators says what a program needs"
        seconds = round(time.perf_counter() - start, 1)
        yield row | {"temporary_bytes": memory.temp_size_in_bytes, "seconds": seconds}


def table(rows: list[dict[str, Any]]) -> str:
    """Return a Markdown table of the kernel of each operation of a family; chips with the same kernels share a line."""
    cells: dict[tuple[str, str], dict[str, str]] = {}
    for row in rows:
        text = f"{row['kernel']} does not compile" if "refused" in row else row["kernel"]
        cells.setdefault((row["family"], row["chip"]), {})[row["operation"]] = text
    lines = [f"| family | chips | {' | '.join(OPERATIONS)} |", "|---|---|" + "---|" * len(OPERATIONS)]
    by_family = itertools.groupby(cells.items(), key=lambda cell: cell[0][0])
    for family, chips in by_family:
        alike: dict[str, list[str]] = {}
        for (_, chip), kernels in chips:
            alike.setdefault(" | ".join(kernels.get(name, "—") for name in OPERATIONS), []).append(chip)
        lines += [f"| {family} | {', '.join(names)} | {text} |" for text, names in alike.items()]
    return "\n".join(lines)


def write(rows: list[dict[str, Any]]) -> None:
    """Replace the saved rows of the same operations by new rows, and renew the table of the page."""
    file = RESULTS / "kernels.json"
    known = json.loads(file.read_text(encoding="utf-8")) if file.exists() else []
    by_name = {(row["family"], row["chip"], row["operation"]): row for row in [*known, *rows]}
    orders = list(FAMILIES), list(CHIPS), OPERATIONS
    known = [
        by_name[key]
        for key in sorted(by_name, key=lambda key: [order.index(each) for order, each in zip(orders, key, strict=True)])
    ]
    file.write_text(json.dumps(known, indent=1) + "\n", encoding="utf-8")
    renew(DOCS / "accelerators.md", {"kernels": table(known)})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", nargs="+", choices=FAMILIES, default=list(FAMILIES))
    parser.add_argument("--chips", nargs="+", choices=CHIPS, default=list(CHIPS))
    parser.add_argument("--operations", nargs="+", choices=OPERATIONS, default=list(OPERATIONS))
    parser.add_argument("--write", action="store_true")
    given = parser.parse_args()
    for chip, family in itertools.product(given.chips, given.families):
        rows = []
        for row in compiled(family, chip, given.operations):
            print(json.dumps(row), flush=True)
            rows.append(row)
        if given.write:
            write(rows)


if __name__ == "__main__":
    main()

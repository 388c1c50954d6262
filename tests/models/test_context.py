"""Tokens of a row split over devices give what whole rows give, by the collectives that the formula counts."""

import math
from dataclasses import replace

import jax
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from split_tokens import compiled, execution_on, mesh_with, packed, program
from tiny_models import DECODER, close, random_params

from jaxrlhf import models
from jaxrlhf.models.attention.head_exchange import exchanged_heads
from jaxrlhf.models.config import Experts, LatentAttention, LinearAttention
from jaxrlhf.models.counts import weight_counts
from jaxrlhf.planner.hlo import collectives, product_flops
from jaxrlhf.sharding.mesh import BATCH_AXES
from jaxrlhf.sharding.rules import TRAIN, shardings

EIGHT = replace(DECODER, num_heads=8, num_kv_heads=4)
KINDS = {
    "plain": EIGHT,
    "one key": replace(EIGHT, num_kv_heads=1),
    "seven heads to a key, and sinks": replace(EIGHT, num_heads=14, num_kv_heads=2, attention_sinks=True),
    "fewer heads than devices": replace(EIGHT, num_heads=6, num_kv_heads=2),
    "windows and soft caps": replace(
        EIGHT, family="gemma3_text", sliding_window=9, sliding_layers=(True, False), attn_logit_softcapping=3.0
    ),
    "latents": replace(
        EIGHT, family="deepseek_v3", num_kv_heads=8, latent=LatentAttention(8, rope_dim=4, value_dim=6, query_rank=16)
    ),
    "experts": replace(EIGHT, family="qwen3_moe", experts=Experts(8, 2, 16, 8, scores="sigmoid", bias=True)),
    "linear attention": replace(
        EIGHT,
        family="qwen3_5_text",
        qk_norm=True,
        attention_gate=True,
        linear=LinearAttention(key_heads=2, value_heads=4, key_dim=8, value_dim=6),
        linear_layers=(True, False),
    ),
    "state space": replace(
        EIGHT,
        family="granitemoehybrid",
        linear=LinearAttention(key_heads=4, value_heads=8, key_dim=8, value_dim=6, groups=2),
        linear_layers=(True, False),
    ),
}


@pytest.fixture(scope="module")
def whole():
    """Results of one device, computed once for each kind."""
    known = {}

    def of(kind):
        if kind not in known:
            known[kind] = program(KINDS[kind], models.ONE_DEVICE)(random_params(KINDS[kind]), packed())
        return known[kind]

    return of


@pytest.mark.parametrize(
    ("kind", "sizes"),
    [
        ("seven heads to a key, and sinks", {"fsdp": 2, "context": 2, "tensor": 2}),
        *[
            pytest.param(kind, sizes, marks=pytest.mark.slow)
            for kind, sizes in [
                ("experts", {"fsdp": 2, "expert": 2, "context": 2}),
                ("fewer heads than devices", {"context": 8}),
                ("windows and soft caps", {"data": 2, "context": 2, "tensor": 2}),
                ("latents", {"context": 4, "tensor": 2}),
                ("linear attention", {"fsdp": 2, "context": 2, "tensor": 2}),
            ]
        ],
        *[
            pytest.param(kind, sizes, marks=pytest.mark.seeds)
            for kind, sizes in [
                ("one key", {"context": 8}),
                ("plain", {"data": 2, "fsdp": 2, "context": 2}),
                ("state space", {"context": 2, "tensor": 2}),
            ]
        ],
    ],
    ids=str,
)
def test_parts_of_rows_give_what_whole_rows_give(whole, kind, sizes):
    config, mesh = KINDS[kind], mesh_with(sizes)
    params = jax.device_put(random_params(config), shardings(mesh, models.param_dims(config, "lm"), TRAIN))
    rows = jax.device_put(packed(), NamedSharding(mesh, PartitionSpec(BATCH_AXES)))
    close(program(config, execution_on(mesh, config))(params, rows), whole(kind), 5e-6)


WIDE = replace(
    EIGHT,
    vocab_size=512,
    hidden_size=128,
    intermediate_size=320,
    num_layers=3,
    num_heads=14,
    num_kv_heads=2,
    head_dim=16,
)
ROWS, WIDTH = 2, 1024


@pytest.mark.parametrize("context", [4, pytest.param(8, marks=pytest.mark.seeds)])
def test_heads_are_exchanged_and_no_token_is_gathered(context):
    """Each layer exchanges queries, keys, values and results: forward, once more where computed again, and backward."""
    text = compiled(WIDE, (("context", context),), rows=ROWS, width=WIDTH).as_text()
    found = collectives(text, {"context": context})
    heads, keys = {4: (16, 4), 8: (16, 8)}[context]
    tokens, sent = ROWS * WIDTH // context, (context - 1) / context
    exchanged = 3 * WIDE.num_layers * (2 * heads + 2 * keys) * WIDE.head_dim * tokens * 4 * sent
    # From a table that is split by width, and back.
    embedded = 2 * tokens * WIDE.hidden_size * 4 * sent
    moved = {kind: sum(each.bytes for each in found if each.kind == kind) for kind in {each.kind for each in found}}
    assert moved.pop("all-to-all") == exchanged + embedded
    # Matrices forward, again, and backward, the table and the head once less; and the numbers of tokens.
    table = WIDE.vocab_size * WIDE.hidden_size
    layers = weight_counts(WIDE).layers
    assert moved.pop("all-gather") <= (3 * layers + 3 * table) * 4 * sent + ROWS * WIDTH * 4
    # Gradients, where a backend has no reduce-scatter.
    assert moved.pop("all-reduce") <= 2 * (layers + 2 * table) * 4 * sent + 10_000
    assert moved.pop("collective-permute", 0) < 100 and not moved


@pytest.mark.parametrize(
    "sizes",
    [
        pytest.param({"data": 2, "fsdp": 2, "tensor": 2}, marks=pytest.mark.slow),
        {"fsdp": 2, "context": 2, "tensor": 2},
        pytest.param({"fsdp": 2, "expert": 2, "tensor": 2}, marks=pytest.mark.seeds),
    ],
    ids=str,
)
def test_every_collective_of_an_update_was_asked_for(sizes):
    """Weights are gathered and their gradients added, activations added over `tensor`; nothing is permuted."""
    text = compiled(EIGHT, tuple(sizes.items()), rows=ROWS * 4, width=256).as_text()
    split = tuple(axis for axis in ("fsdp", "expert", "context") if axis in sizes)
    shared = tuple(axis for axis in ("data", "fsdp", "expert", "context") if axis in sizes)
    asked = {("all-gather", split), ("all-to-all", split), ("all-to-all", ("context",))}
    asked |= {("all-reduce", axes) for axes in (split, shared, ("data",), ("tensor",))}
    found = collectives(text, sizes)
    assert {each.kind for each in found} >= {"all-gather", "all-to-all", "all-reduce"}
    # Beside them travel counts, and the tokens next to a border of slices.
    assert [each for each in found if (each.kind, each.axes) not in asked and each.bytes > 1000] == []
    ways = [size for axis, size in sizes.items() if axis in split]
    tokens = ROWS * 4 * 256 // math.prod(sizes[axis] for axis in shared)
    exchanged = 2 * tokens * EIGHT.hidden_size * 4 * (1 - 1 / math.prod(ways))
    assert [each.bytes for each in found if (each.kind, each.axes) == ("all-to-all", split)] == [exchanged]


@pytest.mark.slow
def test_work_and_activations_are_divided_evenly():
    """Products and what grows with the tokens of a row are divided by `context`, but for the heads that fill up."""

    def programs(width):
        return {c: compiled(WIDE, (("context", c),), rows=ROWS, width=width) for c in (1, 8)}

    def temporary(compiled_by_context):
        return {c: each.memory_analysis().temp_size_in_bytes for c, each in compiled_by_context.items()}

    long, short = programs(4096), programs(2048)
    filled = 16 / 14
    work = {context: product_flops(each.as_text()) * context for context, each in long.items()}
    grown, before = temporary(long), temporary(short)
    growth = {context: (grown[context] - before[context]) * context for context in long}
    assert work[8] == pytest.approx(work[1], rel=0.1 + filled - 1)
    assert growth[8] <= 1.1 * filled * growth[1], growth


def test_heads_are_filled_up_as_little_as_can_be():
    """Copies of keys, keys and queries to each, of one tensor shard."""
    assert exchanged_heads(8, 4, 8) == (1, 8, 4)  # Qwen3-8B
    assert exchanged_heads(4, 7, 8) == (2, 8, 4)  # Qwen2.5-7B: 28 heads become 32
    assert exchanged_heads(4, 7, 32).heads == 32  # four devices of 32 have zeros alone
    assert exchanged_heads(4, 7, 4) == (1, 4, 7)
    assert exchanged_heads(2, 7, 4) == (2, 4, 4)  # Qwen2.5-0.5B: 14 become 16
    assert exchanged_heads(1, 8, 8) == (8, 8, 1)
    assert exchanged_heads(6, 1, 4) == (1, 8, 1)
    assert exchanged_heads(128, 1, 8) == (1, 128, 1)

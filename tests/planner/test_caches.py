"""Predicted bytes of caches, compared with real caches: slots, shared pages, and rings."""

import itertools
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from unit_machines import DENSE, HALVES, UNIT

from jaxrlhf import models
from jaxrlhf.config import Layout
from jaxrlhf.engine.buckets import with_rings
from jaxrlhf.models.config import FullHeads, ModelConfig
from jaxrlhf.planner.cost.cost import Decoding, decode_cost
from jaxrlhf.planner.cost.memory import cache_bytes, cache_bytes_per_token, cache_per_sequence
from jaxrlhf.planner.workload import Workload

ALONE = Layout(1)


@pytest.mark.parametrize(("kv_heads", "itemsize", "dtype"), [(4, 2, jnp.bfloat16), (2, 4, jnp.float32)])
def test_a_cached_token_takes_what_the_cache_allocates_for_it(kv_heads: int, itemsize: int, dtype: Any) -> None:
    config = replace(DENSE, num_kv_heads=kv_heads)
    cache = jax.eval_shape(lambda: models.empty_cache(config, slots=6, capacity=50, execution=models.Execution(dtype)))
    whole = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(cache)) / (6 * 50)
    assert cache_bytes_per_token(config, Layout(8), itemsize=itemsize) == whole
    assert cache_bytes_per_token(config, Layout(1, 1, 8), itemsize=itemsize) == whole
    assert cache_bytes_per_token(config, Layout(1, 1, 2, 4, 2, 2), itemsize=itemsize) == whole / 4
    shared = Layout(1, generation_context=4, generation_tensor=2)
    assert cache_bytes_per_token(config, shared, itemsize=itemsize) == whole / 8
    # A head cannot be split: further shards hold copies.
    assert cache_bytes_per_token(config, Layout(1, 1, 1, 4, 1, 4), itemsize=itemsize) == whole / min(4, kv_heads)


def test_responses_share_their_prompts_where_the_cache_lies_in_pages() -> None:
    work = Workload(3, 12, 10, 6, 30, longest_prompt_tokens=20)
    token = cache_bytes_per_token(DENSE, ALONE, itemsize=2)
    slots, pages = (cache_per_sequence(DENSE, ALONE, work, replace(HALVES, pages=pages)) for pages in (False, True))
    for prompts, responses in itertools.product((1, 3), range(1, 13)):
        assert slots.of(responses, prompts=prompts) == 30 * token * responses
        assert pages.of(responses, prompts=prompts) == (20 * min(prompts, responses) + 10 * responses) * token
        # One more response would not fit.
        for room in range(1, 12 * 30, 7):
            fits = [count for count in range(13) if pages.of(count, prompts=prompts) <= room * token]
            found = pages.fitting(np.array(room * token), prompts=np.array(prompts))
            assert min(found, 12) == max(fits)
    staged = cache_per_sequence(DENSE, Layout(1, stage=2, generation_stage=2), work, replace(HALVES, pages=True))
    assert staged.prompt == 0, "layers in stages have their caches in slots"
    shared = cache_per_sequence(DENSE, Layout(1, generation_context=2), work, replace(HALVES, pages=True))
    assert shared == (0, 30 * token / 2), "and so have devices that share positions"


GEMMA = replace(DENSE, num_layers=48, num_kv_heads=8, num_heads=16, head_dim=256, sliding_window=1024)
GEMMA = replace(GEMMA, sliding_layers=((True,) * 5 + (False,)) * 8)  # as Gemma 3 12B caches


@pytest.mark.parametrize(("config", "stages"), [
    (GEMMA, 1),
    (GEMMA, 2),
    (replace(GEMMA, sliding_layers=()), 1),
    (replace(GEMMA, full_heads=FullHeads(1, 512)), 1),
    (replace(GEMMA, full_heads=FullHeads(2, 512), borrowing_layers=6), 1),
])  # fmt: skip
def test_layers_with_a_window_take_what_their_rings_do(config: ModelConfig, stages: int) -> None:
    work, layout = Workload(1, 1, 30_000, 2000, 32_768), Layout(1, stage=stages, generation_stage=stages)
    software = replace(HALVES, decode_tokens_per_dispatch=16)
    execution = models.Execution(jnp.bfloat16)
    execution = with_rings(config, execution, longest=work.longest_tokens, tokens_per_dispatch=16)
    cache = jax.eval_shape(lambda: models.empty_cache(config, slots=1, capacity=32_768, execution=execution))
    whole = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(cache))
    prompt, response = cache_per_sequence(config, layout, work, software)
    assert (prompt, response) == (0, pytest.approx(whole / stages))
    # In pages all layers keep all positions.
    pages = cache_per_sequence(config, layout, work, replace(software, pages=stages == 1)).response
    assert (pages > response) == (stages == 1)
    if config == GEMMA:
        assert whole == (8 * 32_768 + 40 * 1184) * 8192 < 32_768 * 48 * 8192 / 5


def test_a_token_reads_no_more_of_a_window_than_its_ring() -> None:
    work, how = Workload(1, 1, 30_000, 2000, 32_768), Decoding(1, 1, 1)
    software = replace(HALVES, decode_tokens_per_dispatch=16)
    read = [
        decode_cost(model, ALONE, how, work, software, UNIT).memory_s
        for model in (GEMMA, replace(GEMMA, sliding_window=None, sliding_layers=()))
    ]
    # All tokens need the largest capacity of the cache.
    assert read[1] - read[0] == pytest.approx(40 * 2000 * (32_768 - 1184) * 8192 / UNIT.reached_bytes_per_s)


@pytest.mark.parametrize(("head_dim", "filled"), [(64, 2), (160, 1.6), (128, 1), (256, 1)])
def test_heads_in_a_cache_are_filled_up_to_the_lanes_of_a_chip(head_dim: int, filled: float) -> None:
    config, layout = replace(DENSE, head_dim=head_dim), Layout(2, 1, 1, 2)
    plain = cache_bytes_per_token(config, layout, itemsize=2)
    assert cache_bytes_per_token(config, layout, itemsize=2, lanes=128) == pytest.approx(filled * plain)
    assert cache_bytes(config, layout, tokens=7, itemsize=2, lanes=128) == pytest.approx(7 * filled * plain)

"""Seconds of work besides the products of the model: padded rows, cache capacities, and sums of gradients."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
from jax.sharding import AbstractMesh
from packed_arrays import PackedArrays
from unit_machines import DENSE, FREE, GROUPED, HALVES, UNIT, trained, weights_of

from jaxrlhf.batch import Sequences
from jaxrlhf.config import Layout, Training
from jaxrlhf.engine.buckets import cache_capacities
from jaxrlhf.planner.cost.batches import Batch, batch_of
from jaxrlhf.planner.cost.cost import Decoding, generation_cost, update_cost
from jaxrlhf.planner.workload import Workload
from jaxrlhf.workers.model import microbatch_shape

READS = replace(UNIT, matmul_flops_per_s=FREE, link_bytes_per_s=FREE)
"""Hardware on which only memory reads take time."""


def batched(budget: int, layout: Layout, width: int, length: int, responses: int) -> Batch:
    """Return the predicted microbatches of responses of equal length."""
    work = Workload(responses, responses, length / 2, length / 2, width)
    return batch_of(trained(DENSE, tokens_per_microbatch=budget), layout, responses, work, HALVES)


def test_a_response_to_each_prompt_shares_nothing_in_any_epoch() -> None:
    work = Workload(64, 64, 512, 512, 1024, epochs=4, updates=4)
    batch = batch_of(trained(DENSE, tokens_per_microbatch=4096), Layout(1), 64, work, HALVES)
    assert not batch.shares and batch.microbatches * batch.tokens == 64 * 1024


@pytest.mark.parametrize("responses", [7, 100])
@pytest.mark.parametrize("layout", [Layout(1), Layout(3, 4), Layout(2, 1, 4, 2)])
def test_microbatches_are_those_that_the_workers_make(layout: Layout, responses: int) -> None:
    sizes = {axis: getattr(layout, axis) for axis in ("data", "fsdp", "expert", "stage", "tensor")}
    mesh, shards = AbstractMesh(tuple(sizes.values()), tuple(sizes)), layout.data * layout.fsdp
    seen = set()
    for budget in (2048, 8192, 16_384, 50_000):
        for width in (48, 160, 256, 700, 1024, 1536):
            if budget // shards < width:
                continue
            training = Training(layout=layout, tokens_per_microbatch=budget)
            row_tokens, rows = microbatch_shape(training, mesh, width=width, role="actor")
            for length in {width, width // 2, width // 3 + 1, 24}:
                nothing = np.zeros((responses, width), np.int32)
                alike = Sequences(nothing, np.full(responses, length), nothing > 0, np.arange(responses))
                packed = PackedArrays(
                    alike, rows=rows // shards, row_tokens=row_tokens, devices=shards, stages=layout.stage
                )
                made = packed.pack(alike.token_BT).shape
                batch = batched(budget, layout, width, length, responses)
                found = batch.microbatches, batch.tokens * shards, batch.row_tokens
                assert found == (made[0], made[1] * made[2], row_tokens), (budget, width, length)
                seen.add((batch.microbatches > 1, rows > shards, row_tokens > width, made[1] < rows))
    assert len(seen) > 2


@pytest.mark.parametrize("layout", [Layout(1), Layout(2, 2), Layout(1, 1, 2)])
@pytest.mark.parametrize("responses", [2, 5])
def test_microbatches_with_shared_prompts_are_those_that_the_workers_make(layout: Layout, responses: int) -> None:
    sizes = {axis: getattr(layout, axis) for axis in ("data", "fsdp", "expert", "stage", "tensor")}
    mesh, shards = AbstractMesh(tuple(sizes.values()), tuple(sizes)), layout.data * layout.fsdp
    fewer = set()
    for prompts, prompt_tokens, own, width in itertools.product((3, 16), (32, 100, 256), (20, 64), (160, 320)):
        if (length := prompt_tokens + own) > width:
            continue
        training = Training(layout=layout, tokens_per_microbatch=960 * shards * layout.stage)
        row_tokens, rows = microbatch_shape(training, mesh, width=width, role="actor")
        token_BT = np.repeat(np.random.default_rng(0).integers(1, 99, (prompts, width)), responses, axis=0)
        mask_BT = np.broadcast_to((np.arange(width) >= prompt_tokens) & (np.arange(width) < length), token_BT.shape)
        every_B = np.arange(len(token_BT))
        alike = Sequences(token_BT, np.full(len(every_B), length), mask_BT, every_B // responses)
        packed = PackedArrays(
            alike,
            rows=rows // shards,
            row_tokens=row_tokens,
            devices=shards,
            stages=layout.stage,
            longest_response=width - prompt_tokens,
        )
        work = Workload(prompts, len(every_B), prompt_tokens, own, width)
        role = trained(DENSE, tokens_per_microbatch=training.tokens_per_microbatch)
        batch = batch_of(role, layout, len(every_B), work, HALVES)
        assert batch.microbatches == packed.microbatches, (prompts, prompt_tokens, own, width)
        shared = next(packed.rows()).shared_prefix is not None
        assert batch.tokens * shards == packed.pack(alike.token_BT)[0].size
        fewer.add(shared)
    assert True in fewer or responses == 2


def test_each_microbatch_reads_two_gradients_and_writes_their_sum() -> None:
    """An optimizer's update also reads the sum, and reads and writes two bytes of weight and four of moments."""
    work = Workload(8, 64, 10, 6, 30)  # 64 rows, 4 at a time
    twice = replace(work, updates=2, epochs=3)  # as often in each update and epoch
    for layout, step, microbatches in [(Layout(1), work, 16), (Layout(1, 4), work, 4), (Layout(1), twice, 3 * 16)]:
        touched = microbatches * 3 * 2 + step.updates * (2 + 2 * 6)
        cost = update_cost(trained(DENSE), layout, step, HALVES, UNIT)
        assert cost.memory_s == pytest.approx(touched * weights_of(DENSE) / layout.fsdp)


@pytest.mark.parametrize("tokens", [1, 16])
def test_a_program_starts_once_for_the_tokens_that_it_decodes(tokens: int) -> None:
    starts, work = replace(READS, dispatch_overhead_s=1.0), Workload(8, 64, 10, 6, 30)
    software = replace(HALVES, decode_tokens_per_dispatch=tokens)
    for waves, steps in [(1, 20), (2, 26)]:
        how = Decoding(waves, 64 // waves, 1)
        counted, free = (
            generation_cost(DENSE, Layout(1), how, work, each, starts).overhead_s for each in (software, HALVES)
        )
        assert (counted, free) == (pytest.approx(steps / tokens), 0)


def test_capacities_are_few_even_and_reach_the_longest() -> None:
    assert cache_capacities(192) == (32, 64, 96, 128, 160, 192)
    assert cache_capacities(300) == (64, 128, 192, 256, 300)
    assert cache_capacities(1024) == tuple(range(128, 1025, 128))
    for longest in range(1, 3000, 7):
        capacities = cache_capacities(longest)
        assert len(capacities) <= 8 and capacities[-1] == longest and sorted(set(capacities)) == list(capacities)


@pytest.mark.parametrize(
    ("longest", "prompt", "response"), [(1024, 128, 896), (1024, 500, 30), (4096, 1000, 700), (256, 127, 129)]
)
def test_a_token_reads_the_bucket_that_holds_it(longest: int, prompt: int, response: int) -> None:
    responses = 8
    work = Workload(1, responses, prompt, response, longest)
    software, how = replace(HALVES, decode_tokens_per_dispatch=10**9), Decoding(1, responses, 1)
    buckets = cache_capacities(longest)
    read = written = 0
    for position in range(prompt, prompt + response):
        read += next(bucket for bucket in buckets if bucket > position)
        written += position + 0.5
    per_token = responses * 4 * 2 * 2 * 8 * 2
    in_buckets, exact = (
        generation_cost(GROUPED, Layout(1), how, work, each, READS).memory_s for each in (software, HALVES)
    )
    assert in_buckets - exact == pytest.approx((read - written) * per_token)
    assert in_buckets > exact

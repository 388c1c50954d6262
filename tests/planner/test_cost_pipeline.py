"""Seconds of pipelines, compared with schedules simulated part by part and sends counted by hand."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
from unit_machines import DENSE, FREE, HALVES, TOKENS, UNIT, WORK, naive_layer_flops, trained

from jaxrlhf.config import Layout
from jaxrlhf.planner.cost.batches import batch_of
from jaxrlhf.planner.cost.cost import forward_cost, update_cost
from jaxrlhf.planner.workload import Software

CLUSTER = replace(UNIT, machines=2, devices_per_machine=8, link_bytes_per_s=FREE)
"""Machines with free links, joined by a network."""
PRODUCTS = replace(UNIT, link_bytes_per_s=FREE)
ONE_PIPELINE = replace(HALVES, pipeline_parts_per_stage=None)
ON_LAST = replace(HALVES, head_on_last_stage=True)
LAYERS = 4 * naive_layer_flops(DENSE, tokens=TOKENS, context=8)
LM_HEAD = 2 * 64 * 6 * 32 * 64  # for tokens of responses
WIDE = replace(DENSE, num_heads=8, num_kv_heads=8)


def scheduled(forward: Sequence[float], backward: Sequence[float], count: int) -> float:
    """Return the seconds until all parts passed all stages forward, and then backward.

    Args:
      forward: Seconds of one part on each stage.
      backward: Seconds of one part on each stage, in the order of stages; empty without a backward pass.
    """
    done = [0.0] * count
    for turn, seconds in enumerate([*forward, *reversed(backward)]):
        free = max(done) if turn == len(forward) else 0.0
        for part in range(count):
            done[part] = free = max(free, done[part]) + seconds
    return max(done)


@pytest.mark.parametrize(("rows", "stage", "parts"), [(11, 2, 1), (14, 2, 7), (64, 4, 16)])
def test_parts_of_a_microbatch_have_as_many_rows_each(rows: int, stage: int, parts: int) -> None:
    role = trained(DENSE, rows_per_microbatch=rows)
    assert batch_of(role, Layout(1, 1, stage), rows, WORK, HALVES).parts == parts


PIPELINES = [
    (2, 4, ONE_PIPELINE, 16), (4, 4, ONE_PIPELINE, 16), (4, 16, ONE_PIPELINE, 4), (4, 64, ONE_PIPELINE, 1),
    (2, 64, HALVES, 8), (4, 64, HALVES, 16), (2, 64, replace(HALVES, pipeline_parts_per_stage=1), 2),
]  # fmt: skip
"""Stages, rows of a microbatch, software, and number of parts of one pipeline."""


@pytest.mark.parametrize(("stage", "rows", "software", "count"), PIPELINES)
@pytest.mark.parametrize("on_last", [False, True])
def test_stages_take_as_long_as_a_schedule_played_part_by_part(
    stage: int, rows: int, software: Software, count: int, on_last: bool
) -> None:
    software = replace(software, head_on_last_stage=on_last)
    role = trained(DENSE, rows_per_microbatch=rows)
    layer = LAYERS / stage / count
    # The head runs on the last stage, or on all stages between the forward and the backward pipeline.
    head = [0.0] * (stage - 1) + [LM_HEAD / count if on_last else 0.0]
    apart = 0.0 if on_last else LM_HEAD / stage
    forward = [layer + more for more in head]
    backward = [2 * layer + 3 * more for more in head]
    cost = forward_cost(role, Layout(1, 1, stage), WORK, software, PRODUCTS)
    assert cost.compute_s + cost.idle_s == pytest.approx(scheduled(forward, [], count) + apart)
    cost = update_cost(role, Layout(1, 1, stage), WORK, software, PRODUCTS)
    assert cost.compute_s == pytest.approx((3 * LAYERS + 4 * LM_HEAD) / stage)
    expected = scheduled(forward, backward, count) + 4 * apart
    assert cost.compute_s + cost.idle_s == pytest.approx(expected)


@pytest.mark.parametrize(("layout", "parts", "ticks", "senders"), [
    (Layout(1, 1, 2, 8), 8, 9, 8), (Layout(1, 1, 4, 4), 16, 19, 4),
])  # fmt: skip
def test_stages_on_two_machines_meet_over_the_network(layout: Layout, parts: int, ticks: int, senders: int) -> None:
    role = trained(WIDE, rows_per_microbatch=64)
    # Devices that send to the other machine share the connection of their machine, forward and backward.
    sent = 2 * ticks * TOKENS / parts * 32 * 2 * senders / 8
    assert update_cost(role, layout, WORK, ON_LAST, CLUSTER).collective_s == pytest.approx(sent)
    # The output of the last stage is reduced over all stages.
    share = (layout.stage - 1) / layout.stage
    returned = 2 * 2 * share * TOKENS * 32 * 2 * senders / 8
    # Embeddings are summed over all devices in one ring, which has the whole connection.
    returned += 2 * 15 / 16 * TOKENS * 32 * 2 / 8
    assert update_cost(role, layout, WORK, HALVES, CLUSTER).collective_s == pytest.approx(sent + returned)
    steps = replace(CLUSTER, network_bytes_per_s=FREE, network_latency_s=1.0)
    assert update_cost(role, layout, WORK, ON_LAST, steps).collective_s == pytest.approx(2 * ticks)

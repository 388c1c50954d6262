"""Rows split over devices: layouts, tokens and seconds, compared with counts by hand."""

from dataclasses import replace

import pytest
from unit_machines import FREE, GROUPED, HALVES, UNIT, WORK, trained

from jaxrlhf.config import Layout
from jaxrlhf.models.config import ModelConfig
from jaxrlhf.planner.cost.batches import batch_of
from jaxrlhf.planner.cost.cost import Decoding, decode_cost, forward_cost, layer_flops
from jaxrlhf.planner.cost.memory import cache_bytes_per_token
from jaxrlhf.planner.hardware import hardware
from jaxrlhf.planner.plan import PlacementProblem
from jaxrlhf.planner.report import layout_text
from jaxrlhf.planner.search.layouts import training_layouts
from jaxrlhf.planner.search.mapping import search
from jaxrlhf.planner.workload import Role, Software, Workload

SEVEN = ModelConfig("llama", 64, 56, 48, 4, 14, 2, 8)
"""Seven query heads for each key-value head; four devices pad this to sixteen heads and four key-value heads."""
SENT = replace(UNIT, matmul_flops_per_s=FREE, memory_bytes_per_s=FREE)


@pytest.mark.parametrize(
    ("model", "context", "heads", "keys"), [(GROUPED, 2, 4, 2), (GROUPED, 4, 4, 4), (SEVEN, 4, 16, 4)]
)
def test_a_layer_sends_queries_keys_values_and_results(model: ModelConfig, context: int, heads: int, keys: int) -> None:
    """Compare a pass over 64 responses of 16 tokens with and without the exchanges of 4 layers."""
    role = trained(model)
    layouts = Layout(data=1, context=context), Layout(data=1, fsdp=context)
    batches = [batch_of(role, layout, 64, WORK, HALVES) for layout in layouts]
    assert batches[0].microbatches == context * batches[1].microbatches
    assert batches[0].tokens * context == batches[1].tokens
    split, whole = (forward_cost(role, layout, WORK, HALVES, SENT).collective_s for layout in layouts)
    tokens, part = 64 * 16 / context, (context - 1) / context
    exchanged = 4 * (2 * heads + 2 * keys) * 8 * tokens * 2 * part
    looked_up = model.hidden_size * tokens * 2 * part
    # The same weights are gathered, but for each of `context` times as many microbatches.
    assert split == pytest.approx(exchanged + context * (whole - looked_up) + looked_up)


def test_heads_that_fill_up_work_as_well() -> None:
    role = trained(SEVEN)
    free = replace(UNIT, link_bytes_per_s=FREE)
    work = {c: forward_cost(role, Layout(data=1, context=c), WORK, HALVES, free).compute_s for c in (1, 2, 4)}
    scored = layer_flops(SEVEN, tokens=1024, context=8) - layer_flops(SEVEN, tokens=1024, context=0)
    assert work[2] * 2 == pytest.approx(work[1])
    assert work[4] * 4 - work[1] == pytest.approx(4 * scored * 2 / 14)


def test_rows_are_split_over_no_more_devices_than_heads_and_not_with_stages() -> None:
    found = list(training_layouts(trained(GROUPED), 8, UNIT, fsdp=True, context=True))
    assert {layout.context for layout in found} == {1, 2, 4}
    assert {layout.context * layout.tensor for layout in found if layout.context > 1} == {2, 4}
    assert all(layout.context == 1 for layout in found if layout.stage > 1)
    assert all(layout.data * layout.copy_devices == 8 for layout in found) and len(set(found)) == len(found)
    apart = [layout for layout in found if layout.context == 1]
    assert apart == list(training_layouts(trained(GROUPED), 8, UNIT, fsdp=True))
    assert layout_text(Layout(data=2, fsdp=2, context=4)) == "1-1-2 x2 c4"


def test_devices_that_share_positions_read_a_part_of_the_cache_and_gather_parts_of_softmaxes() -> None:
    """Two replicas of four devices: each layer of a token, with two tensor shards of seven heads of eight numbers."""
    layout = Layout(data=1, tensor=2, fsdp=4, generation_tensor=2, generation_context=2)
    apart = replace(layout, generation_context=1)
    how = Decoding(1, 32, 2)
    shared, whole = (decode_cost(SEVEN, each, how, WORK, HALVES, SENT) for each in (layout, apart))
    tokens = 32 * WORK.response_tokens
    assert shared.collective_s - whole.collective_s == pytest.approx(4 * tokens * 7 * (8 + 2) * 4)
    read = replace(UNIT, matmul_flops_per_s=FREE, link_bytes_per_s=FREE)
    seconds = [decode_cost(SEVEN, each, how, WORK, HALVES, read).memory_s for each in (layout, apart)]
    kept = [cache_bytes_per_token(SEVEN, each, itemsize=2) for each in (layout, apart)]
    assert kept[0] * 2 == kept[1]
    assert seconds[1] - seconds[0] == pytest.approx(tokens * kept[0] * (WORK.prompt_tokens + WORK.response_tokens / 2))


def test_a_search_splits_a_long_cache_over_devices_that_split_all_heads_already() -> None:
    """Four responses to a prompt of a million tokens: Qwen2.5-7B, of 4 key-value heads, on 4 machines of 8 H100."""
    model = ModelConfig("qwen2", 152_064, 3584, 18_944, 28, 28, 4, 128)
    work = Workload(1, 4, prompt_tokens=2.0**20 - 8192, response_tokens=8192.0, longest_tokens=2**20)
    role = Role("actor", model, "lm", generates=True, trained=True, tokens_per_microbatch=2**20)
    problem = PlacementProblem((role,), work, Software(), hardware("h100x4"))
    (plan,) = search(problem, keep=1).plans
    (layout,) = (layout for pool in plan.pools for layout in pool.layouts.values())
    assert (layout.generation_tensor, layout.generation_context) == (4, 2)
    refused = {"actor": (replace(layout, generation_context=1),)}
    (other,) = search(replace(problem, layouts=refused), keep=1).plans
    assert plan.seconds < 0.95 * other.seconds

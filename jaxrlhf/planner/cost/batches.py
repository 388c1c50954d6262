"""Microbatches of packed rows, into which the responses of an update or a pass are split."""

import math
from dataclasses import dataclass
from typing import Any

from jaxrlhf.batching.microbatch import (
    WORTH_SHARING,
    MicrobatchShape,
    microbatch_shape_of,
    packed_row_tokens,
    rows_with_shared_prompts,
    sizes_of,
)
from jaxrlhf.config import Layout
from jaxrlhf.models.pipeline import pipeline_parts
from jaxrlhf.planner.workload import Role, Software, Workload


@dataclass(frozen=True)
class Batch:
    """Microbatches of one data-parallel replica in an update or a pass.

    Attributes:
      microbatches: Number of microbatches, each a program run.
      tokens: Number of tokens of one microbatch on a device, including padding.
      parts: Number of parts that a microbatch is split into for the pipeline.
      row_tokens: Length of the rows that attention runs over.
      read_tokens: Number of tokens of a microbatch whose logits are computed.
      attended_tokens: Number of tokens in attention; with shared prompts, each response counts with its prompt.
      shares: Whether responses share their prompt.
    """

    microbatches: int
    tokens: float
    parts: int
    row_tokens: float
    read_tokens: float
    attended_tokens: float
    shares: bool = False


def batch_of(
    role: Role, layout: Layout, responses: float, workload: Workload, software: Software, *, largest: bool = False
) -> Batch:
    """Return the microbatches of an update or pass over `responses` sequences, on the shard with most sequences.

    Args:
      largest: True takes the largest microbatch, which memory must hold for the longest responses.
    """
    shards = shards_of(layout)
    length = workload.prompt_tokens + workload.response_tokens
    sequences, shares = math.ceil(responses / shards), False
    if role.tokens_per_microbatch is None:
        row_tokens, rows = length, min(sequences, role.rows_per_microbatch)
        microbatches = math.ceil(sequences / rows)
        tokens = sequences * length / microbatches
        attended = tokens
    else:
        budget = role.tokens_per_microbatch // shards
        split: dict[str, Any] = {"token_shards": layout.context}
        row_tokens = packed_row_tokens(workload.together * workload.longest_tokens, budget=budget, **split)
        prompts = _prompts_in(responses, workload)
        saved = (workload.prompt_tokens - 1) * (1 - prompts / responses)
        shares = 2 * prompts <= responses and saved >= WORTH_SHARING * length
        rows = max(1, budget // row_tokens)
        split |= {"longest": workload.longest_tokens, "stages": layout.stage, "together": workload.together}
        shape = microbatch_shape_of(
            rows,
            row_tokens,
            sequences=sequences,
            shares=shares,
            prompts=math.ceil(min(responses, workload.prompts) / shards),
            longest_response=math.ceil(workload.longest_tokens - workload.prompt_tokens),
            **split,
        )

        def needed(size: MicrobatchShape) -> int:
            """Return the number of microbatches of a size."""
            packed = math.ceil(sequences / (row_tokens // length))
            if shares:
                own, shared = workload.response_tokens + 1, workload.prompt_tokens - 1
                copies = math.ceil(responses / prompts)
                packed = rows_with_shared_prompts(prompts, copies, own, shared, row_tokens=size.row_tokens)
                packed = math.ceil(packed / shards)
            return math.ceil(packed / size.rows)

        microbatches = needed(shape)
        if not largest:
            shape = next(size for size in sizes_of(shape, rows, shares=shares, **split) if needed(size) <= microbatches)
        tokens, rows = shape.tokens, shape.rows
        attended = sequences * length / microbatches if shares else tokens
    # Programs that read only responses compute only the needed chunks of logits: padding is not read.
    read = sequences * workload.response_tokens / microbatches if software.reads_responses else tokens
    tokens, read, attended = (each / layout.context for each in (tokens, read, attended))
    if layout.stage == 1:
        return Batch(microbatches, tokens, 1, row_tokens, read, attended, shares)
    if software.pipeline_parts_per_stage is None:
        read, attended = read * microbatches, attended * microbatches
        return Batch(1, tokens * microbatches, microbatches, row_tokens, read, attended, shares)
    parts = pipeline_parts(rows, stages=layout.stage, per_stage=software.pipeline_parts_per_stage)
    return Batch(microbatches, tokens, parts, row_tokens, read, attended, shares)


def _prompts_in(responses: float, workload: Workload) -> int:
    """Return the number of prompts of `responses` responses, which whole groups of the step make."""
    return max(1, math.ceil(workload.prompts * min(1.0, responses / workload.responses)))


def shards_of(layout: Layout) -> int:
    """Return the number of shards that split the rows of a batch."""
    assert layout.data is not None, "layout.data is set before the cost is computed"
    return layout.data * layout.fsdp * layout.expert

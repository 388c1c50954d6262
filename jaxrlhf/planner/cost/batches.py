"""Microbatches of packed rows that the responses of an update or a pass are cut up into."""

import math
from dataclasses import dataclass

from jaxrlhf.batching.microbatch import WORTH_SHARING, microbatch_shape_of, packed_row_tokens, rows_with_shared_prompts
from jaxrlhf.config import Layout
from jaxrlhf.models.pipeline import pipeline_parts
from jaxrlhf.planner.workload import Role, Software, Workload


@dataclass(frozen=True)
class Batch:
    """Microbatches of one data-parallel replica in an update or a pass.

    Attributes:
      microbatches: Programs that run one after another.
      tokens: Tokens of one microbatch on a device, padding included.
      parts: Parts that a microbatch is cut into for the pipeline.
      row_tokens: Length of the rows that attention runs over.
      read_tokens: Tokens of a microbatch whose logits are computed.
      attended_tokens: Tokens that attention sees; where prompts are shared, each response with its prompt.
      shares: Prompts are shared by their responses.
    """

    microbatches: int
    tokens: float
    parts: int
    row_tokens: float
    read_tokens: float
    attended_tokens: float
    shares: bool = False


def batch_of(role: Role, layout: Layout, responses: float, workload: Workload, software: Software) -> Batch:
    """Batch of one update or pass over `responses` sequences; shards that get one fewer wait for the others."""
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
        split = {"token_shards": layout.context}
        row_tokens = packed_row_tokens(workload.longest_tokens, budget=budget, **split)
        prompts = _prompts_in(responses, workload)
        saved = (workload.prompt_tokens - 1) * (1 - prompts / responses)
        shares = software.shares_prompts and 2 * prompts <= responses and saved >= WORTH_SHARING * length
        shape = microbatch_shape_of(
            max(1, budget // row_tokens),
            row_tokens,
            sequences=sequences,
            longest=workload.longest_tokens,
            stages=layout.stage,
            shares=shares,
            prompts=math.ceil(min(responses, workload.prompts) / shards),
            longest_response=math.ceil(workload.longest_tokens - workload.prompt_tokens),
            **split,
        )
        packed = math.ceil(sequences / (row_tokens // length))
        if shares:
            own, shared = workload.response_tokens + 1, workload.prompt_tokens - 1
            copies = math.ceil(responses / prompts)
            packed = rows_with_shared_prompts(prompts, copies, own, shared, row_tokens=shape.row_tokens)
            packed = math.ceil(packed / shards)
        microbatches = math.ceil(packed / shape.rows)
        tokens, rows = shape.tokens, shape.rows
        attended = sequences * length / microbatches if shares else tokens
    # Programs that read responses alone have as many chunks of logits as a batch has use for: padding is not read.
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
    """Prompts that so many responses, drawn from all of an epoch's, are expected to be of."""
    missed = max(0.0, 1 - responses / workload.responses)
    return max(1, round(workload.prompts * (1 - missed ** (workload.responses / workload.prompts))))


def shards_of(layout: Layout) -> int:
    """Ways the rows of a batch are split."""
    assert layout.data is not None, "a layout that is costed says how many replicas it has"
    return layout.data * layout.fsdp * layout.expert

"""What is to be computed: the models of a dataflow, and how much each of them does in a step."""

import math
from dataclasses import dataclass
from typing import Literal

from jaxrlhf.architecture import Head, ModelConfig
from jaxrlhf.config import Lora

Stage = Literal["generate", "prepare", "update"]
STAGES: tuple[Stage, ...] = ("generate", "prepare", "update")
"""Of a step, one after another. Source: HybridFlow (arXiv:2409.19256), section 2.1."""


@dataclass(frozen=True)
class Workload:
    """One step of an algorithm.

    Attributes:
      prompts: Distinct ones; each is prefilled once.
      responses: B, over all prompts.
      prompt_tokens: Mean length.
      response_tokens: Mean length.
      longest_tokens: Of a prompt and its response together; memory is set aside for it.
      updates: Optimizer updates of each trained model, over all epochs.
      epochs: Passes over the responses.
      slots: Most responses that are decoded at once, over all replicas; None is as many as fit.
    """

    prompts: int
    responses: int
    prompt_tokens: float
    response_tokens: float
    longest_tokens: int
    updates: int = 1
    epochs: int = 1
    slots: int | None = None


@dataclass(frozen=True)
class Role:
    """One model of the dataflow, and what it does in a step.

    Attributes:
      name: Such as `actor`; unique in a problem.
      generates: It samples the responses.
      passes: Forward passes over all responses while they are prepared.
      trained: It is updated, and so has gradients and an optimizer.
      tokens_per_microbatch: Over all its devices: rows of the longest length or more, into which
        sequences are packed. Programs have that size whether it is filled or not. None goes by
        `rows_per_microbatch`, without rows and padding.
      rows_per_microbatch: Sequences that one data-parallel replica takes at a time.
      remat: Layers are recomputed in the backward pass. None is so unless there is room enough for
        their activations, and always where devices are made up on one processor.
      within_machine: Stages and tensor shards of one copy may not cross machines.
      lora: Adapters are trained, beside weights in the compute dtype.
    """

    name: str
    model: ModelConfig
    head: Head
    generates: bool = False
    passes: int = 1
    trained: bool = False
    tokens_per_microbatch: int | None = None
    rows_per_microbatch: int = 1
    remat: bool | None = True
    within_machine: bool = False
    lora: Lora | None = None


@dataclass(frozen=True)
class Software:
    """What programs do that neither model nor layout say. The defaults are this package's in bfloat16.

    Attributes:
      weight_bytes: Of a trained weight as it is trained.
      gradient_bytes: Of a weight's gradient.
      optimizer_bytes: Of what the optimizer keeps for a weight.
      compute_bytes: Of an activation, a cached key, a frozen or generating weight.
      reduces_every_microbatch: Gradients are summed over replicas at every microbatch, and not once in
        an update. None: only where weights are split by width and also by stage or tensor.
      pipeline_parts_per_stage: Into how many parts for each stage a microbatch is cut; None has a
        pipeline run through all microbatches of an update (1F1B) before it is drained.
      scatters_between_stages: Each tensor shard sends its part of the residual stream to the next
        stage, and not all of it.
      head_on_last_stage: The last stage computes the logits, and not all stages together.
      adds_gradients: Each microbatch's gradient is whole before it is added to the others'.
      decodes_apart: Decoding reads layers that lie apart; the stack of them goes, unless it is trained as it is.
      cache_copies: Of the cache, how many exist at most while tokens are decoded.
      decode_tokens_per_dispatch: Tokens that one program decodes; None has no program start count.
      recomputes_logits: Chunks of logits are computed once more in the backward pass.
      reads_responses: Logits are computed of the tokens of responses alone, and not of all.
      skips_masked: Attention does not compute scores that the causal mask hides, nor keeps them.
      shares_prompts: A prompt is computed once for all its responses in a packed row, but for attention.
    """

    weight_bytes: int = 4
    gradient_bytes: int = 4
    optimizer_bytes: int = 8
    compute_bytes: int = 2
    reduces_every_microbatch: bool | None = None
    pipeline_parts_per_stage: int | None = 4
    scatters_between_stages: bool = False
    head_on_last_stage: bool = False
    adds_gradients: bool = True
    decodes_apart: bool = True
    cache_copies: float = 1.5
    decode_tokens_per_dispatch: int | None = 16
    recomputes_logits: bool = True
    reads_responses: bool = True
    skips_masked: bool = True
    shares_prompts: bool = True

    @property
    def trains_in_compute_dtype(self) -> bool:
        """Whether generation can take the trained weights as they are, so that no second copy exists."""
        return self.weight_bytes == self.compute_bytes


SMALLEST_ROW = 192
"""Tokens of a packed row at least, where the budget allows: narrower ones would leave much padding."""


def packed_row_tokens(longest: int, *, budget: int) -> int:
    """Tokens of a packed row: a multiple of the longest sequence, so that rows of sequences as long as can be are full.

    Args:
      budget: Tokens of a microbatch on one data-parallel device.
    """
    return longest * max(1, min(-(-SMALLEST_ROW // longest), budget // longest))


@dataclass(frozen=True)
class MicrobatchShape:
    """What one program computes on a data-parallel device.

    Attributes:
      rows: On one device.
      row_tokens: Of one row.
    """

    rows: int
    row_tokens: int

    @property
    def tokens(self) -> int:
        """On one device, padding included."""
        return self.rows * self.row_tokens


_SIZES = 8
_ROUND_TOKENS = 64
_PIPELINE_PARTS_PER_STAGE = 4
"""More would shorten an idle time that is below a fifth already, with matrices too small to be fast."""
WORTH_SHARING = 0.1
"""Of the tokens. Laying out attention apart costs about half of that."""


def microbatch_shape_of(
    rows: int,
    row_tokens: int,
    *,
    sequences: int,
    longest: int,
    stages: int,
    shares: bool,
    prompts: int = 0,
    longest_response: int | None = None,
) -> MicrobatchShape:
    """The shape of the microbatches that so many sequences are cut into.

    It goes by how many there are and how long they may be, not by how long they are, so that no
    step compiles what an earlier one did not. Eight sizes: few sequences are not padded to the largest
    microbatch, and of those that fill several the last is not nearly empty. Where prompts are shared
    rows become one, or as many as keep a pipeline busy, which so holds more responses to a prompt, and
    is no longer than the longest of them would fill.

    Args:
      rows: On one data-parallel device, at most.
      sequences: On one data-parallel device.
      longest: Tokens that a sequence may have; `row_tokens` is a multiple.
      prompts: Of the sequences; read where they are shared.
      longest_response: Tokens of it; None is not known.
    """
    rows = rows // stages * stages if rows > stages else rows
    sizes = {-(-rows * part // _SIZES) for part in range(1, _SIZES + 1)}
    if rows > stages:
        sizes = {-(-size // stages) * stages for size in sizes}
    needed = -(-sequences // (row_tokens // longest))
    if not shares:
        microbatches = -(-needed // rows)
        return MicrobatchShape(min(size for size in sizes if size * microbatches >= needed), row_tokens)
    size = min((size for size in sizes if size >= needed), default=rows)
    if stages == 1:
        tokens = size * row_tokens
        if longest_response is not None:
            own, shared = longest_response + 1, longest - longest_response - 1
            group = shared + -(-sequences // prompts) * own
            groups, rest = divmod(min(tokens, prompts * group), group)
            filled = groups * group + (shared + (rest - shared) // own * own if rest >= shared + own else 0)
            tokens = min(tokens, max(row_tokens, -(-filled // _ROUND_TOKENS) * _ROUND_TOKENS))
        return MicrobatchShape(1, tokens)
    kept = pipeline_parts(size, stages=stages)
    return MicrobatchShape(kept, row_tokens * (size // kept))


def pipeline_parts(rows: int, *, stages: int, per_stage: int = _PIPELINE_PARTS_PER_STAGE) -> int:
    """Parts that rows are cut into for a pipeline: the most, up to so many for each stage, that divide evenly."""
    return next(count for count in range(min(rows, per_stage * stages), 0, -1) if rows % count == 0)


def rows_with_shared_prompts(prompts: int, responses: int, own: float, shared: float, *, row_tokens: float) -> int:
    """Packed rows for responses of one length to prompts of one length.

    Args:
      responses: To each prompt.
      own: Tokens of a response, with the prompt's last, which it keeps for itself.
      shared: Tokens of a prompt but for that one.
    """
    most = int((row_tokens - shared) // own)
    full, rest = divmod(responses, most)
    rows = prompts * full
    if rest:
        rows += math.ceil(prompts / int(row_tokens // (shared + rest * own)))
    return rows


CAPACITY_STEP = 32
MOST_CAPACITIES = 8
"""The cache of all slots grows with the longest response in equal parts: few programs, and little read in vain."""


def cache_capacities(longest: int) -> tuple[int, ...]:
    """Tokens that the cache of a slot may hold: the last is `longest`, the others multiples of one size."""
    size = CAPACITY_STEP * -(-longest // (MOST_CAPACITIES * CAPACITY_STEP))
    return (*range(size, longest, size), longest)

"""Shapes of microbatches: tokens of a packed row, rows of a program."""

import math
from dataclasses import dataclass

from jaxrlhf.models.pipeline import pipeline_parts

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

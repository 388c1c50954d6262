"""Shapes of microbatches: width of a packed row, and number of rows of a program."""

import math
from dataclasses import dataclass, replace

from jaxrlhf.models.attention.attention_xla import SHARED_TILE, SHORTEST_BLOCK
from jaxrlhf.models.pipeline import pipeline_parts

SMALLEST_ROW = 192
"""Minimum width of a packed row in tokens, if the budget allows; narrower rows would have much padding."""


def packed_row_tokens(longest: int, *, budget: int, token_shards: int = 1) -> int:
    """Return the width of a packed row, a multiple of the longest sequence, so that rows of longest sequences are full.

    Args:
      budget: Tokens of a microbatch on one data-parallel device.
      token_shards: Number of devices that split a row's tokens evenly.
    """
    longest = -(-longest // token_shards) * token_shards
    return longest * max(1, min(-(-SMALLEST_ROW // longest), budget // longest))


@dataclass(frozen=True)
class MicrobatchShape:
    """Shape of a microbatch on one data-parallel device.

    Attributes:
      attends_in_rows: True if attention runs on rows with shared prompts, and not on whole sequences copied out of the
        rows.
    """

    rows: int
    row_tokens: int
    attends_in_rows: bool = False

    @property
    def tokens(self) -> int:
        """Number of tokens on the device, padding included."""
        return self.rows * self.row_tokens


_SIZES = 8
_STEP_TOKENS = 128
"""Least difference of two sizes of a microbatch in tokens: each size is a program, and a finer choice saves little."""
_ROUND_TOKENS = 64
WORTH_SHARING = 0.1
"""Minimum share of tokens that sharing prompts has to save; attention rows cost about half of that."""

WORTH_A_PROGRAM = 0.08
"""Minimum share of a batch's tokens, padding included, that a smaller program for its last microbatch has to save."""


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
    token_shards: int = 1,
    together: int = 1,
) -> MicrobatchShape:
    """Return the shape of the microbatches of a batch.

    The shape depends on the number of sequences, their maximum length and the number of prompts, not on actual lengths:
    it is the largest shape that such a batch needs, and `sizes_of` has the smaller ones. There are eight: few sequences
    are not padded to the largest microbatch. With shared prompts the rows are merged to one row (or to as many as keep
    a pipeline busy), because a long row holds more responses to a prompt. The merged row is no longer than the longest
    sequences would fill.

    Args:
      rows: Maximum number of rows on one data-parallel device.
      sequences: Number of sequences on one data-parallel device.
      longest: Maximum length of a sequence in tokens; `row_tokens` is a multiple.
      prompts: Maximum number of distinct prompts of the sequences; only read if prompts are shared.
      longest_response: Maximum length of a response in tokens; None is unknown.
      token_shards: Number of devices that split a row's tokens evenly.
      together: Number of sequences that one row has to hold; it has space for so many of the longest.
    """
    rows = rows // stages * stages if rows > stages else rows
    sizes = _row_counts(rows, stages)
    needed = -(-sequences // (row_tokens // (together * longest) * together))
    if not shares:
        microbatches = -(-needed // rows)
        return MicrobatchShape(min(size for size in sizes if size * microbatches >= needed), row_tokens)
    size = min((size for size in sizes if size >= needed), default=rows)
    if stages == 1:
        tokens = size * row_tokens
        if longest_response is not None:
            own, shared = longest_response + 1, longest - longest_response - 1
            responses = -(-sequences // prompts)
            group = shared + responses * own
            groups, rest = divmod(min(tokens, prompts * group), group)
            filled = groups * group + (shared + (rest - shared) // own * own if rest >= shared + own else 0)
            whole = math.lcm(_ROUND_TOKENS, token_shards)
            tokens = min(tokens, max(row_tokens, -(-filled // whole) * whole))
            return MicrobatchShape(1, tokens, attends_in_rows=_attends_in_rows(shared, responses, own))
        return MicrobatchShape(1, tokens)
    kept = pipeline_parts(size, stages=stages)
    return MicrobatchShape(kept, row_tokens * (size // kept))


_TILE_COST, _COPY_COST = 1.5, 128
"""Cost of a score in a tile, and of copying a token, in scores of whole sequences."""


def _attends_in_rows(shared: int, responses: int, own: int) -> bool:
    """Return True if attention in rows is estimated to cost no more than attention on copied sequences.

    A tile of queries computes the scores of all tiles that hold a key of its prompt, or of its sequences up to its end.
    The costs are of updates of SmolLM2 on CPU. With 8 responses of 19 tokens to prompts of 57, attention in rows took
    0.88 (AMD EPYC) and 1.0 (Intel Xeon) of the seconds; with 4 responses of 128 tokens to prompts of 175, 1.0 and 1.14.

    Args:
      shared: Tokens of a prompt without the last.
      own: Tokens of a response plus the last token of its prompt.
    """
    longest, tile, block = shared + own, SHARED_TILE, SHORTEST_BLOCK
    in_rows = shared * (shared / 2 + tile) + responses * own * (shared + own / 2 + 2.5 * tile)
    copied = responses * longest * (longest / 2 + block / 2 + _COPY_COST)
    return _TILE_COST * in_rows <= copied


def _row_counts(rows: int, stages: int) -> set[int]:
    """Return eighths of a number of rows; more rows than stages are a multiple of the stages."""
    counts = {-(-rows * part // _SIZES) for part in range(1, _SIZES + 1)}
    return {-(-count // stages) * stages for count in counts} if rows > stages else counts


def sizes_of(
    largest: MicrobatchShape,
    rows: int,
    *,
    longest: int,
    stages: int,
    shares: bool,
    token_shards: int = 1,
    together: int = 1,
) -> list[MicrobatchShape]:
    """Return the shapes that the microbatches of a batch may have, ascending; the last is `largest`.

    A batch takes the smallest shape that does not need more microbatches. Short responses are then not padded to the
    longest that they could be, and a run compiles a program for each size that its batches take.

    Args:
      rows: Maximum number of rows on one data-parallel device.
      longest: Maximum length of a sequence in tokens.
      together: Number of sequences that one row has to hold.
    """
    if not shares:
        rows = rows // stages * stages if rows > stages else rows
        counts = sorted(count for count in _row_counts(rows, stages) if count < largest.rows)
        return [*(replace(largest, rows=count) for count in counts), largest]
    if stages > 1:
        return [largest]
    whole = math.lcm(_ROUND_TOKENS, token_shards)
    step = max(_STEP_TOKENS, -(-largest.row_tokens // _SIZES))
    widths = {-(-max(width, together * longest) // whole) * whole for width in range(step, largest.row_tokens, step)}
    smaller = sorted(width for width in widths if width < largest.row_tokens)
    return [*(replace(largest, row_tokens=width) for width in smaller), largest]


def rows_with_shared_prompts(prompts: int, responses: int, own: float, shared: float, *, row_tokens: float) -> int:
    """Return the number of packed rows for responses of equal length to prompts of equal length.

    Args:
      own: Tokens of a response plus the last token of its prompt, which is not shared.
      shared: Tokens of a prompt without the last.
    """
    most = int((row_tokens - shared) // own)
    full, rest = divmod(responses, most)
    rows = prompts * full
    if rest:
        rows += math.ceil(prompts / int(row_tokens // (shared + rest * own)))
    return rows

"""Rewards of a response's length and of its repetitions."""

import math
from collections.abc import Callable, Mapping
from typing import Any


def cosine_length(
    prompt: str,
    response: str,
    answer: str | None,
    record: Mapping[str, Any],
    *,
    correct: Callable[..., Any],
    max_characters: int,
    right: tuple[float, float],
    wrong: tuple[float, float],
    too_long: float,
) -> float:
    """Pays right answers for being short, and wrong ones for having tried for longer.

        b + (a - b) * (1 + cos(pi * length / max_characters)) / 2

    with (a, b) = `right` where `correct` says more than 0.5, else `wrong`: a at length 0, b at
    `max_characters`. From there on it is `too_long`.

    Source: Yeo et al. 2025 (arXiv:2502.03373), the cosine reward; lengths there are in tokens.
    """
    good = float(correct(prompt, response, answer, record)) > 0.5
    if len(response) >= max_characters:
        return too_long
    short, long = right if good else wrong
    return long + (short - long) * (1 + math.cos(math.pi * len(response) / max_characters)) / 2


def repetition(prompt: str, response: str, answer: str | None, record: Mapping[str, Any], *, words: int) -> float:
    """Minus the share of sequences of `words` words that were there before; case does not count.

        distinct / all - 1

    0 for a response of fewer words; -1 is never reached.

    Source: Yeo et al. 2025 (arXiv:2502.03373), the n-gram repetition penalty, as one number per response.
    """
    said = response.lower().split()
    sequences = list(zip(*(said[start:] for start in range(words)), strict=False))
    return len(set(sequences)) / len(sequences) - 1 if sequences else 0.0

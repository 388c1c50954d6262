"""Rewards for the length of a response and penalties for its repetitions."""

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
    """Return the cosine reward: it favors short correct answers, and long attempts if the answer is wrong.

        b + (a - b) * (1 + cos(pi * length / max_characters)) / 2

    Here (a, b) is `right` if the value of `correct` is above 0.5, else `wrong`: a at length 0, b towards
    `max_characters`. From `max_characters` on the reward is `too_long`.

    Source: Yeo et al. 2025 (arXiv:2502.03373), the cosine reward; lengths there are in tokens.
    """
    good = float(correct(prompt, response, answer, record)) > 0.5
    if len(response) >= max_characters:
        return too_long
    short, long = right if good else wrong
    return long + (short - long) * (1 + math.cos(math.pi * len(response) / max_characters)) / 2


def repetition(prompt: str, response: str, answer: str | None, record: Mapping[str, Any], *, words: int) -> float:
    """Return minus the share of repeated sequences of `words` words; case is ignored.

        distinct / all - 1

    The reward of a response with fewer words is 0; -1 is never reached.

    Source: Yeo et al. 2025 (arXiv:2502.03373), the n-gram repetition penalty, as one number per response.
    """
    tokens = response.lower().split()
    sequences = list(zip(*(tokens[start:] for start in range(words)), strict=False))
    return len(set(sequences)) / len(sequences) - 1 if sequences else 0.0

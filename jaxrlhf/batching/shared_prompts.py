"""Shared prompts: the common first tokens of all responses to a prompt.

A prompt that is computed once and attended to by all of its responses costs as much as for one response. The last token
before a response is not shared, so that the token that predicts another token is always right before it.
"""

from collections.abc import Sequence
from itertools import zip_longest
from math import inf

import numpy as np

from jaxrlhf.batch import Image
from jaxrlhf.batching.ragged import RaggedBatch


def shared_prefixes(batch: RaggedBatch) -> np.ndarray:
    """Return `shared_B`, the number of first tokens that each sequence has in common with all sequences of its prompt.

    They end before the token that predicts the first response token; 0 if a prompt has one response.
    """
    start_B, end_B = batch.offset_B[:-1], batch.offset_B[1:]
    trained = np.append(np.flatnonzero(batch.columns["mask"]), end_B[-1:])
    first_B = np.minimum(trained[np.searchsorted(trained, start_B)], end_B) - start_B
    images_B = [()] * len(start_B) if batch.images_B is None else batch.images_B
    shared_B = np.zeros(len(start_B), np.int64)
    for members in groups_of(batch.prompt_id_B):
        if len(members) > 1:
            most = max(int(first_B[members].min()) - 1, 0)
            most = int(min(most, *(_alike(images_B[members[0]], images_B[member]) for member in members)))
            token_MT = batch.columns["token"][start_B[members, None] + np.arange(most)]
            differs_T = (token_MT != token_MT[0]).any(axis=0)
            shared_B[members] = differs_T.argmax() if differs_T.any() else most
    return shared_B


def _alike(one: Sequence[Image], other: Sequence[Image]) -> float:
    """Return the number of first tokens in which two sequences show equal images; placeholders do not tell."""
    for a, b in zip_longest(one, other):
        if a is None or b is None or (a.digest, a.start) != (b.digest, b.start):
            return min(image.start for image in (a, b) if image is not None)
    return inf


def groups_of(prompt_id_B: np.ndarray) -> list[np.ndarray]:
    """Return the indices of the sequences of each prompt."""
    order_B = np.argsort(prompt_id_B, kind="stable")
    starts = np.flatnonzero(np.diff(prompt_id_B[order_B])) + 1
    return [members for members in np.split(order_B, starts) if len(members)]


def units_of(
    length_B: np.ndarray, shared_B: np.ndarray, prompt_id_B: np.ndarray, *, row_tokens: int, together: int = 1
) -> list[np.ndarray]:
    """Return the indices of sequences that go into one row together: all of a prompt, or as many as fit, longest first.

    Args:
      shared_B: Number of tokens that a sequence shares; a sequence with 0 is a separate unit.
      together: Number of consecutive sequences of a unit; 1 makes units by prompt.
    """
    if together > 1:
        return list(np.arange(len(length_B)).reshape(-1, together))
    units = []
    for group in groups_of(prompt_id_B):
        shared = int(shared_B[group[0]])
        if not shared:
            units += [group[index : index + 1] for index in range(len(group))]
            continue
        order = np.argsort(-length_B[group], kind="stable")
        start = used = 0
        for index, member in enumerate(members := group[order]):
            own = int(length_B[member]) - shared
            if index > start and shared + used + own > row_tokens:
                units.append(members[start:index])
                start, used = index, 0
            used += own
        units.append(members[start:])
    return units

"""Workers of a pool in this process, and updates of random tokens for them."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from transformers import PreTrainedTokenizerBase

from jaxrlhf.algos import token_weights
from jaxrlhf.batch import Array, Sequences
from jaxrlhf.batching.ragged import Experience
from jaxrlhf.config import Aggregation, Config
from jaxrlhf.data.tokenizer import embedded_tokenizer
from jaxrlhf.sharding.pool import ResourcePool
from jaxrlhf.workers.build import Builder, Phase

TOKENS = 400
"""Ids of random tokens are below this number."""


def builder_of(config: Config, roles: Sequence[str], *, tokenizer: PreTrainedTokenizerBase | None = None) -> Builder:
    """The builder of one pool of the configuration's devices."""
    pool = ResourcePool("all", tuple(jax.devices()[: config.devices]))
    return Builder(config, tokenizer or embedded_tokenizer(), pool, roles, progress=lambda *_: None)


def build(
    config: Config, *roles: str, tokenizer: PreTrainedTokenizerBase | None = None, updates: int = 1
) -> tuple[Builder, dict[str, Any]]:
    """The builder of one pool, and the workers by role."""
    builder = builder_of(config, roles, tokenizer=tokenizer)
    return builder, builder.workers(Phase(config, roles, total_updates=updates))


def halves(rng: np.random.Generator, *, rows: int = 8, width: int = 80) -> Sequences:
    """Sequences of whole rows, the second half of each trained."""
    token_BT = rng.integers(0, TOKENS, (rows, width)).astype(np.int32)
    mask_BT = np.broadcast_to(np.arange(width) >= width // 2, token_BT.shape)
    return Sequences(token_BT, np.full(rows, width, np.int32), mask_BT, np.arange(rows))


def of_many_lengths(rng: np.random.Generator, *, rows: int, width: int, shortest: int) -> Sequences:
    """Sequences of random lengths, each trained from a random token on."""
    length_B = rng.integers(shortest, width + 1, rows).astype(np.int32)
    inside_BT = np.arange(width) < length_B[:, None]
    mask_BT = inside_BT & (np.arange(width) >= rng.integers(1, length_B - 1)[:, None])
    token_BT = np.where(inside_BT, rng.integers(0, TOKENS, (rows, width)), 0).astype(np.int32)
    return Sequences(token_BT, length_B, mask_BT, np.arange(rows))


def weighted(
    sequences: Sequences, fields: Mapping[str, Array] | None = None, *, aggregation: Aggregation = "token-mean"
) -> Experience:
    """The update on sequences with an aggregation's weights."""
    weight_BT = token_weights(sequences.mask_BT, sequences.prompt_id_B, aggregation=aggregation)
    return Experience.of(sequences, np.asarray(weight_BT), fields or {})

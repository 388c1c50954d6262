"""Refusals of an engine: sizes that fit neither model nor mesh, and requests that it cannot answer."""

from collections.abc import Sequence

from jax.sharding import Mesh

from jaxrlhf.config import Refusal
from jaxrlhf.engine.scheduler import Request
from jaxrlhf.models import AnyModel


def check_sizes(config: AnyModel, *, capacity: int, stop_tokens: tuple[int, ...], **sizes: int) -> None:
    """Raise `Refusal` if the engine could not generate with this model.

    Args:
      capacity: Tokens that a slot's cache holds.
      sizes: Other knobs, which count something.
    """
    for name, size in sizes.items():
        if size < 1:
            raise Refusal(f"{name}={size}; expected 1 or more")
    if capacity > config.max_positions:
        raise Refusal(
            f"max_prompt_tokens + max_response_tokens = {capacity} exceeds the model's {config.max_positions} positions"
        )
    outside = [token for token in stop_tokens if not 0 <= token < config.vocab_size]
    if outside:
        raise Refusal(f"stop_tokens {outside} lie outside the vocabulary of {config.vocab_size}")


def check_split(
    config: AnyModel, mesh: Mesh, *, kv_copies: int, kv_head_axis: str | None, stage_axis: str | None
) -> None:
    """Raise `Refusal` if the cache does not split evenly over the mesh."""
    for axis, what, count, size in (
        (kv_head_axis, "key-value heads", config.num_kv_heads * kv_copies, "tensor"),
        (stage_axis, "layers", config.num_layers, "stage"),
    ):
        ways = mesh.shape[axis] if axis else 1
        if count % ways:
            raise Refusal(
                f"{count} {what} do not split {ways} ways over mesh axis {axis!r}; "
                f"use a generation {size} size that divides {count}"
            )


def check_prompt(prompt: tuple[int, ...], *, longest: int, vocab: int) -> None:
    """Raise `Refusal` if a prompt is empty, too long or outside the vocabulary."""
    if not 0 < len(prompt) <= longest:
        raise Refusal(
            f"a prompt of {len(prompt)} tokens; expected 1 to max_prompt_tokens={longest}: "
            f"drop it, or build the engine for longer prompts"
        )
    if not (min(prompt) >= 0 and max(prompt) < vocab):
        raise Refusal(f"prompt ids from {min(prompt)} to {max(prompt)} lie outside the vocabulary of {vocab}")


def check_keys(requests: Sequence[Request], *, seed: int) -> None:
    """Raise `Refusal` if a number does not fit the random key of a draw."""
    for name, values in (("seed", [seed]), ("request_id", [request.request_id for request in requests])):
        for value in values:
            if not 0 <= value < 2**32:
                raise Refusal(f"{name}={value} does not fit the random key; expected 0 to 2**32 - 1")

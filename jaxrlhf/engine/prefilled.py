"""Prompts that were run, between a prefill and the insertions that start from it."""

from dataclasses import dataclass

from jaxrlhf.engine import programs


@dataclass(frozen=True)
class Prefilled:
    """Prompts on the device, ready to be inserted any number of times.

    Attributes:
      tokens: Token ids of each prompt.
      version: Version of the weights that ran them.
    """

    prompts: programs.Prompts
    tokens: tuple[tuple[int, ...], ...]
    version: int

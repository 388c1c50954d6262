"""Prompts that were run, between a prefill and the insertions that start from it."""

from dataclasses import dataclass

from jaxrlhf.engine import programs


@dataclass(frozen=True)
class Prefilled:
    """Prompts on the device, ready to be inserted any number of times.

    Attributes:
      tokens: Of each prompt.
      version: Of the weights that ran them.
    """

    prompts: programs.Prompts
    tokens: tuple[tuple[int, ...], ...]
    version: int

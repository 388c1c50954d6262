"""The experts that tokens went through while they were sampled, kept until their response ends."""

from dataclasses import replace

import numpy as np

from jaxrlhf.batch import Array
from jaxrlhf.config import Refusal
from jaxrlhf.engine.scheduler import Completion
from jaxrlhf.models.causal_lm import AnyModel


class RoutingRecord:
    """Choices of experts by slot: of the prompt's tokens, then of each response token that was run.

    Args:
      on: Whether anything is kept; without it nothing comes from the devices either.

    Raises:
      Refusal: The model has no experts.
    """

    def __init__(self, config: AnyModel, *, on: bool) -> None:
        if on and config.experts is None:
            raise Refusal("replay_routing records choices of experts, of which this model has none; leave it out")
        self.on = on
        self._prompts: dict[int, tuple[Array, int, int]] = {}
        self._parts: dict[int, list[np.ndarray]] = {}

    def start(self, slot: int, choice_PSLk: Array | None, row: int, length: int) -> None:
        """A response to the prompt of a row takes the slot."""
        if choice_PSLk is not None:
            # Read when the response ends: nothing waits for the prefill.
            self._prompts[slot], self._parts[slot] = (choice_PSLk, row, length), []

    def add(self, slot: int, choice_WLk: Array | None) -> None:
        """Add the experts of the tokens that a window ran in the slot."""
        if choice_WLk is not None:
            self._parts[slot].append(np.asarray(choice_WLk))

    def complete(self, slot: int, completion: Completion) -> Completion:
        """The completion with its record; its last token was drawn and never run."""
        if not self.on:
            return completion
        choice_PSLk, row, length = self._prompts.pop(slot)
        prompt_SLk = np.asarray(choice_PSLk)[row, :length]
        return replace(completion, choice_TLk=np.concatenate([prompt_SLk, *self._parts.pop(slot)]))

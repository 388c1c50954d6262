"""Constraints of responses: which tokens may follow, computed on the host for every sampled token.

A grammar is followed by a program that is not compiled for it, so masks are arguments of the programs. While a
constrained response is in a slot, every dispatch samples one token, because the next mask depends on this token.
"""

from collections.abc import Mapping, Sequence
from typing import Protocol

import jax
import numpy as np

from jaxrlhf.engine.programs import Slots
from jaxrlhf.engine.sequence import SequenceState


class TokenConstraint(Protocol):
    """Constraint of one response, for example a grammar."""

    def allowed(self) -> np.ndarray:
        """Return the mask of the tokens that may come next, `[ceil(V / 32)]` uint32; at least one token is allowed.

        Bit i of entry j is the token `32 j + i`.
        """

    def take(self, token: int) -> None:
        """Advance by a sampled token, which was allowed."""


class SlotConstraints:
    """Constraints of the responses in slots.

    Args:
      vocab: Number of tokens of the vocabulary.
    """

    def __init__(self, vocab: int) -> None:
        self._words = -(-vocab // 32)
        self._of_slot: dict[int, TokenConstraint] = {}

    def start(self, sequences: Mapping[int, SequenceState], rows: int) -> np.ndarray | None:
        """Return the masks of the first tokens, `[rows, U]`; None if no response in any slot is constrained.

        Args:
          sequences: Sequences by slot, in the order of the rows.
        """
        bits_IU = self._all(rows)
        for row, (slot, sequence) in enumerate(sequences.items()):
            self._of_slot.pop(slot, None)
            constraint = sequence.request.constraint
            if constraint is not None:
                self._of_slot[slot], bits_IU[row] = constraint, constraint.allowed()
        return bits_IU if self._of_slot else None

    def next(self, slots: Slots, slot_B: Sequence[int]) -> np.ndarray | None:
        """Return the masks of the next tokens, `[B, U]`, after the newest; None if no response is constrained.

        Args:
          slot_B: Slot of each row of `slots`.
        """
        if not self._of_slot:
            return None
        bits_BU = self._all(len(slot_B))
        token_B, active_B = jax.device_get((slots.token_B, slots.active_B))
        for row, slot in enumerate(slot_B):
            constraint = self._of_slot.get(slot)
            if constraint is not None and active_B[row]:
                constraint.take(int(token_B[row]))
                bits_BU[row] = constraint.allowed()
        return bits_BU

    def end(self, slot: int) -> None:
        """Forget the constraint of a response that ended."""
        self._of_slot.pop(slot, None)

    def _all(self, rows: int) -> np.ndarray:
        return np.full((rows, self._words), 2**32 - 1, np.uint32)


def constrained(bits_BU: np.ndarray | None) -> tuple[str, ...]:
    """Return the part of a program's name that says that the program takes masks."""
    return () if bits_BU is None else ("constrained",)

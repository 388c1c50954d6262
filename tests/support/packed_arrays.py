"""Packing of padded arrays: what goes in and comes back is `[B, T]`."""

from typing import Any

import numpy as np

from jaxrlhf.batch import Array, Sequences
from jaxrlhf.batching.packing import Packing
from jaxrlhf.batching.ragged import RaggedBatch, without_padding


class PackedArrays:
    """Packing of sequences, which removes and restores the padding of arrays."""

    def __init__(self, sequences: Sequences, **how: Any) -> None:
        self.batch = RaggedBatch.of(sequences)
        self.packing = Packing(self.batch, **how)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.packing, name)

    def pack(self, array_BT: Array) -> np.ndarray:
        return self.packing.pack(without_padding(array_BT, self.batch.length_B))

    def unpack(self, packed: Any) -> np.ndarray:
        return self.batch.padded(self.packing.unpack(packed))

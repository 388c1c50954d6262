"""What may be best: rows of numbers that no other row beats."""

import numpy as np


def undominated(value_KD: np.ndarray) -> np.ndarray:
    """Indices, ascending, of rows that no other row is at most equal to in every column; of equal rows the first."""
    order = np.lexsort((np.arange(len(value_KD)), value_KD.sum(axis=1)))
    kept = []
    # Nothing later in the order can beat what comes first: its sum is no smaller.
    while len(order):
        first, order = order[0], order[1:]
        kept.append(first)
        order = order[~(value_KD[first] <= value_KD[order]).all(axis=1)]
    return np.sort(np.array(kept, dtype=np.int64))

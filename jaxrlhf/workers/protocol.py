"""Transfer protocols: how a call's arguments reach a group's ranks and its results come back.

A protocol is a `distribute` of the arguments over the ranks and a `collect` of what the
ranks return. A rank is one controller-visible process of the group; the local backend has
a single one that drives all devices, so there every protocol hands values through.

Source: HybridFlow (arXiv:2409.19256), section 4.1 and Table 3.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import jax
import numpy as np

Verb = TypeVar("Verb", bound=Callable[..., Any])


@dataclass(frozen=True)
class TransferProtocol:
    """How values travel between the controller and the ranks of a group.

    Attributes:
      name: As in the paper's Table 3.
      distribute: `(value, ranks) -> one value per rank`.
      collect: `(results, one per rank) -> value`.
    """

    name: str
    distribute: Callable[[Any, int], list[Any]]
    collect: Callable[[Sequence[Any]], Any]


def _split(value: Any, ranks: int) -> list[Any]:
    """Slice every array of a tree into equal parts along its first dimension."""
    for leaf in jax.tree.leaves(value):
        if np.shape(leaf)[0] % ranks:
            raise ValueError(f"a batch of {np.shape(leaf)[0]} rows does not split over {ranks} data-parallel ranks")
    return [
        jax.tree.map(lambda x, r=rank: x[r * (len(x) // ranks) : (r + 1) * (len(x) // ranks)], value)
        for rank in range(ranks)
    ]


def _join(results: Sequence[Any]) -> Any:
    return jax.tree.map(lambda *parts: np.concatenate([np.asarray(part) for part in parts]), *results)


def _copies(value: Any, ranks: int) -> list[Any]:
    return [value] * ranks


ONE_TO_ALL = TransferProtocol("ONE_TO_ALL", _copies, lambda results: results[0])
DP_PROTO = TransferProtocol("DP_PROTO", _split, _join)


def verb(protocol: TransferProtocol) -> Callable[[Verb], Verb]:
    """Mark a worker's method as one that the controller calls, with its protocol."""

    def mark(method: Verb) -> Verb:
        method.protocol = protocol  # type: ignore[attr-defined]
        return method

    return mark

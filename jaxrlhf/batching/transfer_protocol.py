"""Transfer protocols: how a call's arguments reach a group's ranks and its results come back.

A rank is one process of a group; it drives one device or several, and a pool on one machine
has a single rank. Moving data between two models is the `collect` of the source and the
`distribute` of the destination, so N models need N protocols and not N^2.

Source: HybridFlow (arXiv:2409.19256), section 4.1 and Table 3.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import jax
import numpy as np
from jax.sharding import Mesh

from jaxrlhf.batch import Problem
from jaxrlhf.config import Refusal
from jaxrlhf.sharding.mesh import BATCH_AXES, SLOT_AXES, STAGE_AXES, TENSOR_AXES

Verb = TypeVar("Verb", bound=Callable[..., Any])


@dataclass(frozen=True)
class Place:
    """Where the devices of one rank lie in its group's mesh.

    Attributes:
      rank: Of the process; ranks hold consecutive blocks of the mesh's devices.
      sizes: Of the mesh axes.
      coordinates: Of each of the rank's devices, by axis.
    """

    rank: int
    sizes: Mapping[str, int]
    coordinates: tuple[Mapping[str, int], ...]

    @classmethod
    def of(cls, mesh: Mesh) -> "Place":
        """This process's place in a mesh."""
        mine = jax.process_index()
        indices = [index for index, device in np.ndenumerate(mesh.devices) if device.process_index == mine]
        axes = mesh.axis_names
        return cls(mine, dict(mesh.shape), tuple(dict(zip(axes, index, strict=True)) for index in indices))

    @classmethod
    def alone(cls, rank: int, ranks: int) -> "Place":
        """One of `ranks` processes that share no model: each is a data-parallel rank of its own."""
        return cls(rank, {"data": ranks}, ({"data": rank},))

    def part(self, axes: Sequence[str]) -> tuple[int, int]:
        """Which part of a batch split over `axes` the rank's devices hold, and of how many.

        Raises:
          Refusal: The devices hold neither whole parts nor lie together inside one.
        """
        sizes = [self.sizes.get(axis, 1) for axis in axes]
        held = sorted({_flat([at.get(axis, 0) for axis in axes], sizes) for at in self.coordinates})
        first, count, total = held[0], len(held), math.prod(sizes)
        if held != list(range(first, first + count)) or total % count or first % count:
            raise Refusal(
                f"the {len(self.coordinates)} devices of host {self.rank} hold parts {held} of the {total} that "
                f"{' x '.join(axes)} make; a host has to hold an equal block of them: change the layout or the "
                f"devices per host so that one divides the other"
            )
        return first // count, total // count

    def holds(self, *, first: Sequence[str] = (), last: Sequence[str] = ()) -> bool:
        """Whether one of the devices is first on the axes `first` and last on the axes `last`."""
        return any(
            all(at.get(axis, 0) == 0 for axis in first)
            and all(at.get(axis, 0) == self.sizes.get(axis, 1) - 1 for axis in last)
            for at in self.coordinates
        )


def _flat(index: Sequence[int], sizes: Sequence[int]) -> int:
    return int(np.ravel_multi_index(index, sizes)) if sizes else 0


@dataclass(frozen=True)
class TransferProtocol:
    """How values travel between the controller, or another group, and the ranks of a group.

    Positional arguments of a verb are what is distributed; settings go by name, to every rank.

    Attributes:
      name: As in the paper's Table 3.
      distribute: `(arguments, place of a rank) -> that rank's arguments`.
      leads: Whether the result of the rank at this place is collected.
      collect: `(results of the leading ranks, in order of ranks) -> value`.
    """

    name: str
    distribute: Callable[[tuple[Any, ...], Place], tuple[Any, ...]]
    leads: Callable[[Place], bool]
    collect: Callable[[Sequence[Any]], Any]


def rows(arguments: tuple[Any, ...], *, part: int, parts: int) -> tuple[Any, ...]:
    """One part of the rows of a batch: of every array along its first dimension, and of lists of problems.

    What has fewest rows sets the unit, so a prompt and its responses stay together. Parts
    differ by at most one unit. What has no rows goes to every rank as it is.

    Raises:
      Refusal: Fewer units than parts, or an array's rows are no multiple of the unit.
    """
    counts = {len(leaf) for leaf in jax.tree.leaves(arguments, is_leaf=_has_rows) if _has_rows(leaf)}
    units = min(counts, default=parts)
    if units < parts:
        raise Refusal(f"a batch of {units} rows does not split over {parts} ranks; give at least one row to each")
    if any(count % units for count in counts):
        raise Refusal(f"batches of {sorted(counts)} rows travel together; the smallest has to divide the others")
    start, stop = part * units // parts, (part + 1) * units // parts

    def cut(leaf: Any) -> Any:
        size = len(leaf) // units if _has_rows(leaf) else 0
        return leaf[start * size : stop * size] if size else leaf

    return jax.tree.map(cut, arguments, is_leaf=_has_rows)


def _has_rows(value: Any) -> bool:
    if isinstance(value, np.ndarray | jax.Array):
        return value.ndim > 0
    return isinstance(value, list | tuple) and bool(value) and isinstance(value[0], Problem)


def join(results: Sequence[Any]) -> Any:
    """Arrays joined along their first dimension; of numbers the first rank's, since SPMD ranks agree on them."""

    def one(*parts: Any) -> Any:
        return np.concatenate([np.asarray(part) for part in parts]) if np.ndim(parts[0]) else parts[0]

    return jax.tree.map(one, *results) if len(results) > 1 else results[0]


def scattered(axes: Sequence[str]) -> Callable[[tuple[Any, ...], Place], tuple[Any, ...]]:
    """A `distribute` that splits rows over mesh axes, and repeats them over the others."""

    def distribute(arguments: tuple[Any, ...], place: Place) -> tuple[Any, ...]:
        part, parts = place.part(axes)
        return rows(arguments, part=part, parts=parts) if parts > 1 else arguments

    return distribute


def _broadcast(arguments: tuple[Any, ...], place: Place) -> tuple[Any, ...]:
    return arguments


def _own(arguments: tuple[Any, ...], place: Place) -> tuple[Any, ...]:
    return tuple(argument[place.rank] for argument in arguments)


PROTOCOLS: dict[str, TransferProtocol] = {}
"""Every protocol by its name."""


def register(protocol: TransferProtocol) -> TransferProtocol:
    """Make a protocol known by its name.

    Raises:
      Refusal: The name is taken.
    """
    if protocol.name in PROTOCOLS:
        raise Refusal(f"there is a transfer protocol {protocol.name!r} already; choose another name")
    PROTOCOLS[protocol.name] = protocol
    return protocol


ONE_TO_ALL = register(TransferProtocol("ONE_TO_ALL", _broadcast, lambda place: True, list))
"""The same arguments everywhere; a list of what every rank returns."""

THREE_D_PROTO = register(
    TransferProtocol(
        "3D_PROTO", scattered(BATCH_AXES), lambda place: place.holds(first=TENSOR_AXES, last=STAGE_AXES), join
    )
)
"""Rows split over data parallelism; joined from the last stage and first tensor rank of each group."""

THREE_D_ALL_MICRO_DP = register(
    TransferProtocol(
        "3D_ALL_MICRO_DP", scattered(SLOT_AXES), lambda place: place.holds(first=("stage", "tensor")), join
    )
)
"""Rows split over generation replicas, micro data parallelism included; joined from the first rank of each."""

THREE_D_PP_ONLY = register(
    TransferProtocol("3D_PP_ONLY", _broadcast, lambda place: place.holds(first=(*BATCH_AXES, *TENSOR_AXES)), list)
)
"""The same arguments everywhere; a list of what the first data and tensor rank of every stage returns."""

DP_PROTO = register(
    TransferProtocol(
        "DP_PROTO", scattered(BATCH_AXES), lambda place: place.holds(first=(*STAGE_AXES, *TENSOR_AXES)), join
    )
)
"""Rows split over data-parallel ranks and joined again."""

ALL_TO_ALL = register(TransferProtocol("ALL_TO_ALL", _own, lambda place: True, list))
"""Arguments are lists with one entry for every rank, and so is the result."""


def verb(protocol: TransferProtocol) -> Callable[[Verb], Verb]:
    """Mark a worker's method as one that the controller calls, with its protocol."""

    def mark(method: Verb) -> Verb:
        method.protocol = protocol  # type: ignore[attr-defined]
        return method

    return mark


def verbs_of(worker: type) -> dict[str, TransferProtocol]:
    """The verbs of a worker class, by name."""
    return {name: getattr(worker, name).protocol for name in dir(worker) if hasattr(getattr(worker, name), "protocol")}

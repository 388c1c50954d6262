"""Transfer protocols of worker methods: arguments are split over a group's ranks, results are collected.

A rank is one process of a group; it drives one or several devices, and a pool on one machine has a single rank. Moving
data between two models is the `collect` of the source and the `distribute` of the destination, so N models need N
protocols and not N^2.

Source: HybridFlow (arXiv:2409.19256), section 4.1 and Table 3.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any, Concatenate, Literal, ParamSpec, Protocol, TypeVar, overload

import jax
import numpy as np
from jax.sharding import Mesh

from jaxrlhf.batch import Problem, RolloutBatch, Sequences
from jaxrlhf.batching.ragged import Experience, MinibatchRows
from jaxrlhf.config import Refusal
from jaxrlhf.sharding.described import are_here
from jaxrlhf.sharding.mesh import BATCH_AXES, SLOT_AXES, STAGE_AXES, TENSOR_AXES, TOKEN_AXES

First = TypeVar("First")
Second = TypeVar("Second")
Value = TypeVar("Value")
Worker = TypeVar("Worker")
Value_co = TypeVar("Value_co", covariant=True)
Settings = ParamSpec("Settings")


@dataclass(frozen=True)
class RankCoordinates:
    """Coordinates of one rank's devices in its group's mesh.

    Attributes:
      rank: Index of the process; ranks hold consecutive blocks of the mesh's devices.
      coordinates: Index along each axis, for each device of the rank.
    """

    rank: int
    sizes: Mapping[str, int]
    coordinates: tuple[Mapping[str, int], ...]

    @classmethod
    def of(cls, mesh: Mesh) -> "RankCoordinates":
        """Return the coordinates of this process's devices in a mesh; of all devices if they are only described."""
        mine, here = jax.process_index(), are_here(list(mesh.devices.flat))
        places = np.ndenumerate(mesh.devices)
        indices = [index for index, device in places if device.process_index == mine or not here]
        axes = mesh.axis_names
        return cls(mine, dict(mesh.shape), tuple(dict(zip(axes, index, strict=True)) for index in indices))

    @classmethod
    def alone(cls, rank: int, ranks: int) -> "RankCoordinates":
        """Return the coordinates of one of `ranks` processes that share no model, each a data-parallel rank."""
        return cls(rank, {"data": ranks}, ({"data": rank},))

    def part(self, axes: Sequence[str]) -> tuple[int, int]:
        """Return the index of the rank's part of a batch that is split over `axes`, and the number of parts.

        Raises:
          Refusal: The rank's devices neither hold an equal block of parts nor are within one part.
        """
        sizes = [self.sizes.get(axis, 1) for axis in axes]
        places = ([at.get(axis, 0) for axis in axes] for at in self.coordinates)
        held = sorted({int(np.ravel_multi_index(place, sizes)) for place in places})
        first, count, total = held[0], len(held), math.prod(sizes)
        if held != list(range(first, first + count)) or total % count or first % count:
            raise Refusal(
                f"the {len(self.coordinates)} devices of host {self.rank} hold parts {held} of {total} "
                f"({' x '.join(axes)}), but a host must hold an equal block of parts; change the layout or the "
                "devices per host so that one divides the other"
            )
        return first // count, total // count

    def holds(self, *, first: Sequence[str] = (), last: Sequence[str] = ()) -> bool:
        """Return True if one of the devices is first on the axes `first` and last on the axes `last`."""
        return any(
            all(at.get(axis, 0) == 0 for axis in first)
            and all(at.get(axis, 0) == self.sizes.get(axis, 1) - 1 for axis in last)
            for at in self.coordinates
        )


class RemoteValue(ABC):
    """Value in other processes."""

    @property
    def rows(self) -> int | None:
        """First dimension of all of its arrays; None if they differ or it is unknown."""
        return None

    @abstractmethod
    def load(self) -> Any:
        """Load the value into this process."""

    def load_rows(self, start: int, stop: int) -> Any:
        """Load rows of the value into this process; only called if `rows` is known."""
        return jax.tree.map(lambda leaf: leaf[start:stop], self.load())


def rows_of(value: Any) -> int | None:
    """Return the first dimension of all arrays of a value; None if they differ, or a leaf has none.

    Rows of episodes are not divided by their number, so they are None too.
    """
    if _is_episodes(value):
        return None
    counts = {len(leaf) if isinstance(leaf, np.ndarray) and leaf.ndim else None for leaf in jax.tree.leaves(value)}
    return counts.pop() if len(counts) == 1 else None


@dataclass(frozen=True)
class TransferProtocol:
    """Transfer of a call's arguments to the ranks of a group, and of the results back.

    Positional arguments are distributed; keyword arguments go to every rank.

    Attributes:
      name: Name in the paper's Table 3.
      distribute: `(arguments, coordinates of a rank) -> that rank's arguments`; a `RemoteValue` that is not split may
        stay remote.
      leads: True for the ranks whose results are collected.
      collect: `(results of the leading ranks, in order of ranks) -> value`.
    """

    name: str
    distribute: Callable[[tuple[Any, ...], RankCoordinates], tuple[Any, ...]]
    leads: Callable[[RankCoordinates], bool]
    collect: Callable[[Sequence[Any]], Any]


def rows(arguments: tuple[Any, ...], *, part: int, parts: int) -> tuple[Any, ...]:
    """Return the rows of one part of a batch: arrays are split along their first dimension, lists of problems by items.

    The argument with the fewest rows sets the unit, so a prompt and its responses stay together. Parts differ by at
    most one unit. Arguments without rows go to every rank whole. Minibatches may have any numbers of rows; every part
    gets rows of each. Beside problems, episodes are split by prompt, because an episode has one or several rows.

    Raises:
      Refusal: There are fewer units than parts, or an array's rows are not a multiple of the units.
    """
    arguments = tuple(loaded(argument) if _rows(argument) is None else argument for argument in arguments)
    leaves = jax.tree.leaves(arguments, is_leaf=_is_batch)
    units = min((count for leaf in leaves if (count := _rows(leaf)) is not None), default=parts)
    _check_units(units, parts)
    start, stop = part * units // parts, (part + 1) * units // parts

    def cut(leaf: Any) -> Any:
        if isinstance(leaf, MinibatchRows | Experience):
            _check_units(leaf.units, parts)
            return leaf if parts == 1 else leaf.part(part, parts)
        if _rows(leaf) is None:
            return leaf
        ends = _ends_of_units(leaf, units)
        first, last = ends[start], ends[stop]
        if isinstance(leaf, RemoteValue):
            return leaf.load_rows(first, last)
        return leaf.take(slice(first, last)) if _is_episodes(leaf) else leaf[first:last]

    return jax.tree.map(cut, arguments, is_leaf=_is_batch)


def _ends_of_units(leaf: Any, units: int) -> list[int]:
    """Return the first row of each unit, and the end of the last unit."""
    count = _rows(leaf) or 0
    if _is_episodes(leaf) and count != units:
        ends = [0, *(np.flatnonzero(np.diff(leaf.sequences.prompt_id_B)) + 1).tolist(), count]
        if len(ends) != units + 1:
            raise Refusal(f"got episodes of {len(ends) - 1} prompts and {units} rows of another argument; pass as many")
        return ends
    if count % units:
        raise Refusal(f"arguments have {sorted((count, units))} rows; the smallest number must divide the others")
    return [unit * count // units for unit in range(units + 1)]


def _check_units(units: int, parts: int) -> None:
    if units < parts:
        raise Refusal(f"a batch of {units} rows does not split over {parts} ranks; pass at least one row for each rank")


def loaded(value: Any) -> Any:
    """Return a value, loaded into this process if it is remote."""
    return value.load() if isinstance(value, RemoteValue) else value


def _is_batch(value: Any) -> bool:
    return isinstance(value, MinibatchRows | Experience | RemoteValue) or _has_rows(value) or _is_episodes(value)


def _is_episodes(value: Any) -> bool:
    return isinstance(value, RolloutBatch) and value.episodes is not None


def _rows(value: Any) -> int | None:
    if isinstance(value, RemoteValue):
        return value.rows
    if _is_episodes(value):
        return len(value.truncated_B)
    return len(value) if _has_rows(value) else None


def _has_rows(value: Any) -> bool:
    if isinstance(value, np.ndarray | jax.Array):
        return value.ndim > 0
    return isinstance(value, list | tuple) and bool(value) and isinstance(value[0], Problem)


def join(results: Sequence[Any]) -> Any:
    """Concatenate arrays along their first dimension; scalars are the first rank's, because SPMD ranks agree on them.

    Sequences have images if some of the parts do.
    """

    def one(*parts: Any) -> Any:
        if isinstance(parts[0], Sequences):
            return jax.tree.map(one, *_with_images(parts))
        return np.concatenate([np.asarray(part) for part in parts]) if np.ndim(parts[0]) else parts[0]

    if len(results) == 1:
        return results[0]
    return jax.tree.map(one, *results, is_leaf=lambda node: isinstance(node, Sequences))


def _with_images(parts: Sequence[Sequences]) -> list[Sequences]:
    """Return the sequences with `images_B` set in all of them (empty where there are no images), or in none."""
    if all(part.images_B is None for part in parts):
        return list(parts)
    none = np.frompyfunc(lambda _: (), 1, 1)  # an array of empty tuples
    return [
        replace(part, images_B=none(np.arange(len(part.token_BT)))) if part.images_B is None else part for part in parts
    ]


def scattered(axes: Sequence[str]) -> Callable[[tuple[Any, ...], RankCoordinates], tuple[Any, ...]]:
    """Return a `distribute` that splits rows over some mesh axes and repeats them over the others."""

    def distribute(arguments: tuple[Any, ...], place: RankCoordinates) -> tuple[Any, ...]:
        part, parts = place.part(axes)
        return rows(arguments, part=part, parts=parts) if parts > 1 else arguments

    return distribute


PROTOCOLS: dict[str, TransferProtocol] = {}
"""Every protocol by name."""


def register(protocol: TransferProtocol) -> TransferProtocol:
    """Register a protocol by its name.

    Raises:
      Refusal: The name is taken.
    """
    if protocol.name in PROTOCOLS:
        raise Refusal(f"a transfer protocol {protocol.name!r} already exists; choose another name")
    PROTOCOLS[protocol.name] = protocol
    return protocol


ONE_TO_ALL = register(TransferProtocol("ONE_TO_ALL", lambda arguments, _: arguments, lambda _: True, list))
"""Protocol: all arguments go to every rank; the result is a list of every rank's result."""

THREE_D_PROTO = register(
    TransferProtocol(
        "3D_PROTO",
        scattered(BATCH_AXES),
        lambda place: place.holds(first=(*TOKEN_AXES, *TENSOR_AXES), last=STAGE_AXES),
        join,
    )
)
"""Protocol: rows split over data parallelism; joined from the last stage and first tensor rank of each group."""

THREE_D_ALL_MICRO_DP = register(
    TransferProtocol(
        "3D_ALL_MICRO_DP", scattered(SLOT_AXES), lambda place: place.holds(first=("context", "stage", "tensor")), join
    )
)
"""Protocol: rows split over generation replicas, with micro data parallelism; joined from the first rank of each."""

DP_PROTO = register(
    TransferProtocol(
        "DP_PROTO",
        scattered(BATCH_AXES),
        lambda place: place.holds(first=(*TOKEN_AXES, *STAGE_AXES, *TENSOR_AXES)),
        join,
    )
)
"""Protocol: rows split over data-parallel ranks and joined again."""


class Awaited(Protocol[Value_co]):
    """Result of a call that may still run, such as a `concurrent.futures.Future`."""

    def result(self, timeout: float | None = None) -> Value_co:
        """Wait for the value."""


Part = Literal["relayout", "fetch", "generate", "reward", "prepare", "update"]
"""Part of a step that a call belongs to; time and memory of a step are reported by part."""


@dataclass(frozen=True)
class worker_method:  # lower case, because it is a decorator
    """Decorator of a worker's method that the controller calls on the worker's group.

    To type checkers the method is what the controller calls: each of its first two positional arguments may be the
    future of another call, and it returns a future. In the worker's process it is the function as written.

    Attributes:
      protocol: Protocol that splits the arguments over the ranks and collects the results.
      part: Part of a step under which its calls are reported.
    """

    protocol: TransferProtocol
    part: Part = "prepare"

    @overload
    def __call__(
        self, method: Callable[Concatenate[Worker, First, Second, Settings], Value]
    ) -> Callable[Concatenate[Worker, First | Awaited[First], Second | Awaited[Second], Settings], Future[Value]]: ...
    @overload
    def __call__(
        self, method: Callable[Concatenate[Worker, First, Settings], Value]
    ) -> Callable[Concatenate[Worker, First | Awaited[First], Settings], Future[Value]]: ...
    @overload
    def __call__(self, method: Callable[[Worker], Value]) -> Callable[[Worker], Future[Value]]: ...
    def __call__(self, method: Any) -> Any:
        method.protocol, method.part = self.protocol, self.part
        return method


def worker_methods(worker: type) -> dict[str, TransferProtocol]:
    """Return the protocols of a worker class's methods that the controller calls, by name."""
    return {name: getattr(worker, name).protocol for name in dir(worker) if hasattr(getattr(worker, name), "protocol")}


def parts_of(workers: Iterable[type]) -> dict[str, Part]:
    """Return the part of a step that each method of some worker classes belongs to."""
    return {name: getattr(worker, name).part for worker in workers for name in worker_methods(worker)}

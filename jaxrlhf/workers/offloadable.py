"""Trees of arrays that are offloaded to host memory while they are not in use."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax

from jaxrlhf.checkpoint import TreeItem
from jaxrlhf.resharding.offload import Moved, to_device, to_host


class Offloadable:
    """Tree of arrays that is on the devices while in use, and otherwise (with `offload`) in host memory.

    Args:
      tree: Arrays, or a function that makes them at their first use.
      offload: True to keep the tree in host memory while it is not in use.
    """

    def __init__(self, tree: Any, *, offload: bool = False) -> None:
        self._make: Callable[[], Any] | None = tree if callable(tree) else None
        self.tree: Any = None if callable(tree) else tree
        self._offload, self._users = offload, 0
        self._moves: list[Moved] = []
        if self.tree is not None:
            self._wait()

    @contextmanager
    def on_devices(self) -> Iterator[None]:
        """Keep the tree on the devices within the block."""
        if self.tree is None:
            assert self._make is not None
            self.tree = self._make()
            self._wait()
        if self._offload and not self._users:
            self._move(to_device)
        self._users += 1
        try:
            yield
        finally:
            self._users -= 1
            self._wait()

    @contextmanager
    def partly_away(self, mask: Any) -> Iterator[None]:
        """Move leaves with True in `mask` to host memory within the block, if the tree is offloaded."""
        if not self._offload:
            yield
            return
        waiting, moved = to_host(jax.tree.map(lambda leaf, away: leaf if away else None, self.tree, mask))
        self._moves.append(moved)
        self.tree = jax.tree.map(lambda leaf, there: leaf if there is None else there, self.tree, waiting)
        try:
            yield
        finally:
            self._move(to_device)

    def take_moves(self) -> list[Moved]:
        """Return the moves between device and host since the last call."""
        moves, self._moves = self._moves, []
        return moves

    def _wait(self) -> None:
        if self._offload and not self._users:
            self._move(to_host)

    def _move(self, move: Callable[[Any], tuple[Any, Moved]]) -> None:
        self.tree, moved = move(self.tree)
        self._moves.append(moved)


class OffloadableItem(TreeItem):
    """Checkpoint item of an offloadable tree; the tree is moved to the devices to be saved or restored."""

    def __init__(self, held: Offloadable) -> None:
        super().__init__(lambda: held.tree, lambda tree: setattr(held, "tree", tree))
        self._held = held

    def describe(self) -> dict[str, str]:
        with self._held.on_devices():  # an optimizer's state is made when it is first used
            return super().describe()

    def save(self, directory: Path) -> None:
        with self._held.on_devices():
            super().save(directory)

    def restore(self, directory: Path) -> None:
        with self._held.on_devices():
            super().restore(directory)

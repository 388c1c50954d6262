"""Trees of arrays in a checkpoint, each written and read by the processes that hold it."""

import asyncio
import logging
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import jax
import orbax.checkpoint as ocp
from etils import epath

from jaxrlhf.config import Refusal
from jaxrlhf.runtime.checksums import special_file


def _is_not_raised(record: logging.LogRecord) -> bool:
    """Return False for an error of a save that is logged and also raised in the thread that waits for the save.

    Errors of orbax were raised in its files. Errors of tensorstore's threads have no traceback; their text names it.
    """
    if not record.exc_info:
        return True
    raised_in = (frame.filename for frame in traceback.extract_tb(record.exc_info[2]))
    texts = record.pathname, *raised_in
    return not any("orbax" in file for file in texts) and "tensorstore" not in str(record.exc_info[1])


# Orbax logs errors of its threads; asyncio logs errors of orbax's tasks, one for each array, when another one failed.
for _logger in ("absl", "asyncio"):
    logging.getLogger(_logger).addFilter(_is_not_raised)  # orbax is imported above, and with it absl's logger


class Item(Protocol):
    """Tree of a checkpoint, as seen by the process that manages the checkpoints.

    The arrays may be in other processes, which then share a file system. Each method is called in all of these
    processes, and the next method is called only after it has returned or failed in all of them. Writing needs no
    further coordination, so the processes never wait for each other.
    """

    def describe(self) -> dict[str, str]:
        """Return dtype and shape of every array, by its path in the tree."""

    def save(self, directory: Path) -> None:
        """Start writing into an empty directory; return once the arrays may be overwritten."""

    def finish(self) -> None:
        """Return once the files are written. This touches no array, so it may run during the next computation."""

    def merge(self) -> None:
        """Merge the files of all processes into one readable tree. This touches no array."""

    def restore(self, directory: Path) -> None:
        """Read into the current shapes, dtypes and layouts of the arrays."""


class TreeItem:
    """Tree of arrays that are in this process, or spread over this and other processes of its `jax.distributed`.

    Args:
      get: Function that returns the tree, or `jax.ShapeDtypeStruct`s with shardings if it is only restored.
      put: Function that takes a restored tree. The arrays of the old tree are deleted before restoring, so that memory
        never holds both.
    """

    def __init__(self, get: Callable[[], Any], put: Callable[[Any], None]) -> None:
        self._get, self._put = get, put
        self._handler = ocp.StandardCheckpointHandler()
        self._directory: epath.Path | None = None
        self._writes: list[ocp.future.Future] = []

    def describe(self) -> dict[str, str]:
        leaves = jax.tree_util.tree_leaves_with_path(self._get())
        return {jax.tree_util.keystr(path): f"{leaf.dtype}{list(leaf.shape)}" for path, leaf in leaves}

    def save(self, directory: Path) -> None:
        """Start writing into an empty directory; see `Item`.

        Raises:
          Refusal: This host does not see the directory.
        """
        if not directory.is_dir():
            raise Refusal(
                f"host {jax.process_index()} does not see the checkpoint directory {directory}; choose a workdir on "
                "a file system that all hosts share"
            )
        self.finish()  # wait for a save that failed in another process
        self._directory = epath.Path(directory)
        args = ocp.args.StandardSave(self._get())
        # Not asyncio.run: its cleanup counts the tasks of all threads, and orbax's tasks change meanwhile.
        loop = asyncio.new_event_loop()
        try:
            self._writes = loop.run_until_complete(self._handler.async_save(self._directory, args=args)) or []
        finally:
            loop.close()

    def finish(self) -> None:
        writes, self._writes = self._writes, []
        for write in writes:
            write.result()

    def merge(self) -> None:
        if jax.process_index() == 0:
            self._handler.finalize(self._directory)

    def restore(self, directory: Path) -> None:
        tree = self._get()
        target = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), tree)
        for leaf in jax.tree.leaves(tree):
            if isinstance(leaf, jax.Array):
                leaf.delete()
        self._put(self._handler.restore(epath.Path(directory), args=ocp.args.StandardRestore(target)))


def read_each(directory: Path, target: Any) -> Iterator[tuple[str, jax.Array]]:
    """Yield the arrays of a saved tree with their paths, such as `layers.mlp.up`; one array at a time is read.

    Args:
      target: `jax.ShapeDtypeStruct`s with shardings; other arrays of the saved tree are not read.
    """
    return read_named(directory, {_name(path): leaf for path, leaf in jax.tree.leaves_with_path(target)})


def read_named(directory: Path, wanted: Mapping[str, Any]) -> Iterator[tuple[str, jax.Array]]:
    """Yield some arrays of a saved tree of any containers, with their paths; one array at a time is read.

    Args:
      wanted: `jax.ShapeDtypeStruct`s with shardings by path, such as `0.mu.layers.mlp.up`.
    """
    handler = ocp.PyTreeCheckpointHandler()
    tree = handler.metadata(epath.Path(directory)).tree
    for name, shape in wanted.items():
        part = jax.tree.map_with_path(
            lambda path, _, name=name, shape=shape: shape if _name(path) == name else ocp.PLACEHOLDER, tree
        )
        read = ocp.checkpoint_utils.construct_restore_args(shape)
        options = jax.tree.map(lambda leaf, read=read: ocp.RestoreArgs() if leaf is ocp.PLACEHOLDER else read, part)
        args = ocp.args.PyTreeRestore(item=part, restore_args=options)
        restored = handler.restore(epath.Path(directory), args=args)
        (array,) = (leaf for leaf in jax.tree.leaves(restored) if isinstance(leaf, jax.Array))
        yield name, array


def _name(path: tuple[Any, ...]) -> str:
    return jax.tree_util.keystr(path, simple=True, separator=".")


def stored_shapes(directory: Path) -> dict[str, jax.ShapeDtypeStruct]:
    """Return shape and dtype of every array of a saved tree, by its path; no array is read.

    Raises:
      Refusal: There is no readable tree.
    """
    try:
        if damage := special_file(directory):
            raise OSError(damage)
        tree = ocp.PyTreeCheckpointHandler().metadata(epath.Path(directory)).tree
    except (ValueError, OSError, KeyError) as error:
        raise Refusal(f"{directory} holds no readable arrays ({error}); write the checkpoint again") from error
    return {
        _name(path): jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }

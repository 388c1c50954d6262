"""Checkpoints of a run, managed by one process that does not need to hold any of their arrays.

A checkpoint is a directory `step_N` of named trees of arrays (each role's parameters and optimizer state as separate
items) and one JSON item with the rest (step, data position, algorithm state, metric). Saves are asynchronous and
atomic: a directory under its final name is complete. Every item has checksums of its files, which are compared before
the item is read. Orbax's own files have no checksums, and nothing depends on what they say.
"""

import asyncio
import json
import math
import secrets
import zlib
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import jax
import orbax.checkpoint as ocp
from orbax.checkpoint import checkpoint_managers, handlers

from jaxrlhf.checkpoint.damage import Damaged
from jaxrlhf.checkpoint.items import Item, TreeItem, read_each
from jaxrlhf.checkpoint.ranking import KeepBest, unchecked_metric
from jaxrlhf.config import Refusal
from jaxrlhf.config.refusal import reason_of
from jaxrlhf.runtime.checksums import FILE, damage_of, special_file, write_checksums
from jaxrlhf.tracking import say

_PREFIX = "step"
_UNCHECKED = {"state", "arrays"}
"""Keys of a JSON state of an earlier version, which wrote no checksums."""


@dataclass
class _ItemArgs(ocp.args.CheckpointArgs):
    """Arguments that orbax passes to `_ItemHandler`, for saving and restoring; the id is that of the checkpoint."""

    item: Item
    saved_as: str = ""


class _ItemWrite(ocp.future.Future):
    """Write of one item in the background; orbax waits for its result while training continues.

    Args:
      directory: Folder of the item's files.
      writing: Items that are being written; this item is removed when done.
    """

    def __init__(self, args: _ItemArgs, directory: Path, writing: list[Item]) -> None:
        self._item, self._saved_as, self._directory, self._writing = args.item, args.saved_as, directory, writing

    def result(self, timeout: float | None = None) -> None:
        del timeout  # orbax checks the time afterwards; an item has its own limit for hosts that do not answer
        try:
            self._item.finish()
        finally:
            self._writing.remove(self._item)
        self._item.merge()
        write_checksums(self._directory, owner=self._saved_as)


class _ItemHandler(handlers.AsyncCheckpointHandler):
    """Handler that lets items write themselves into the checkpoint directories that orbax creates and completes."""

    def __init__(self) -> None:
        # Orbax calls from an event loop, in which an item cannot run its own event loop.
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="save_items")
        self._writing: list[Item] = []

    async def async_save(self, directory: Path, args: _ItemArgs) -> list[ocp.future.Future]:
        self._writing.append(args.item)
        await asyncio.get_running_loop().run_in_executor(self._thread, args.item.save, Path(directory))
        return [_ItemWrite(args, Path(directory), self._writing)]

    def save(self, directory: Path, args: _ItemArgs) -> None:
        args.item.save(Path(directory))
        _ItemWrite(args, Path(directory), [args.item]).result()

    def finish_after(self, failure: Exception) -> None:
        """Wait until no item is being written, after one failed; further errors are added to the failure as notes."""
        while self._writing:
            try:
                self._thread.submit(self._writing.pop().finish).result()
            except Exception as another:
                failure.add_note(f"another item failed too: {another!r}")

    def restore(self, directory: Path, args: _ItemArgs) -> None:
        args.item.restore(Path(directory))

    def close(self) -> None:
        self._thread.shutdown()

    @classmethod
    def typestr(cls) -> str:
        """Return the handler name stored in checkpoints: items write orbax's standard trees."""
        return handlers.StandardCheckpointHandler.typestr()


def _checksum(contents: Mapping[str, Any]) -> int:
    """Return the checksum of the JSON state, without the field `checksum` itself."""
    plain = json.loads(json.dumps({name: value for name, value in contents.items() if name != "checksum"}))
    return zlib.crc32(json.dumps(plain, sort_keys=True).encode())


@contextmanager
def _path_in_errors(place: Path) -> Iterator[None]:
    """Add the path being read to errors raised in the block; errors of libraries do not name it."""
    try:
        yield
    except Exception as error:
        error.add_note(
            f"raised while reading {place}; if a file there is damaged, delete its checkpoint and resume from "
            "the previous one"
        )
        raise


class Checkpoints:
    """Checkpoints of one run.

    Args:
      directory: Directory of the checkpoints, created if absent. All hosts that hold arrays have to see it.
      keep_last: Number of newest checkpoints kept.
      keep_best: Number of checkpoints with the highest metric, kept in addition.
      read_only: True changes nothing. A reader must not clean up: apparent leftovers may be a save in progress.
      on_damage: What `pass_over` does with a damaged checkpoint; see `config.Checkpointing`.

    Raises:
      Damaged: The metric of a checkpoint cannot be read, and the checkpoint was not passed over. A reader needs none.
    """

    def __init__(
        self,
        directory: Path,
        *,
        keep_last: int = 2,
        keep_best: int = 0,
        read_only: bool = False,
        on_damage: Literal["stop", "previous"] = "stop",
    ) -> None:
        self.directory = directory.absolute()
        self._on_damage = on_damage
        self._metrics: dict[int, float] = {}
        policies = [checkpoint_managers.LatestN(n=keep_last), KeepBest(keep_best, self._metrics)]
        self._options = ocp.CheckpointManagerOptions(
            preservation_policy=checkpoint_managers.AnyPreservationPolicy(policies),
            lightweight_initialize=True,  # reads none of orbax's own files
            # Orbax's own `read_only` is these two options, a ban on saves, and two warnings.
            cleanup_tmp_directories=not read_only,
            create=not read_only,
            step_prefix=_PREFIX,
            # Items are written by processes that cannot be notified when directories appear.
            async_options=ocp.AsyncOptions(create_directories_asynchronously=False),
        )
        self._open()
        if not read_only:
            try:
                self._rank()
            except Damaged:
                self._manager.close()
                raise

    def _open(self) -> None:
        registry = handlers.DefaultCheckpointHandlerRegistry()
        self._handler = _ItemHandler()
        registry.add(None, _ItemArgs, self._handler)
        self._manager = ocp.CheckpointManager(self.directory, options=self._options, handler_registry=registry)

    def _rank(self) -> None:
        """Read the metrics of all checkpoints, which decide what a save deletes."""
        for step in self.steps():
            try:
                metric = self._metric(step)
            except Damaged as damage:
                self.pass_over(step, damage)
                continue
            if metric is not None:
                self._metrics[step] = metric

    def latest(self) -> int | None:
        """Return the step of the newest complete checkpoint."""
        return self._manager.latest_step()

    def steps(self) -> list[int]:
        """Return the steps of all complete checkpoints, oldest first."""
        return sorted(self._manager.all_steps())

    def folder(self, step: int, item: str) -> Path:
        """Return the folder of one item of a checkpoint, for `TreeItem.restore`."""
        return self._checkpoint(step) / item

    def checked_folder(self, step: int, item: str) -> Path:
        """Return the folder of one item of a checkpoint, after a comparison of its files with their checksums.

        Raises:
          Damaged: A file is not what was saved.
        """
        folder, saved = self.folder(step, item), self._host_state(step)
        if (damage := damage_of(folder, checked="checksum" in saved, owner=saved.get("id", ""))) is not None:
            raise self._damaged(step, damage)
        return folder

    def holds(self, step: int) -> set[str]:
        """Return the names of the items of a checkpoint.

        Raises:
          Damaged: The JSON state is not what was saved.
        """
        return {*self._host_state(step)["arrays"]}

    def state(self, step: int) -> dict[str, Any]:
        """Return the JSON state that `save` was given.

        Raises:
          Damaged: The JSON state is not what was saved.
        """
        return self._host_state(step)["state"]

    def pass_over(self, step: int, damage: Damaged) -> None:
        """Set a damaged checkpoint aside and say so, if a run may resume from another one.

        Raises:
          Damaged: `on_damage` is `stop`, or there is no other checkpoint.
        """
        if self._on_damage == "stop" or self.steps() == [step]:
            raise damage
        say(f"{damage}\nmoved the checkpoint to {self.set_aside(step)}")

    def set_aside(self, step: int) -> Path:
        """Move a checkpoint to a folder next to the checkpoints, so that the step can be saved again."""
        aside = self.directory.with_name(f"{self.directory.name}_damaged") / f"{_PREFIX}_{step}"
        while aside.exists():
            aside = aside.with_name(f"{aside.name}_again")
        aside.parent.mkdir(exist_ok=True)
        self._manager.close()
        self._checkpoint(step).rename(aside)
        self._metrics.pop(step, None)
        self._open()  # the manager's `reload` would read orbax's own files
        return aside

    def save(
        self, step: int, items: Mapping[str, Item], host: Mapping[str, Any], *, metric: float | None = None
    ) -> None:
        """Start saving; return once the arrays may be overwritten.

        Later failures are raised by the next `save`, `wait` or `close`; earlier checkpoints are unchanged then.

        Args:
          items: Arrays by name.
          host: JSON-able state.
          metric: Metric that ranks the checkpoint for `keep_best`; without a metric, or with NaN, it is not ranked.
        """
        metric = None if metric is None or math.isnan(metric) else metric
        contents: dict[str, Any] = {
            "state": dict(host),
            "arrays": {name: item.describe() for name, item in items.items()},
            "metric": metric,
            "id": secrets.token_hex(8),  # the items have it, too
        }
        contents["checksum"] = _checksum(contents)
        self._metrics.pop(step, None)
        if metric is not None:
            self._metrics[step] = metric
        args = {name: _ItemArgs(item, contents["id"]) for name, item in items.items()}
        with self._reconciled():
            self._manager.save(step, args=ocp.args.Composite(**args, host=ocp.args.JsonSave(contents)), force=True)

    def restore(self, step: int, items: Mapping[str, Item]) -> dict[str, Any]:
        """Read arrays into the items, each in its current shapes, dtypes and layouts; return the JSON state.

        Raises:
          Refusal: An item is missing, or a stored array has another shape or dtype than the item (orbax would cast
            silently), or a file is damaged (`Damaged`). No array is changed then.
        """
        contents = self._host_state(step)
        for name, item in items.items():
            self._check(name, step, contents["arrays"], item.describe())
        for name in items:
            self.checked_folder(step, name)
        for name, item in items.items():
            with _path_in_errors(self.folder(step, name)):
                self._manager.restore(step, args=ocp.args.Composite(**{name: _ItemArgs(item)}))
        return contents["state"]

    def read(self, step: int, targets: Mapping[str, Any]) -> dict[str, Any]:
        """Return the named trees, read into this process.

        Args:
          targets: `jax.ShapeDtypeStruct`s with shardings, by item name.

        Raises:
          Refusal: The checkpoint does not exist or does not fit; see `restore`.
        """
        trees: dict[str, Any] = {}
        items = {
            name: TreeItem(partial(targets.__getitem__, name), partial(trees.__setitem__, name)) for name in targets
        }
        self.restore(step, items)
        return trees

    def read_each(self, step: int, name: str, target: Any) -> Iterator[tuple[str, jax.Array]]:
        """Yield the arrays of one named tree with their paths; arrays are read one at a time. See `read`.

        Raises:
          Refusal: The checkpoint does not exist or does not fit; see `restore`.
        """
        contents = self._host_state(step)
        self._check(name, step, contents["arrays"], TreeItem(lambda: target, lambda tree: None).describe())
        return read_each(self.checked_folder(step, name), target)

    def _metric(self, step: int) -> float | None:
        """Return the metric that ranks a saved checkpoint; None if it has none."""
        contents = self._host_state(step)
        return contents["metric"] if "metric" in contents else unchecked_metric(self._checkpoint(step))

    def _host_state(self, step: int) -> dict[str, Any]:
        """Return the state that `save` wrote with the arrays, the arrays' dtypes and shapes, and the metric."""
        place = self.folder(step, "host") / "metadata"
        if (damage := special_file(self._checkpoint(step))) is not None:
            raise self._damaged(step, damage)
        try:
            contents = self._manager.restore(step, args=ocp.args.Composite(host=ocp.args.JsonRestore()))["host"]
            if "checksum" in contents:
                whole = contents["checksum"] == _checksum(contents)
            else:
                whole = contents.keys() == _UNCHECKED and not any(self._checkpoint(step).glob(f"*/{FILE}"))
            for part in (contents["state"], contents["arrays"], *contents["arrays"].values()):
                dict(**part)  # an error unless it is a dict
        except (ValueError, KeyError, TypeError, AttributeError, OSError, RecursionError) as error:
            raise self._damaged(step, f"{place} cannot be read: {reason_of(error)}") from error
        if not whole:
            raise self._damaged(step, f"{place} has a wrong checksum, so its contents changed after saving")
        return contents

    def _checkpoint(self, step: int) -> Path:
        return self.directory / f"{_PREFIX}_{step}"

    def _damaged(self, step: int, damage: str) -> Damaged:
        others = [other for other in self.steps() if other != step]
        there = f"other checkpoints: steps {', '.join(map(str, others))}" if others else "no other checkpoints"
        if not others:
            advice = ". Restore the checkpoint from a copy, or choose another workdir to start again"
        elif self._on_damage == "stop":
            advice = (
                ". To resume a run from the previous checkpoint, set checkpoint.on_damage='previous'; to read another "
                "step, pass --step"
            )
        else:
            advice = ""
        return Damaged(f"the checkpoint of step {step} is damaged: {damage}; {there}{advice}")

    def _check(self, name: str, step: int, arrays: Mapping[str, dict[str, str]], wanted: Mapping[str, str]) -> None:
        place = f"{self.directory} step {step}"
        if name not in arrays:
            raise Refusal(
                f"{place} has no {name!r}; it holds {sorted(arrays)}. Resume with the algorithm that wrote the "
                "checkpoint, or choose another workdir"
            )
        stored = arrays[name]
        for key in sorted(stored.keys() | wanted.keys()):
            if stored.get(key) != wanted.get(key):
                wrote = "optimizer" if name.endswith("_optimizer") else "model"
                raise Refusal(
                    f"{place}: {name}{key} is {stored.get(key, 'absent')}, but this run expects "
                    f"{wanted.get(key, 'none')}; resume with the original {wrote}, or choose another workdir"
                )

    @contextmanager
    def _reconciled(self) -> Iterator[None]:
        """Wait for all writes after a failure in the block, and read the known steps from the directory again.

        When a save starts, orbax already counts its step as saved, and the steps that it will replace as deleted.
        """
        try:
            yield
        except Exception as failure:
            self._handler.finish_after(failure)
            self._manager.reload()
            raise

    def wait(self) -> None:
        """Block until every started save is complete."""
        with self._reconciled():
            self._manager.wait_until_finished()

    def close(self) -> None:
        """Finish pending saves and release the directory."""
        try:
            self.wait()
        finally:
            self._manager.close()

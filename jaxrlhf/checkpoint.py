"""Saving and restoring everything a run is, with orbax.

One checkpoint holds named trees of arrays (each role's parameters and optimizer state as
separate items) and one JSON item with the rest (step, data position, algorithm state).
Saves are asynchronous and atomic: a directory under its final name is complete.
"""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp
from orbax.checkpoint import checkpoint_managers

_METRIC = "score"


def _rank(metrics: Mapping[str, float]) -> float:
    return metrics.get(_METRIC, -math.inf)


class _Best(checkpoint_managers.PreservationPolicy):
    """Keeps the checkpoints with the highest metric, never one without."""

    def __init__(self, count: int) -> None:
        self._count = count

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> list[bool]:
        measured = [checkpoint for checkpoint in checkpoints if checkpoint.metrics]
        best = sorted(measured, key=lambda checkpoint: _rank(checkpoint.metrics), reverse=True)[: self._count]
        return [checkpoint in best for checkpoint in checkpoints]


class Checkpoints:
    """The checkpoints of one run.

    Args:
      directory: Where they are; made if absent.
      keep_last: Newest checkpoints kept.
      keep_best: Checkpoints with the highest metric kept beside them.
      read_only: Only look. A reader must not clean up: what looks left over may be a save under way.
    """

    def __init__(self, directory: Path, *, keep_last: int = 2, keep_best: int = 0, read_only: bool = False) -> None:
        policies = [checkpoint_managers.LatestN(n=keep_last), _Best(keep_best)]
        options = ocp.CheckpointManagerOptions(
            preservation_policy=checkpoint_managers.AnyPreservationPolicy(policies),
            # Orbax writes metrics down, and so knows them after a resume, only if it is given a way to rank them.
            best_fn=_rank,
            cleanup_tmp_directories=not read_only,
            create=not read_only,
            read_only=read_only,
            step_prefix="step",
        )
        self.directory = directory.absolute()
        self._manager = ocp.CheckpointManager(self.directory, options=options)

    def latest(self) -> int | None:
        """Step of the newest complete checkpoint."""
        return self._manager.latest_step()

    def steps(self) -> list[int]:
        """Steps of all complete checkpoints, oldest first."""
        return sorted(self._manager.all_steps())

    def save(
        self, step: int, trees: Mapping[str, Any], host: Mapping[str, Any], *, metric: float | None = None
    ) -> None:
        """Start saving; returns once the arrays may be overwritten.

        Args:
          step: Number of finished steps.
          trees: Arrays by item name.
          host: JSON-able state.
          metric: Ranks the checkpoint for `keep_best`; without one, or with NaN, it is not among the best.
        """
        items: dict[str, Any] = {name: ocp.args.StandardSave(tree) for name, tree in trees.items()}
        contents = {"state": dict(host), "arrays": {name: _describe(tree) for name, tree in trees.items()}}
        items["host"] = ocp.args.JsonSave(contents)
        metrics = {} if metric is None or math.isnan(metric) else {_METRIC: metric}
        self._manager.save(step, args=ocp.args.Composite(**items), metrics=metrics, force=True)

    def restore(self, step: int, targets: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """The named trees, each in the shapes, dtypes and shardings of its target, and the JSON state.

        Raises:
          ValueError: A tree is missing, or a stored array has another shape or dtype than
            its target (orbax would cast in silence).
        """
        contents = self._manager.restore(step, args=ocp.args.Composite(host=ocp.args.JsonRestore()))["host"]
        for name, target in targets.items():
            self._check(name, step, contents["arrays"], target)
        items = {name: ocp.args.StandardRestore(target) for name, target in targets.items()}
        restored = self._manager.restore(step, args=ocp.args.Composite(**items)) if items else {}
        return {name: restored[name] for name in targets}, contents["state"]

    def _check(self, name: str, step: int, arrays: Mapping[str, dict[str, str]], target: Any) -> None:
        place = f"{self.directory} step {step}"
        if name not in arrays:
            raise ValueError(
                f"{place} has no {name!r}; it holds {sorted(arrays)}. "
                f"Resume with the algorithm that wrote it, or choose another workdir"
            )
        stored, wanted = arrays[name], _describe(target)
        for key in sorted(stored.keys() | wanted.keys()):
            if stored.get(key) != wanted.get(key):
                raise ValueError(
                    f"{place}: {name}{key} is {stored.get(key, 'absent')}, this run needs "
                    f"{wanted.get(key, 'none')}; resume with the model that wrote it, or choose another workdir"
                )

    def wait(self) -> None:
        """Block until every started save is complete."""
        self._manager.wait_until_finished()

    def close(self) -> None:
        """Finish pending saves and let go of the directory."""
        self._manager.wait_until_finished()
        self._manager.close()


def _describe(tree: Any) -> dict[str, str]:
    """Dtype and shape of every array of a tree, by its path."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path): f"{leaf.dtype}{list(leaf.shape)}" for path, leaf in leaves}

"""Saving and restoring everything a run is, with orbax.

One checkpoint holds named trees of arrays (each role's parameters and optimizer state as
separate items) and one JSON item with the rest (step, data position, algorithm state).
Saves are asynchronous and atomic: a directory under its final name is complete.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp
from orbax.checkpoint import checkpoint_managers

_METRIC = "score"


class Checkpoints:
    """The checkpoints of one run.

    Args:
      directory: Where they are; made if absent.
      keep_last: Newest checkpoints kept.
      keep_best: Checkpoints with the highest metric kept beside them.
    """

    def __init__(self, directory: Path, *, keep_last: int = 2, keep_best: int = 0) -> None:
        policies: list[Any] = [checkpoint_managers.LatestN(n=keep_last)]
        if keep_best:
            policies.append(
                checkpoint_managers.BestN(
                    get_metric_fn=lambda metrics: metrics[_METRIC], n=keep_best, keep_checkpoints_without_metrics=False
                )
            )
        options = ocp.CheckpointManagerOptions(
            preservation_policy=checkpoint_managers.AnyPreservationPolicy(policies),
            cleanup_tmp_directories=True,
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
          metric: Ranks the checkpoint for `keep_best`.
        """
        items: dict[str, Any] = {name: ocp.args.StandardSave(tree) for name, tree in trees.items()}
        contents = {"state": dict(host), "arrays": {name: _describe(tree) for name, tree in trees.items()}}
        items["host"] = ocp.args.JsonSave(contents)
        metrics = None if metric is None else {_METRIC: metric}
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

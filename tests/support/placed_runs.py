"""Tiny runs on devices of every number and layout, and the check that they give the same numbers."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tiny_runs import get_config, numbers, records, training

import jaxrlhf
from jaxrlhf.config import Checkpointing, Config, Evaluation, Pool

TOLERANCE = 2e-6
"""Relative, and absolute for what is near 0: a few units in float32's last place of sums that other layouts
add up in another order. Observed: 1e-7 on losses, 6e-7 on an entropy of 5.6."""

SPLIT = (Pool("policy", 4, ("actor", "reference")), Pool("value", 4, ("critic", "reward")))
APART = (Pool("policy", 4, ("actor", "reference", "critic")), Pool("generation", 4, ("rollout", "reward")))


def pools_of(policy: int, value: int, generation: int) -> tuple[Pool, ...]:
    """A pool each, of so many devices."""
    return (
        Pool("policy", policy, ("actor", "reference")),
        Pool("value", value, ("critic", "reward")),
        Pool("generation", generation, ("rollout",)),
    )


def placed(
    workdir: Path, *, actor: dict[str, int] | None = None, critic: dict[str, int] | None = None, **settings: Any
) -> Config:
    """PPO without a cold start, saved after every step and evaluated at both ends.

    Args:
      actor: Its layout; `critic` likewise.
    """
    config = get_config()
    common = {
        "algorithm": replace(config.algorithm, critic=training(**(critic or {}))),
        "steps": 2,
        "cold_start": None,
        "evaluation": Evaluation(every_steps=0, problems=16),
        "checkpoint": Checkpointing(every_steps=1, keep_last=3, keep_best=0),
    }
    settings = common | {"devices": None if "pools" in settings else 1} | settings
    return replace(config, workdir=str(workdir), actor=training(**(actor or {})), **settings)


def run(workdir: Path, **placement: Any) -> Path:
    """Run `placed(workdir, **placement)`."""
    jaxrlhf.run(placed(workdir, **placement))
    return workdir


def assert_same_numbers(workdir: Path, expected: Path) -> None:
    """Assert that responses and scores are equal, and that metrics differ by rounding alone."""
    for name in ("samples.jsonl", "evaluation.jsonl"):
        mine, theirs = records(workdir / name), records(expected / name)
        # A draw depends on the request alone. One that falls on the very edge between two tokens could go
        # either way by rounding; with this seed none does.
        assert [sample["response"] for sample in mine] == [sample["response"] for sample in theirs]
        assert [sample["score"] for sample in mine] == [sample["score"] for sample in theirs]
    mine, theirs = numbers(workdir / "metrics.jsonl"), numbers(expected / "metrics.jsonl")
    assert len(mine) == len(theirs) > 0
    for record, reference in zip(mine, theirs, strict=True):
        assert record.keys() == reference.keys()
        assert record["sampler/logp_gap_max"] <= 1e-5
        for name in (name for name in record if not name.startswith("sampler/")):  # those are rounding alone
            assert record[name] == pytest.approx(reference[name], rel=TOLERANCE, abs=TOLERANCE), name


def cut_after(last: int, workdir: Path, copy: Path) -> Path:
    """Copy a finished run without the checkpoints of later steps, as if it had been killed then; return the copy."""
    shutil.copytree(workdir, copy)
    for folder in (copy / "checkpoints").glob("step_*"):
        if int(folder.name.removeprefix("step_")) > last:
            shutil.rmtree(folder)
    return copy


def assert_resumed(workdir: Path, whole: Path, *, after: int, without: tuple[str, ...] = ()) -> None:
    """The bits of a whole run, though all steps after the given one were made anew: they took other times.

    Args:
      without: Prefixes of metrics that timings decide, or that are rounded in another order in every run.
    """
    files = [run / "metrics.jsonl" for run in (workdir, whole)]
    for both in zip(*map(numbers, files), strict=True):
        mine, theirs = ({name: each[name] for name in each if not name.startswith(without)} for each in both)
        assert mine == theirs
    resumed, once = ([step["time/step_s"] for step in records(file)] for file in files)
    assert resumed[:after] == once[:after]
    assert not {*resumed[after:]} & {*once[after:]}


@contextmanager
def compiled_once(directory: Path) -> Iterator[None]:
    """Within the block programs that were compiled before, here or in a host process, are loaded from disk."""
    import jax
    from jax.experimental.compilation_cache import compilation_cache

    assert directory.is_dir(), "a fixture of a test file has the name of the folder's: compiled"
    settings = {
        "jax_enable_compilation_cache": True,
        "jax_compilation_cache_dir": str(directory),
        "jax_persistent_cache_min_compile_time_secs": 0.0,
        "jax_persistent_cache_min_entry_size_bytes": 0,
    }
    before = {name: getattr(jax.config, name) for name in settings}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in settings.items():
            patch.setitem(os.environ, name.upper(), str(value))
            jax.config.update(name, value)
        compilation_cache.reset_cache()
        try:
            yield
        finally:
            for name, value in before.items():
                jax.config.update(name, value)
            compilation_cache.reset_cache()

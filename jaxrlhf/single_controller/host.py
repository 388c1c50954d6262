"""Host: the workers of one process of a pool, and the calls to them.

A local pool is one host in the controller's process. On a cluster, a pool has one host in each of several processes;
these run the same calls together as one SPMD program.
"""

import gc
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from jaxrlhf.batching.transfer_protocol import RankCoordinates, loaded
from jaxrlhf.checkpoint import Item
from jaxrlhf.engine import Engine
from jaxrlhf.runtime.free_memory import return_after_compiling, return_free_memory
from jaxrlhf.tracking import CompileCounter, DevicePeak, peak_memory_bytes
from jaxrlhf.workers.build import Builder, Phase
from jaxrlhf.workers.model import Metrics
from jaxrlhf.workers.summary import SummaryRow, pool_rows


@dataclass(frozen=True)
class Built:
    """Summary of a host's workers for the controller.

    Attributes:
      places: Coordinates of the process in each role's group.
      items: Names of the checkpoint items that the host can save.
    """

    places: Mapping[str, RankCoordinates]
    items: tuple[str, ...]


class Host:
    """Workers of one process."""

    def __init__(self, builder: Builder) -> None:
        self.builder, self.progress = builder, builder.progress
        self.workers: dict[str, Any] = {}
        self._items: dict[str, Item] = {}
        self._peaks: dict[str, int] = {}
        return_after_compiling()
        self._compiled = CompileCounter()

    def rows(self) -> list[SummaryRow]:
        """Return this pool's rows of the table of derived settings.

        Raises:
          Refusal: The pool cannot hold a layout or a token budget.
        """
        return pool_rows(self.builder)

    def build(self, phase: Phase) -> Built:
        """Build the workers of a phase; the workers of the previous phase are dropped."""
        self.workers, self._items = {}, {}
        gc.collect()  # a worker and its compiled programs refer to each other
        self.workers = self.builder.workers(phase)
        places = {role: worker.place for role, worker in self.workers.items()}
        self._items = {name: item for worker in self._stateful() for name, item in worker.items().items()}
        return Built(places, tuple(self._items))

    def call(self, role: str, method: str, args: tuple[object, ...], kwargs: Mapping[str, object]) -> object:
        """Run a worker method on this process's part of the arguments."""
        worker, builder = self.workers[role], self.builder
        function = getattr(worker, method)
        named = {name: loaded(value) for name, value in kwargs.items()}
        parts = tuple(map(loaded, function.protocol.distribute(args, worker.place)))
        with jax.profiler.TraceAnnotation(f"{role}.{method}"):
            if role == "reward" and not builder.config.rewards.by_model:  # it uses no device
                return function(*parts, **named)
            with DevicePeak(builder.on.pool.devices) as peak:
                result = function(*parts, **named)
        self._peaks[method] = max(self._peaks.get(method, 0), peak.bytes)
        if builder.on.pool.devices[0].platform == "cpu":  # accelerators have their own memory
            return_free_memory()
        return result

    def lowered(self) -> dict[str, jax.stages.Lowered]:
        """Return the programs that were lowered instead of run, for described devices; names are `role.program`."""
        lowered: dict[str, jax.stages.Lowered] = {}
        if self.builder.sampler is not None:
            engine = self.builder.sampler.engine
            programs = engine.compiled.lowered if isinstance(engine, Engine) else {}
            lowered |= {f"generation.{name}": program for name, program in programs.items()}
        for role, worker in self.workers.items():
            lowered |= {f"{role}.{name}": program for name, program in getattr(worker, "lowered", {}).items()}
        return lowered

    def start_trace(self, folder: Path) -> None:
        """Start the profiler for this process and its devices; several processes write to separate subfolders."""
        options = jax.profiler.ProfileOptions()
        options.python_tracer_level = 0  # events of every Python call would make the trace many times larger
        folder = folder / str(jax.process_index()) if jax.process_count() > 1 else folder
        jax.profiler.start_trace(folder, profiler_options=options)

    def stop_trace(self) -> None:
        """Stop the profiler and write the trace."""
        jax.profiler.stop_trace()

    def take_metrics(self) -> tuple[Metrics, dict[str, int]]:
        """Return the workers' metrics since the last call, and the peak device bytes of each worker method."""
        peaks, self._peaks = self._peaks, {}
        metrics = {
            "compile/count": float(self._compiled.count),
            "compile/loaded": float(self._compiled.loaded),
            "compile/seconds": self._compiled.seconds,
            "memory/peak_bytes": float(peak_memory_bytes()),
        }
        for worker in self.workers.values():
            metrics |= worker.take_metrics() if hasattr(worker, "take_metrics") else {}
        return metrics, peaks

    def counters(self) -> dict[str, int]:
        """Return the counters for a checkpoint: updates so far, the policy's version, and padded sizes for images."""
        return {name: count for worker in self._stateful() for name, count in worker.counters().items()}

    def set_counters(self, counters: Mapping[str, int]) -> None:
        """Continue from a checkpoint's counters."""
        for worker in self._stateful():
            worker.set_counters(counters)

    def _stateful(self) -> list[Any]:
        """Return the workers with state in a checkpoint."""
        return [worker for worker in self.workers.values() if hasattr(worker, "counters")]

    def item(self, name: str, method: str, *args: Any) -> Any:
        """Call a method of one checkpoint `Item`."""
        return getattr(self._items[name], method)(*args)

    def close(self) -> None:
        """End the reward workers and the compile counter."""
        self._compiled.close()
        self.builder.close()

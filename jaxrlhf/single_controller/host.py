"""One process's share of a pool: its workers, and the calls that reach them.

A pool on this machine is one host in this process; on a cluster it is one host in each of
several processes, which run the same calls together as one program.
"""

import gc
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
from transformers import PreTrainedTokenizerBase

from jaxrlhf.batching.transfer_protocol import Place
from jaxrlhf.checkpoint import Item
from jaxrlhf.config import Config
from jaxrlhf.runtime.free_memory import return_after_compiling, return_free_memory
from jaxrlhf.sharding.pool import ResourcePool
from jaxrlhf.single_controller.group import Remote
from jaxrlhf.tracking import CompileCounter, DevicePeak, peak_memory_bytes
from jaxrlhf.workers.build import Builder, Stage
from jaxrlhf.workers.model import Metrics, Progress
from jaxrlhf.workers.sampler import Ends
from jaxrlhf.workers.summary import Row, pool_rows


@dataclass(frozen=True)
class Built:
    """What the controller has to know of a host's workers.

    Attributes:
      places: Of the process in each role's group.
      items: What it can save, by role.
    """

    places: Mapping[str, Place]
    items: tuple[str, ...]


class Host:
    """The workers of one process.

    Args:
      roles: Placed on the pool in any stage of the run.
      rank: Of this process in the pool, and the number of them.
      progress: Told how far long calls are.
      ends: Shared by the hosts of this process.
    """

    def __init__(
        self,
        config: Config,
        tokenizer: PreTrainedTokenizerBase,
        pool: ResourcePool,
        roles: tuple[str, ...],
        *,
        rank: tuple[int, int] = (0, 1),
        progress: Progress,
        reward_output: Path | None = None,
        address: str = "127.0.0.1",
        ends: Ends | None = None,
    ) -> None:
        self.pool, self.progress, self._roles = pool, progress, roles
        self.builder = Builder(
            config,
            tokenizer,
            pool,
            roles,
            rank=rank,
            progress=progress,
            reward_output=reward_output,
            address=address,
            ends=ends,
        )
        self._workers: dict[str, Any] = {}
        self._items: dict[str, Item] = {}
        self._peaks: dict[str, int] = {}
        return_after_compiling()
        self._compiled = CompileCounter()

    def rows(self) -> list[Row]:
        """What the configuration comes down to on this pool.

        Raises:
          Refusal: A layout or a token budget that the pool cannot hold.
        """
        return pool_rows(self.builder, self._roles)

    def build(self, stage: Stage) -> Built:
        """Make the workers of a stage; those of the stage before are dropped."""
        self._workers, self._items = {}, {}
        gc.unfreeze()
        _set_aside()  # frees those too: a worker and its compiled programs refer to each other
        self._workers = self.builder.workers(stage, [role for role in self._roles if role in stage.roles])
        places = {role: worker.place for role, worker in self._workers.items()}
        self._items = {name: item for worker in self._trained() for name, item in worker.items().items()}
        _set_aside()
        return Built(places, tuple(self._items))

    def call(self, role: str, verb: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Run a verb on this process's part of the arguments."""
        worker = self._workers[role]
        method = getattr(worker, verb)
        args = tuple(_load(arg) for arg in args)
        named = {name: _load(value) for name, value in kwargs.items()}
        args = method.protocol.distribute(args, worker.place)
        with jax.profiler.TraceAnnotation(f"{role}.{verb}"):
            if role == "reward" and not self.builder.config.rewards.by_model:  # it uses no device
                return method(*args, **named)
            with DevicePeak(self.pool.devices) as peak:
                result = method(*args, **named)
        self._peaks[verb] = max(self._peaks.get(verb, 0), peak.bytes)
        if self.pool.devices[0].platform == "cpu":  # others have their arrays in memory of their own
            return_free_memory()
        return result

    def start_trace(self, folder: Path) -> None:
        """Trace what this process and its devices do, into a folder of its own where there are several processes."""
        options = jax.profiler.ProfileOptions()
        options.python_tracer_level = 0  # every Python call would make the host's part many times as long
        own = folder / str(jax.process_index()) if jax.process_count() > 1 else folder
        jax.profiler.start_trace(own, profiler_options=options)

    def stop_trace(self) -> None:
        """Write the trace."""
        jax.profiler.stop_trace()

    def take_metrics(self) -> tuple[Metrics, dict[str, int]]:
        """What the workers measured since the last call, and the peak device bytes of each verb."""
        peaks, self._peaks = self._peaks, {}
        metrics = {
            "compile/count": float(self._compiled.count),
            "compile/loaded": float(self._compiled.loaded),
            "compile/seconds": self._compiled.seconds,
            "memory/peak_bytes": float(peak_memory_bytes()),
        }
        for worker in self._workers.values():
            metrics |= worker.take_metrics() if hasattr(worker, "take_metrics") else {}
        return metrics, peaks

    def counters(self) -> dict[str, int]:
        """Updates made so far, and the policy's version: what a checkpoint holds beside arrays."""
        return {name: count for worker in self._trained() for name, count in worker.counters().items()}

    def set_counters(self, counters: Mapping[str, int]) -> None:
        """Go on from a checkpoint's counters."""
        for worker in self._trained():
            worker.set_counters(counters)

    def _trained(self) -> list[Any]:
        return [worker for worker in self._workers.values() if hasattr(worker, "counters")]

    def item(self, name: str, method: str, *args: Any) -> Any:
        """Call a method of one `Item` of a checkpoint."""
        return getattr(self._items[name], method)(*args)

    def close(self) -> None:
        """End the reward workers."""
        gc.unfreeze()
        self._compiled.close()
        self.builder.close()


def _set_aside() -> None:
    """Collect garbage, and exempt what is left from it: to look at that again would halt a step for 0.2 s at times."""
    gc.collect()
    gc.freeze()


def _load(value: Any) -> Any:
    return value.load() if isinstance(value, Remote) else value

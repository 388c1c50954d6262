"""What the peers' scripts share: flags, a clock for each phase of each step, and the line they print.

It is imported in the peers' own environments, so it needs nothing that only ours has.
"""

import argparse
import contextlib
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import bench_workload as bench

BETA = 0.04
LEARNING_RATE = 1e-6

PREPARE = "prepare"
"""Log-probabilities of the reference, values."""

UPDATE = "update"
"""Forward, backward, clipping, optimizer; of every model that is trained."""


def parse(what: str, *, workload: str) -> argparse.Namespace:
    """Flags of a peer's script; turns off what looks for a network."""
    parser = argparse.ArgumentParser(description=what.splitlines()[0])
    bench.add_flags(parser, workload=workload)
    parser.add_argument("--micro", type=int, default=16, help="sequences of one forward and backward pass")
    parser.add_argument("--warmup", type=int, default=1, help="steps that are not counted")
    parser.add_argument("--steps", type=int, default=3, help="steps that are counted")
    quiet = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    os.environ.update(quiet | {"WANDB_MODE": "disabled", "TRL_EXPERIMENTAL_SILENCE": "1", "JAX_PLATFORMS": "cpu"})
    return parser.parse_args()


def tokenizer_of(workload: bench.Workload) -> Any:
    """End and padding lie past the vocabulary where lengths are forced: no framework can draw them."""
    preset = bench.PRESETS[workload.preset]
    return bench.tokenizer(preset, outside=not preset.ends)


def texts_of(workload: bench.Workload, *, steps: int) -> list[str]:
    """The prompts of all steps."""
    rows = bench.prompts(workload, count=workload.prompts * steps)
    return [" ".join(f"t{token}" for token in row) for row in rows]


def reward_of(response: str) -> float:
    """The reward; an end that was kept in the text is no token of it."""
    words = " ".join(word for word in response.split() if word.startswith("t"))
    return bench.even_share("", words, None, None)


def check_lengths(workload: bench.Workload, lengths: list[int]) -> None:
    """Responses run to their limit unless they end by themselves.

    Raises:
      ValueError: They do not; the figures would be those of another workload.
    """
    wrong = sorted({length for length in lengths if length != workload.new_tokens})
    if wrong and not bench.PRESETS[workload.preset].ends:
        raise ValueError(f"responses of {wrong} tokens where all should have {workload.new_tokens}")


class Phases:
    """Wall seconds of each phase of each step, and how many tokens the step generated."""

    def __init__(self, *, warmup: int, counted: int) -> None:
        self.warmup, self.total, self.steps = warmup, warmup + counted, list[dict[str, float]]()
        self._now: dict[str, float] = {}
        self._start = 0.0
        self._lock = threading.Lock()

    @property
    def finished(self) -> bool:
        return len(self.steps) >= self.total

    def begin(self) -> None:
        """The first step starts."""
        self._start = time.perf_counter()

    def end_step(self) -> None:
        """A step ends, and the next one starts."""
        now = time.perf_counter()
        with self._lock:
            self.steps.append({**self._now, "step": now - self._start})
            self._now, self._start = {}, now
        print(f"step {len(self.steps)}:", json.dumps(self.steps[-1]), file=sys.stderr, flush=True)

    def add(self, name: str, amount: float) -> None:
        """To the current step."""
        with self._lock:
            self._now[name] = self._now.get(name, 0.0) + amount

    @contextlib.contextmanager
    def clock(self, name: str) -> Iterator[None]:
        """What runs inside belongs to the phase."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.add(name, time.perf_counter() - start)

    def watch(
        self,
        owner: Any,
        attribute: str,
        phase: str | Callable[..., str | None],
        *,
        after: Callable[[Any], object] | None = None,
    ) -> None:
        """Clock every call of a function where it is kept.

        Args:
          phase: Its name, or what tells it from the call's arguments; None clocks nothing.
          after: Given the result within the clock: waits for it, checks it.
        """
        call = getattr(owner, attribute)

        def clocked(*args: Any, **named: Any) -> Any:
            name = phase(*args, **named) if callable(phase) else phase
            with self.clock(name) if name else contextlib.nullcontext():
                result = call(*args, **named)
                if after is not None:
                    after(result)
            return result

        setattr(owner, attribute, clocked)

    def generated(self, workload: bench.Workload, lengths: list[int]) -> None:
        """Responses of these lengths were generated."""
        check_lengths(workload, lengths)
        self.add("tokens", sum(lengths))

    def report(self, name: str, workload: str, memory: bench.Memory, packages: tuple[str, ...]) -> None:
        """Print the line: medians over the counted steps."""
        counted = self.steps[self.warmup :]

        def middle(phase: str) -> float:
            return round(median(step.get(phase, 0.0) for step in counted), 4)

        rate = median(step["tokens"] / step["generate"] for step in counted)
        figures = {
            "bench": name,
            "workload": workload,
            **{f"{phase}_s": middle(phase) for phase in ("step", "generate", PREPARE, UPDATE)},
            "generated_tokens": middle("tokens"),
            "generated_tokens_per_s": round(rate, 1),
            "first_step_s": round(self.steps[0]["step"], 2),
            "steps": [round(step["step"], 3) for step in self.steps],
            "peak_rss_mb": round(memory.peak_mb),
            "versions": bench.versions(*packages),
        }
        print(json.dumps(figures), flush=True)

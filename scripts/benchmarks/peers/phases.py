"""Common parts of the peers' scripts: flags, a clock for each phase of each step, and the printed line.

The scripts import this module in the peers' environments, so it imports no package that only our environment has.
"""

import argparse
import contextlib
import json
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import cached_property
from pathlib import Path
from statistics import median
from typing import Any

from scripts.benchmarks import chat_workload as chat
from scripts.benchmarks import workload as bench

WORKLOADS = chat.WORKLOADS | bench.WORKLOADS
BETA = 0.04
LEARNING_RATE = 1e-6

PREPARE = "prepare"
"""Phase that computes log-probabilities of the reference, and values."""

UPDATE = "update"
"""Phase of forward pass, backward pass, clipping and optimizer, for every trained model."""


def parse(what: str, *, workload: str, rows: int | None = None) -> argparse.Namespace:
    """Parse the flags of a peer's script.

    Args:
      rows: Default of `--rows`, for a script that has no steps.
    """
    parser = argparse.ArgumentParser(description=what.splitlines()[0])
    chat.add_flags(parser, workload=workload, choices=WORKLOADS)
    if rows is not None:
        parser.add_argument("--rows", type=int, default=rows, help="records that are read")
    parser.add_argument("--micro", type=int, default=16, help="sequences of one forward and backward pass")
    parser.add_argument("--warmup", type=int, default=1, help="steps that are not counted")
    parser.add_argument("--steps", type=int, default=3, help="steps that are counted")
    return parser.parse_args()


class Task:
    """Workload chosen by flags, with the parts that all frameworks share: weights, tokens, prompts, reward.

    Attributes:
      ends: Whether responses end by themselves.
    """

    def __init__(self, flags: argparse.Namespace) -> None:
        self._flags = flags
        self.workload = bench.workload_of(flags, WORKLOADS)
        self.chat = self.workload.preset == chat.NAME
        self.ends = not self.chat and bench.PRESETS[self.workload.preset].ends

    @cached_property
    def model(self) -> Path:
        """Folder of the checkpoint."""
        if self.chat:
            return self._flags.model or chat.checkpoint(self._flags.models)
        return bench.checkpoint(self.workload.preset, self._flags.models)

    def tokenizer(self) -> Any:
        """Return the tokenizer; where lengths are forced, its end token is past the vocabulary and never sampled."""
        if self.chat:
            return chat.endless_tokenizer(self.model)
        return bench.tokenizer(bench.PRESETS[self.workload.preset], outside=not self.ends)

    def records(self, *, steps: int) -> list[dict[str, Any]]:
        """Return the records of the first steps of a chat workload."""
        file = chat.records_file(self.workload, self._flags.models, self.model)
        return chat.read_records(file, count=self.workload.prompts * steps)

    def texts(self, *, steps: int) -> list[str]:
        """Return the prompts of the first steps."""
        if self.chat:
            return [record["text"] for record in self.records(steps=steps)]
        rows = bench.prompts(self.workload, count=self.workload.prompts * steps)
        return [" ".join(f"t{token}" for token in row) for row in rows]

    def reward(self, response: str) -> float:
        """Return the reward of a response, ignoring an end token in the text."""
        if self.chat:
            return chat.lowercase_share("", response, None, None)
        words = " ".join(word for word in response.split() if word.startswith("t"))
        return bench.even_share("", words, None, None)

    def check_lengths(self, lengths: list[int]) -> None:
        """Refuse responses that are shorter than the limit, unless they end by themselves.

        Raises:
          ValueError: A response is shorter; the figures would belong to another workload.
        """
        wrong = sorted({length for length in lengths if length != self.workload.new_tokens})
        if wrong and not self.ends:
            raise ValueError(f"responses of {wrong} tokens where all should have {self.workload.new_tokens}")


class Phases:
    """Clock of the wall-clock seconds of each phase of each step, and of the generated tokens.

    Attributes:
      ends: Unix time at the end of each step, in seconds.
    """

    def __init__(self, *, warmup: int, counted: int) -> None:
        self.warmup, self.total, self.steps = warmup, warmup + counted, list[dict[str, float]]()
        self.ends: list[float] = []
        self._now: dict[str, float] = {}
        self._start = 0.0
        self._lock = threading.Lock()

    @property
    def finished(self) -> bool:
        return len(self.steps) >= self.total

    def begin(self) -> None:
        """Start the first step."""
        self._start = time.perf_counter()

    def end_step(self) -> None:
        """End a step and start the next step."""
        now = time.perf_counter()
        self.ends.append(time.time())
        with self._lock:
            self.steps.append({**self._now, "step": now - self._start})
            self._now, self._start = {}, now
        print(f"step {len(self.steps)}:", json.dumps(self.steps[-1]), file=sys.stderr, flush=True)

    def add(self, name: str, amount: float) -> None:
        """Add an amount to a figure of the current step."""
        with self._lock:
            self._now[name] = self._now.get(name, 0.0) + amount

    @contextlib.contextmanager
    def clock(self, name: str) -> Iterator[None]:
        """Add the seconds of the block to a phase."""
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
        within: str | None = None,
    ) -> None:
        """Replace an attribute of `owner`, a function, by a function that clocks every call.

        Args:
          phase: Name of the phase, or a function that returns the name from the call's arguments; None clocks nothing.
          after: Function that is called with the result while the clock runs, to wait for the result or check it.
          within: Phase whose clock runs during the call; the seconds of the call are subtracted from this phase.
        """
        call = getattr(owner, attribute)

        def clocked(*args: Any, **named: Any) -> Any:
            name, start = phase(*args, **named) if callable(phase) else phase, time.perf_counter()
            with self.clock(name) if name else contextlib.nullcontext():
                result = call(*args, **named)
                if after is not None:
                    after(result)
            if within is not None:
                self.add(within, start - time.perf_counter())
            return result

        setattr(owner, attribute, clocked)

    def generated(self, task: Task, lengths: list[int]) -> None:
        """Check responses of these lengths and count their tokens."""
        task.check_lengths(lengths)
        self.add("tokens", sum(lengths))

    def report(self, name: str, workload: str, memory: bench.Memory, packages: tuple[str, ...], **further: Any) -> None:
        """Print medians over the counted steps, and further figures, as a line of JSON."""
        counted = self.steps[self.warmup :]

        def middle(phase: str) -> float:
            return round(median(step.get(phase, 0.0) for step in counted), 4)

        generated = {}
        if "generate" in counted[0]:
            rate = median(step["tokens"] / step["generate"] for step in counted)
            generated = {"generated_tokens": middle("tokens"), "generated_tokens_per_s": round(rate, 1)}
        figures = {
            "bench": name,
            "workload": workload,
            **{f"{phase}_s": middle(phase) for phase in ("step", "generate", PREPARE, UPDATE) if phase in counted[0]},
            **generated,
            "first_step_s": round(self.steps[0]["step"], 2),
            "steps": [round(step["step"], 3) for step in self.steps],
            "step_ends": self.ends,
            "peak_rss_mb": round(memory.peak_mb),
            "versions": bench.versions(*packages),
            **further,
        }
        print(json.dumps(figures), flush=True)

"""Report of a run without progress: the calls, what each call waits for, and since when."""

import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self

from jaxrlhf.config import Stall
from jaxrlhf.processes.descendants import descendants, kill
from jaxrlhf.single_controller.group import OpenCall, Timeline

_MAX_INTERVAL_S = 5.0
_STACK_FRAMES = 8
"""Innermost frames of a thread that a report shows."""


class StallWatch:
    """Thread that reports when, for a set time, no call of a phase starts or ends and none makes progress.

    Args:
      task: Returns the current task of the controller, with the number of the step.
      report: Receives the text of a report; the default prints to standard error.
    """

    def __init__(
        self,
        settings: Stall,
        timeline: Timeline,
        task: Callable[[], str],
        *,
        report: Callable[[str], None] = lambda text: print(text, file=sys.stderr, flush=True),
    ) -> None:
        self._settings, self._timeline, self._task, self._report = settings, timeline, task, report
        self._progress_s = time.perf_counter()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="stall watch", daemon=True)

    def beat(self) -> None:
        """Record progress within a call."""
        self._progress_s = time.perf_counter()

    def __enter__(self) -> Self:
        if self._settings.after_s is not None:
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closed.set()

    def _watch(self) -> None:
        after_s = self._settings.after_s
        assert after_s is not None
        reported_s, task, task_s = 0.0, "", 0.0
        while not self._closed.wait(min(_MAX_INTERVAL_S, after_s / 4)):
            if (now := self._task()) != task:
                task, task_s = now, time.perf_counter()
            changed_s = max(self._timeline.changed_s, self._progress_s, task_s)
            still_s = time.perf_counter() - max(changed_s, reported_s)
            if still_s < after_s:
                continue
            reported_s = time.perf_counter()
            self._report(stall_report(reported_s - changed_s, task, self._timeline.open_calls()))
            if self._settings.then == "end":
                kill(descendants(os.getpid(), b""))
                os._exit(1)


def stall_report(still_s: float, task: str, calls: list[OpenCall]) -> str:
    """Return the text of a report: the open calls, processes of the run, and stacks of this process's threads."""
    now = time.perf_counter()
    lines = [f"no progress for {still_s:.0f} s, {task}"]
    for call in calls:
        what = f"waits for {call.waits_for}" if call.state == "waits" else call.state
        lines.append(f"  {call.role}.{call.verb} on {call.lane}: {what}, since {now - call.since_s:.0f} s")
    if not calls:
        lines.append("  no call of a role is running; the controller, or a function that it calls, is waiting")
    for pid in descendants(os.getpid(), b""):
        lines.append(f"  process {pid}: {_command(pid)}")
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    for ident, frame in sys._current_frames().items():
        if ident != threading.get_ident():
            lines.append(f"  thread {names.get(ident, ident)}:")
            frames = traceback.extract_stack(frame)[-_STACK_FRAMES:]
            lines += [f"    {each.filename}:{each.lineno} {each.name}" for each in frames]
    return "\n".join(lines)


def _command(pid: int) -> str:
    """Return state and command line of a process; empty if the process is gone."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        words = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return ""
    return f"state {state}, {words:.100}"

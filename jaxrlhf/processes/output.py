"""Output of user code: counted for each call in its process, and bounded on its way to the log."""

import io
import os
from contextlib import suppress
from typing import Any

MOST_BYTES = 1 << 18
"""Largest number of bytes of one process's output that reach the log, a few thousand lines."""

MOST_READS = 16
"""Largest number of reads of an ended process's output: a process that escaped its end may print without end."""

MOST_LOGGED = 1 << 26
"""Largest size of a log of user code in bytes, so that a run of any length does not fill its disk."""

_FULL = f"\nthis log has {MOST_LOGGED} bytes: further output of user code is not logged\n".encode()
STDOUT, STDERR = 1, 2


class CountedOutput(io.FileIO):
    """Standard output or error stream of this process, which counts the bytes that Python writes.

    Attributes:
      count: Number of bytes since the attribute was last set.
    """

    def __init__(self, descriptor: int) -> None:
        super().__init__(descriptor, "wb", closefd=False)
        self.count = 0

    def write(self, data: Any) -> int:
        """Write bytes to the stream."""
        self.count += memoryview(data).nbytes
        return super().write(data)

    def text(self) -> io.TextIOWrapper:
        """Return the stream as an unbuffered text stream, for `sys.stdout` or `sys.stderr`."""
        return io.TextIOWrapper(self, encoding="utf-8", errors="backslashreplace", write_through=True)


class Log:
    """Log of a run's user code, which takes `MOST_LOGGED` bytes of all processes together.

    Bytes are counted by the size of its file, which fork servers, hosts and resumed runs share. A log that is no
    regular file, such as a terminal, counts what this process has written.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor, self._written, self._full = descriptor, 0, False

    def write(self, text: bytes) -> None:
        """Append a text, or say once that the log is full."""
        with suppress(OSError):  # a full disk must not end the server, and with it all processes
            if max(self._written, os.fstat(self._descriptor).st_size) + len(text) > MOST_LOGGED:
                text = b"" if self._full else _FULL
                self._full = True
            self._written += os.write(self._descriptor, text)

    def close(self) -> None:
        os.close(self._descriptor)


class ProcessOutput:
    """Pipe from a process to the log.

    The pipe also carries what C code and child processes print. The first `MOST_BYTES` bytes are passed on, and the
    rest is counted.

    Attributes:
      inlet: Descriptor that the process writes to.
    """

    def __init__(self, log: Log) -> None:
        self._log = log
        self._outlet, self.inlet = os.pipe()
        os.set_blocking(self._outlet, False)
        self._passed, self._dropped = 0, 0

    def fileno(self) -> int:
        return self._outlet

    def forward(self) -> bool:
        """Pass on the bytes that can be read now, at most 64 KiB; return whether there were any."""
        try:
            data = os.read(self._outlet, 1 << 16)
        except BlockingIOError:
            return False
        passed = data[: MOST_BYTES - self._passed]
        self._log.write(passed)
        if len(passed) < len(data) and not self._dropped:
            self._log.write(b"\nfurther output of this process is not logged\n")
        self._passed += len(passed)
        self._dropped += len(data) - len(passed)
        return bool(data)

    def finish(self, pid: int) -> None:
        """Pass on the last bytes of an ended process, report how many bytes were dropped, and close the pipe."""
        for _ in range(MOST_READS):
            if not self.forward():
                break
        self.close()
        if self._dropped:
            dropped = f"{self._dropped} bytes of its output, after {MOST_BYTES}, were not logged"
            self._log.write(f"process {pid}: {dropped}\n".encode())

    def close(self) -> None:
        os.close(self._outlet)

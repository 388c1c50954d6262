"""HTTP server that runs in a background thread."""

import asyncio
import contextlib
import socket
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

import uvicorn

from jaxrlhf.config import Refusal
from jaxrlhf.processes.connections import ConnectionLimits


class HttpServer:
    """Server of a web application; a context manager that serves during its `with` block.

    Attributes:
      address: Address of the server, such as `http://127.0.0.1:8000`.

    Args:
      port: Port to listen at; 0 selects a free port.
      flags: Command-line flags that set host and port, named in error messages.
      limits: Limits on connections; None has the default limits.

    Raises:
      Refusal: The server cannot listen at the address.
    """

    def __init__(self, *, host: str, port: int, flags: str, limits: ConnectionLimits | None = None) -> None:
        self._limits = limits or ConnectionLimits()
        self._socket = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            self._socket.bind((host, port))
        except (OSError, OverflowError, UnicodeError) as error:  # invalid address, port, or host name
            self._socket.close()
            reason = getattr(error, "strerror", error)
            raise Refusal(f"cannot listen at {host}:{port} ({reason}); choose another {flags}") from error
        shown = f"[{host}]" if ":" in host else host
        self.address = f"http://{shown}:{self._socket.getsockname()[1]}"
        # Events, because before Python 3.13 a Ctrl-C within `Thread.join` marks a running thread as ended.
        self._began, self._ended = threading.Event(), threading.Event()

    def answer_by(
        self, app: Any, *, grace_s: float = 0.0, stop: Callable[[], None] = lambda: None, **options: Any
    ) -> None:
        """Set the ASGI application that answers requests.

        Args:
          grace_s: Seconds that open requests have left when the server stops.
          stop: Callback after these seconds, in the server's thread, that makes the application answer open requests
            at once.
          options: Options of uvicorn.
        """
        self._grace_s, self._stop = grace_s, stop
        # Warnings are one line or more for each invalid request, so clients without a key could fill the disk.
        how: dict[str, Any] = {"log_level": "error", "access_log": False, "lifespan": "off", "ws": "none"}
        config = uvicorn.Config(app, http=self._limits.protocol, **how, **options)
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._serve, name="server", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        self._began.wait()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.should_exit = True
        try:
            self._ended.wait()
        finally:
            self._socket.close()

    def wait(self) -> None:
        """Block until the server ends."""
        while not self._ended.wait(1.0):
            pass

    def _serve(self) -> None:
        async def run() -> None:
            serving = asyncio.ensure_future(self._server.serve(sockets=[self._socket]))
            while not self._server.started and not serving.done():
                await asyncio.sleep(0.01)
            self._began.set()
            stopping = asyncio.ensure_future(self._stop_in_time())
            await serving
            stopping.cancel()

        try:
            with contextlib.suppress(asyncio.CancelledError):
                asyncio.run(run())
        finally:
            self._began.set()
            self._ended.set()

    async def _stop_in_time(self) -> None:
        while not self._server.should_exit:
            await asyncio.sleep(0.05)
        await asyncio.sleep(self._grace_s)
        self._stop()

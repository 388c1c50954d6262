"""HTTP server in a thread of its own."""

import asyncio
import contextlib
import socket
import threading
from types import TracebackType
from typing import Any, Self

import uvicorn

from jaxrlhf.config import Refusal


class HttpServer:
    """Server of a web application; a context manager that serves until it is left.

    Attributes:
      address: Its address, such as `http://127.0.0.1:8000`.

    Args:
      port: Port to listen at; 0 takes a free one.
      flags: Flags that name host and port, for messages.

    Raises:
      Refusal: The address cannot be listened at.
    """

    def __init__(self, *, host: str, port: int, flags: str) -> None:
        self._socket = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            self._socket.bind((host, port))
        except (OSError, OverflowError, UnicodeError) as error:  # no such address, port, or name of a host
            self._socket.close()
            reason = getattr(error, "strerror", error)
            raise Refusal(f"cannot listen at {host}:{port} ({reason}); choose another {flags}") from error
        shown = f"[{host}]" if ":" in host else host
        self.address = f"http://{shown}:{self._socket.getsockname()[1]}"
        self._began = threading.Event()

    def answer_by(self, app: Any, **options: Any) -> None:
        """Have requests answered by an ASGI application; `options` are uvicorn's."""
        config = uvicorn.Config(app, log_level="warning", access_log=False, lifespan="off", **options)
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
        self._thread.join()
        self._socket.close()

    def wait(self) -> None:
        """Wait until the server ends."""
        while self._thread.is_alive():
            self._thread.join(1.0)

    def _serve(self) -> None:
        async def run() -> None:
            serving = asyncio.ensure_future(self._server.serve(sockets=[self._socket]))
            while not self._server.started and not serving.done():
                await asyncio.sleep(0.01)
            self._began.set()
            await serving

        with contextlib.suppress(asyncio.CancelledError):
            asyncio.run(run())

"""Server in a thread of its own."""

import asyncio
import contextlib
import socket
import threading
from types import TracebackType

import uvicorn

from jaxrlhf.config import Refusal, Sampling
from jaxrlhf.serving.app import WebApp
from jaxrlhf.serving.served import ServedModel
from jaxrlhf.serving.sessions import SessionBook


class Server:
    """HTTP server of a model; a context manager that serves until it is left.

    Attributes:
      address: Its address, such as `http://127.0.0.1:8000`.
      sessions: Sessions of agents.

    Args:
      port: Port to listen at; 0 takes a free one.
      token: Key that requests outside sessions must bear; None lets everybody in.
      sampling: Sampling of all sessions, whatever their calls ask for; None leaves that to the agents.

    Raises:
      Refusal: The address cannot be listened at.
    """

    def __init__(
        self,
        model: ServedModel,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        token: str | None,
        sampling: Sampling | None = None,
    ) -> None:
        self._socket = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            self._socket.bind((host, port))
        except (OSError, OverflowError) as error:
            self._socket.close()
            raise Refusal(
                f"cannot listen at {host}:{port} ({getattr(error, 'strerror', error)}); choose another --host or --port"
            ) from error
        shown = f"[{host}]" if ":" in host else host
        self.address = f"http://{shown}:{self._socket.getsockname()[1]}"
        self.sessions = SessionBook(model, self.address, sampling=sampling)
        app = WebApp(model, token=token, book=self.sessions)
        config = uvicorn.Config(
            app.asgi,
            log_level="warning",
            access_log=False,
            lifespan="off",
            timeout_keep_alive=30,
            timeout_graceful_shutdown=2,
            backlog=2048,
            h11_max_incomplete_event_size=1 << 16,
        )
        self._server = uvicorn.Server(config)
        self._began = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="server", daemon=True)

    def __enter__(self) -> "Server":
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

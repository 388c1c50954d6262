"""Server of the view."""

import socket
import threading
import time
from types import TracebackType

import uvicorn

from jaxrlhf.config import Refusal
from jaxrlhf.viewer.app import view_app
from jaxrlhf.viewer.run_files import RunFiles


class ViewServer:
    """HTTP server of the view at 127.0.0.1; a context manager that serves until it is left.

    Attributes:
      address: Its address, such as `http://127.0.0.1:6060`.

    Args:
      port: Port to listen at; 0 takes a free one.

    Raises:
      Refusal: The port is taken.
    """

    def __init__(self, files: RunFiles, *, port: int) -> None:
        self._socket = socket.socket()
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            self._socket.bind(("127.0.0.1", port))
        except (OSError, OverflowError) as error:
            self._socket.close()
            raise Refusal(
                f"cannot listen at port {port} ({getattr(error, 'strerror', error)}); choose another --port"
            ) from error
        self.address = f"http://127.0.0.1:{self._socket.getsockname()[1]}"
        config = uvicorn.Config(view_app(files), log_level="warning", access_log=False, lifespan="off")
        self._server = uvicorn.Server(config)
        sockets = [self._socket]
        self._thread = threading.Thread(target=self._server.run, args=(sockets,), name="view", daemon=True)

    def __enter__(self) -> "ViewServer":
        self._thread.start()
        while not self._server.started and self._thread.is_alive():
            time.sleep(0.01)
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

"""HTTP server of a model."""

from jaxrlhf.config import Sampling
from jaxrlhf.processes.connections import ConnectionLimits
from jaxrlhf.processes.http_server import HttpServer
from jaxrlhf.serving.app import WebApp
from jaxrlhf.serving.served import ServedModel
from jaxrlhf.serving.sessions import SessionBook

_GRACE_S = 2
LOCAL_NAMES = frozenset({"127.0.0.1", "localhost", "::1"})


class Server(HttpServer):
    """HTTP server of a model; when the server stops, open requests have two seconds left.

    Args:
      token: API key required of requests outside sessions; None admits every request.
      sampling: Sampling settings of all session calls, overriding the settings of requests; None uses the requests'.

    Raises:
      Refusal: The server cannot listen at the address.
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
        limits = ConnectionLimits(model.limits.connections, model.limits.headers_s)
        super().__init__(host=host, port=port, flags="--host or --port", limits=limits)
        self.sessions = SessionBook(model, self.address, sampling=sampling)
        # Without a key, a web page could have its visitor's browser send requests to a name that it points here.
        names = LOCAL_NAMES if token is None and host in LOCAL_NAMES else None
        app = WebApp(model, token=token, book=self.sessions, names=names)
        self.answer_by(
            app.asgi,
            grace_s=_GRACE_S,
            stop=app.stop,
            timeout_keep_alive=30,
            timeout_graceful_shutdown=2 * _GRACE_S,
            backlog=2048,
        )

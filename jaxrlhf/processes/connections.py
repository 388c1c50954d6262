"""Limits on the connections of an HTTP server: their number, a client's time, and the pieces of a body."""

import asyncio
import resource
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol  # httptools, the other implementation, bounds no headers

from jaxrlhf.config import Refusal

CONNECTIONS, HEADERS_S, UNREAD_S = 1024, 10.0, 30.0
LARGEST_HEADERS, LARGEST_BODY = 1 << 16, 1 << 26
"""Largest size of headers in bytes, and of a body, also of one that is not read after its answer."""

SMALL_PIECE, MOST_SMALL = 512, 1024
"""Size in bytes below which a piece of a body is small, and most small pieces of one body.

A piece is a chunk, or what arrives at once. Each piece costs microseconds in which no other connection is served.
"""

_OTHER_FILES, _FEWEST = 128, 16
"""Files that the process opens besides connections, and the fewest connections of a useful server."""


class _BoundedBody(h11.Connection):
    """Parser that refuses a body of too many bytes or of too many small pieces, also one that nobody reads."""

    _bytes = _small = 0

    def next_event(self) -> Any:
        event = super().next_event()
        if isinstance(event, h11.Request):
            self._bytes = self._small = 0
        elif isinstance(event, h11.Data):
            self._bytes += len(event.data)
            self._small += len(event.data) < SMALL_PIECE
            if self._bytes > LARGEST_BODY or self._small > MOST_SMALL:
                raise h11.RemoteProtocolError("a body of too many bytes or pieces")
        return event


class ConnectionLimits:
    """Open connections of one server.

    A connection without a request under way is idle. Beyond the maximum, a connection is closed that is idle, whose
    client does not read its answer, or whose client sends requests before the answer to the one before; the one that
    has been silent for longest comes first. So clients that send or read nothing, or send without end, cannot keep
    others out. If there is no such connection, the new connection is closed. An answer that stays unread for `UNREAD_S`
    seconds closes its connection.

    Args:
      connections: Maximum number of open connections; fewer if the process may open fewer files.
      headers_s: Time limit in seconds for the headers of a request, from its first byte or from the connection.

    Raises:
      Refusal: The process may open too few files.
    """

    def __init__(self, connections: int = CONNECTIONS, headers_s: float = HEADERS_S) -> None:
        files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        if files != resource.RLIM_INFINITY:
            connections = min(connections, files - _OTHER_FILES)
        if connections < _FEWEST:
            raise Refusal(
                f"a server of {_FEWEST} connections needs {_FEWEST + _OTHER_FILES} open files, and this process may "
                f"have {files}; raise the limit, such as by ulimit -n 4096"
            )
        self._most, self._headers_s = connections, headers_s
        self._open: dict[Any, asyncio.TimerHandle | None] = {}

    @property
    def protocol(self) -> type[asyncio.Protocol]:
        """Protocol class for uvicorn's option `http`."""
        limits = self

        class LimitedConnection(H11Protocol):
            def __init__(self, config: Any, *args: Any, **fields: Any) -> None:
                super().__init__(config, *args, **fields)
                self.conn = _BoundedBody(h11.SERVER, LARGEST_HEADERS)

            def connection_made(self, transport: Any) -> None:
                super().connection_made(transport)
                limits._opened(self)

            def data_received(self, data: bytes) -> None:
                super().data_received(data)
                limits._heard(self)

            def send_400_response(self, msg: str) -> None:
                if self.conn.our_state is h11.IDLE:
                    super().send_400_response(msg)
                else:  # an invalid body after its answer has started: h11 allows no second answer
                    self.transport.abort()

            def pause_writing(self) -> None:
                super().pause_writing()
                self._unread = self.loop.call_later(UNREAD_S, self.transport.abort)

            def resume_writing(self) -> None:
                self._unread.cancel()
                super().resume_writing()

            def connection_lost(self, exc: Exception | None) -> None:
                limits._closed(self)
                super().connection_lost(exc)

        return LimitedConnection

    def _opened(self, connection: Any) -> None:
        self._open[connection] = self._timer(connection)
        if len(self._open) > self._most:
            ended = next((each for each in self._open if _may_end(each)), connection)
            self._closed(ended)  # now, because asyncio tells of the end only later, after further connections
            ended.transport.abort()

    def _heard(self, connection: Any) -> None:
        """Start the time limit at the first bytes of a request, and end it once the headers are there."""
        if connection not in self._open:  # closed by the request's own error
            return
        timer = self._open.pop(connection)
        if not _is_idle(connection):
            if timer is not None:
                timer.cancel()
            timer = None
        elif timer is None:
            timer = self._timer(connection)
        self._open[connection] = timer  # the newest last

    def _closed(self, connection: Any) -> None:
        if (timer := self._open.pop(connection, None)) is not None:
            timer.cancel()

    def _timer(self, connection: Any) -> asyncio.TimerHandle:
        return connection.loop.call_later(self._headers_s, connection.transport.abort)


def _is_idle(connection: Any) -> bool:
    """Return True if a connection has no request whose headers are complete and whose answer is not."""
    return connection.cycle is None or connection.cycle.response_complete


def _may_end(connection: Any) -> bool:
    """Return True if a connection is idle, its answer is not read, or further requests wait for its answer."""
    flow = connection.flow
    return _is_idle(connection) or flow.write_paused or (flow.read_paused and not connection.cycle.more_body)

"""Framed messages over a socket: a length of four bytes, then the message.

The end that watches many processes never blocks on one process: incomplete incoming messages and unsent outgoing bytes
stay in buffers.
"""

import socket
import struct

LENGTH = struct.Struct("!I")


class Garbled(Exception):
    """Error for bytes that are not a message, such as text that user code wrote into the socket."""


class Channel:
    """One end of a connection.

    Args:
      largest: Maximum size of a received message in bytes.
      blocking: If True, `send` and `receive` block; if False, they transfer only the bytes that can be transferred now.
    """

    def __init__(self, end: socket.socket, *, largest: int, blocking: bool) -> None:
        end.setblocking(blocking)
        self.socket, self._largest = end, largest
        self._received, self._unsent = bytearray(), bytearray()

    def fileno(self) -> int:
        return self.socket.fileno()

    def send(self, message: bytes) -> None:
        """Send a message, or without `blocking` only the bytes that can be sent now.

        Raises:
          OSError: The other end is gone.
        """
        self._unsent += LENGTH.pack(len(message)) + message
        self.flush()

    def flush(self) -> bool:
        """Send buffered bytes and return True once the buffer is empty.

        Without `blocking`, call this method again whenever the socket is writable.

        Raises:
          OSError: The other end is gone.
        """
        while self._unsent:
            try:
                sent = self.socket.send(self._unsent)
            except BlockingIOError:
                return False
            del self._unsent[:sent]
        return True

    def receive(self) -> list[bytes]:
        """Read once from the socket and return the messages that are now complete; with `blocking`, wait for new bytes.

        Raises:
          EOFError: The other end is closed.
          Garbled: The bytes are not a message.
          OSError: The connection is broken.
        """
        try:
            arrived = self.socket.recv(1 << 16)
        except BlockingIOError:
            return []
        if not arrived:
            raise EOFError
        self._received += arrived
        messages = []
        while len(self._received) >= LENGTH.size:
            length = LENGTH.unpack_from(self._received)[0]
            if length > self._largest:
                raise Garbled(f"a message of {length} bytes")
            end = LENGTH.size + length
            if len(self._received) < end:
                break
            messages.append(bytes(self._received[LENGTH.size : end]))
            del self._received[:end]
        return messages

    def close(self) -> None:
        self.socket.close()

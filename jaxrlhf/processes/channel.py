"""Messages over a socket: a length of four bytes, then the message.

The end that watches many processes never waits for one of them: what a process wrote in part stays in a buffer, and so
does what it does not read.
"""

import socket
import struct

LENGTH = struct.Struct("!I")


class Garbled(Exception):
    """Error: bytes that are no message, such as text that a user's code wrote into the socket."""


class Channel:
    """One end of a connection.

    Args:
      largest: Bytes of a message that is received, at most.
      waits: Receive and send wait until they are done; else they do what can be done now.
    """

    def __init__(self, end: socket.socket, *, largest: int, waits: bool) -> None:
        end.setblocking(waits)
        self.socket, self._largest = end, largest
        self._received, self._unsent = bytearray(), bytearray()

    def fileno(self) -> int:
        return self.socket.fileno()

    def send(self, message: bytes) -> None:
        """Send a message, or as much of it as can be sent now.

        Raises:
          OSError: The other end is gone.
        """
        self._unsent += LENGTH.pack(len(message)) + message
        self.flush()

    def flush(self) -> bool:
        """True once all is sent; without `waits` it may take several calls, one whenever the socket can be written.

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
        """Messages that are complete; waits for more bytes first, or takes those that are there.

        Raises:
          EOFError: The other end is closed.
          Garbled: The bytes are no message.
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

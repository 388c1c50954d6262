"""Arrays from one JAX process to another with which it shares no `jax.distributed`.

The target pulls from the source's transfer server (`jax.experimental.transfer`), from device memory
into device memory. What that server leaves to its users is here: a bound on every wait, errors
that name the peer, and taking back what nobody came for. It asks nobody who they are, so the
network between the hosts has to be trusted.
"""

import functools
import ipaddress
import secrets
import socket
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax

STREAMS = 4
"""Connections that a transfer is spread over; one does not fill a fast network."""

CHUNK_BYTES = 16 * 2**20
CHUNKS = 8
"""Size and number of the server's staging buffers; on accelerators they are pinned memory."""

POLL_S = 0.001


class TransferError(RuntimeError):
    """Arrays that could not be sent or did not arrive.

    Attributes:
      address: Transfer server that they should come from.
    """

    def __init__(self, address: str, cause: str) -> None:
        super().__init__(address, cause)
        self.address = address

    def __str__(self) -> str:
        return "transfer from {}: {}".format(*self.args)


class Ticket(NamedTuple):
    """Permission to pull arrays once: the server's address and their number there."""

    address: str
    uuid: int


class Wire:
    """This process's end of every transfer to and from other processes.

    Args:
      host: Name or address under which other hosts reach this one.
    """

    def __init__(self, host: str) -> None:
        self._host = host
        self._connections: dict[str, Any] = {}

    def publish(self, arrays: Sequence[jax.Array]) -> Ticket:
        """Hold arrays, each on one device, until somebody pulls them or they are withdrawn.

        The server keeps them alive by itself. Donating or deleting them meanwhile fails the pull.
        """
        server, uuid = _server(self._host), secrets.randbits(64)
        server.await_pull(uuid, list(arrays))
        return Ticket(server.address(), uuid)

    def withdraw(self, ticket: Ticket) -> None:
        """Let go of what was published. Who pulls it now, or waits for it, gets an error."""
        _server(self._host).await_pull(ticket.uuid, [])  # takes the place of what was there

    def pull(self, ticket: Ticket, wanted: Sequence[jax.ShapeDtypeStruct]) -> list[jax.Array]:
        """Ask for all arrays that were published together, in their order; they are still in flight.

        Args:
          wanted: Shapes and dtypes as published, each with a sharding of one device.
        """
        address = ticket.address
        if address not in self._connections:
            self._connections[address] = _server(self._host).connect(address)
        return list(self._connections[address].pull(ticket.uuid, list(wanted)))

    def settle(self, address: str, arrays: Sequence[jax.Array], *, deadline: float) -> None:
        """Wait until arrays pulled from `address` are there.

        Args:
          deadline: In `time.monotonic` seconds.

        Raises:
          TransferError: The peer failed, or the arrays were not there in time.
        """
        start = time.monotonic()
        for array in arrays:
            while not array.is_ready():  # type: ignore[attr-defined]  # blocking on it instead could last for ever
                if time.monotonic() > deadline:
                    self._connections.pop(address, None)
                    raise TransferError(
                        address,
                        f"nothing after {time.monotonic() - start:.1f} s; that process may hang or be cut off, or "
                        "its offer was taken before",
                    )
                time.sleep(POLL_S)
        try:
            jax.block_until_ready(list(arrays))
        except jax.errors.JaxRuntimeError as error:
            self._connections.pop(address, None)
            raise TransferError(address, f"{error}; that process may have died or withdrawn its offer") from error


@functools.cache
def _server(host: str) -> Any:
    """The transfer server of this process, started when it is first needed."""
    address = f"{_numeric(host)}:0"
    try:
        from jax.experimental import transfer  # not in every build of jaxlib

        client = jax.local_devices()[0].client
        return transfer.start_transfer_server(
            client, address, [address] * STREAMS, transfer_size=CHUNK_BYTES, max_num_parallel_copies=CHUNKS
        )
    except (AttributeError, jax.errors.JaxRuntimeError) as error:
        raise TransferError(
            address, f'no transfer server of JAX starts here ({error}); set cluster.weights to "host"'
        ) from error


def _numeric(host: str) -> str:
    """The host's address in numbers: JAX's server would take a name for 0.0.0.0, which leads nobody here."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError as error:
        raise ValueError(f"host={host!r} has no address ({error}); give the one under which others reach it") from error
    address = ipaddress.ip_address(min(found)[4][0])  # IPv4 before IPv6
    if address.is_unspecified:
        raise ValueError(f"host={host!r} is every address of this host; give the one under which others reach it")
    return f"[{address}]" if address.version == 6 else str(address)

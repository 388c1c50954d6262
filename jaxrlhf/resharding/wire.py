"""Transfer of arrays between JAX processes that share no `jax.distributed`.

The target pulls from the source's transfer server (`jax.experimental.transfer`), from device memory to device memory.
This module adds a time limit on every wait, errors that name the peer, and withdrawal of arrays that nobody pulled.
The transfer server has no authentication, so the network between the hosts must be trusted.
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
"""Connections per transfer; a single connection does not fill a fast network."""

CHUNK_BYTES = 16 * 2**20
CHUNKS = 8
"""Number of the server's staging buffers, of CHUNK_BYTES each; in pinned memory on accelerators."""

POLL_S = 0.001


class TransferError(RuntimeError):
    """Failed transfer: arrays could not be sent or did not arrive.

    Attributes:
      address: Address of the source's transfer server.
    """

    def __init__(self, address: str, cause: str) -> None:
        super().__init__(address, cause)
        self.address = address

    def __str__(self) -> str:
        return "transfer from {}: {}".format(*self.args)


class Ticket(NamedTuple):
    """Permission to pull published arrays once: address of the transfer server, and number of the arrays there."""

    address: str
    uuid: int


class Wire:
    """Endpoint of this process for transfers to and from other processes.

    Args:
      host: Name or address under which other hosts reach this host.
    """

    def __init__(self, host: str) -> None:
        self._host = host
        self._connections: dict[str, Any] = {}

    def publish(self, arrays: Sequence[jax.Array]) -> Ticket:
        """Publish arrays, each on one device, until they are pulled or withdrawn.

        The server keeps the arrays alive. Donating or deleting an array meanwhile fails the pull.
        """
        server, uuid = _server(self._host), secrets.randbits(64)
        server.await_pull(uuid, list(arrays))
        return Ticket(server.address(), uuid)

    def withdraw(self, ticket: Ticket) -> None:
        """Withdraw published arrays. A process that pulls them now, or waits for them, gets an error."""
        _server(self._host).await_pull(ticket.uuid, [])  # replaces the published arrays

    def pull(self, ticket: Ticket, wanted: Sequence[jax.ShapeDtypeStruct]) -> list[jax.Array]:
        """Start to pull all arrays that were published together, in their order; does not wait for them.

        Args:
          wanted: Shapes and dtypes as published, each with a single-device sharding.
        """
        address = ticket.address
        if address not in self._connections:
            self._connections[address] = _server(self._host).connect(address)
        return list(self._connections[address].pull(ticket.uuid, list(wanted)))

    def settle(self, address: str, arrays: Sequence[jax.Array], *, deadline: float) -> None:
        """Wait until arrays pulled from `address` have arrived.

        Args:
          deadline: Time limit in `time.monotonic` seconds.

        Raises:
          TransferError: The peer failed, or the arrays did not arrive in time.
        """
        start = time.monotonic()
        for array in arrays:
            while not array.is_ready():  # type: ignore[attr-defined]  # a blocking wait could last forever
                if time.monotonic() > deadline:
                    self._connections.pop(address, None)
                    raise TransferError(
                        address,
                        f"no answer within {time.monotonic() - start:.1f} s; the process may hang or be unreachable, "
                        "or its offer was already taken",
                    )
                time.sleep(POLL_S)
        try:
            jax.block_until_ready(list(arrays))
        except jax.errors.JaxRuntimeError as error:
            self._connections.pop(address, None)
            raise TransferError(address, f"{error}; the process may have died or withdrawn its offer") from error


@functools.cache
def _server(host: str) -> Any:
    """Return the transfer server of this process; start it on first use."""
    address = f"{_numeric(host)}:0"
    try:
        from jax.experimental import transfer  # not in every build of jaxlib

        client = jax.local_devices()[0].client
        return transfer.start_transfer_server(
            client, address, [address] * STREAMS, transfer_size=CHUNK_BYTES, max_num_parallel_copies=CHUNKS
        )
    except (AttributeError, jax.errors.JaxRuntimeError) as error:
        raise TransferError(
            address, f"JAX's transfer server does not start on this host ({error}); set cluster.weights='host'"
        ) from error


def _numeric(host: str) -> str:
    """Return the numeric address of a host: JAX's server would treat a name as 0.0.0.0, unreachable for other hosts."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError as error:
        raise ValueError(
            f"host={host!r} cannot be resolved ({error}); set an address that other hosts can reach"
        ) from error
    address = ipaddress.ip_address(min(found)[4][0])  # IPv4 before IPv6
    if address.is_unspecified:
        raise ValueError(f"host={host!r} means every address of this host; set one that other hosts can reach")
    return f"[{address}]" if address.version == 6 else str(address)

"""Errors of a pool's host processes, which name the host, the call and the cause."""

from dataclasses import dataclass

JAX_ERRORS = ("JaxRuntimeError", "XlaRuntimeError")
OWN_STATUS = ("INVALID_ARGUMENT", "OUT_OF_RANGE", "RESOURCE_EXHAUSTED", "UNIMPLEMENTED")  # not a peer's doing


@dataclass(frozen=True)
class HostId:
    """A host process, or, where only the pool's name is known, the pool."""

    pool: str
    rank: int | None = None
    node_ip: str | None = None
    pid: int | None = None

    def __str__(self) -> str:
        if self.rank is None:
            return f"pool {self.pool!r}"
        return f"host {self.rank} of pool {self.pool!r} ({self.node_ip}, pid {self.pid})"


class HostFailure(RuntimeError):
    """A pool of host processes cannot go on; all of its processes are ended.

    Args:
      host: The host to blame, or the first of several.
      label: The call, such as `actor.update_actor`.
    """

    def __init__(self, host: HostId, label: str, cause: str) -> None:
        super().__init__(host, label, cause)  # all of them, so that the error pickles
        self.host = host
        self.label = label
        self.cause = cause

    def __str__(self) -> str:
        return f"{self.label}: {self.host} {self.cause}"


class HostNotStarted(HostFailure):
    """A pool could not be placed, or its processes were not up within the bound."""


class HostDied(HostFailure):
    """A host process ended: killed, out of memory, crashed, or its machine is gone."""


class HostHung(HostFailure):
    """A call did not end within its bound."""


class HostRaised(HostFailure):
    """A call beside or after one that raised on a host. That one's caller got the exception; here it is the cause."""


class HostClosed(HostFailure):
    """A call on a pool that its owner has closed."""


def may_have_lost_peer(error: BaseException) -> bool:
    """True if JAX may have raised this, or its cause, because another process is gone."""
    links = (error, error.__cause__, error.__context__)
    return any(type(link).__name__ in JAX_ERRORS and not str(link).startswith(OWN_STATUS) for link in links)

"""Errors of a pool's host processes; each names the host, the call and the cause."""

from dataclasses import dataclass

JAX_ERRORS = ("JaxRuntimeError", "XlaRuntimeError")
LOCAL_STATUSES = ("INVALID_ARGUMENT", "OUT_OF_RANGE", "RESOURCE_EXHAUSTED", "UNIMPLEMENTED")  # not caused by a peer


@dataclass(frozen=True)
class HostId:
    """Identity of a host process, or of its pool if only the pool's name is known."""

    pool: str
    rank: int | None = None
    node_ip: str | None = None
    pid: int | None = None

    def __str__(self) -> str:
        if self.rank is None:
            return f"pool {self.pool!r}"
        return f"host {self.rank} of pool {self.pool!r} ({self.node_ip}, pid {self.pid})"


class HostFailure(RuntimeError):
    """Error: a pool of host processes cannot continue, and all of its processes are ended.

    Args:
      host: Host that failed, the first of several.
      label: Name of the call, such as `actor.update_actor`.
    """

    def __init__(self, host: HostId, label: str, cause: str) -> None:
        super().__init__(host, label, cause)  # all arguments, so that the error pickles
        self.host = host
        self.label = label
        self.cause = cause

    def __str__(self) -> str:
        return f"{self.label}: {self.host} {self.cause}"


class HostNotStarted(HostFailure):
    """Error: a pool could not be placed, or its processes were not up within the time limit."""


class HostDied(HostFailure):
    """Error: a host process ended because it was killed, ran out of memory or crashed, or its machine is gone."""


class HostHung(HostFailure):
    """Error: a call did not end within its time limit."""


class HostRaised(HostFailure):
    """Error of a call that was concurrent with, or later than, a call that raised on a host.

    The caller of the raising call gets the exception itself; here the exception is the cause.
    """


class HostClosed(HostFailure):
    """Error of a call on a pool that its owner has closed."""


def may_have_lost_peer(error: BaseException) -> bool:
    """Return True if JAX may have raised this error, or its cause, because another process is gone."""
    links = (error, error.__cause__, error.__context__)
    return any(type(link).__name__ in JAX_ERRORS and not str(link).startswith(LOCAL_STATUSES) for link in links)

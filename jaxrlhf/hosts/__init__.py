"""Processes on the machines of a Ray cluster: started, called together, and told apart when they fail.

Ray is imported where it is used. Nothing here knows what the processes compute.
"""

from jaxrlhf.hosts.cluster import Connection, connect, disconnect
from jaxrlhf.hosts.failure import HostClosed, HostDied, HostFailure, HostHung, HostNotStarted, HostRaised
from jaxrlhf.hosts.processes import HostProcesses
from jaxrlhf.hosts.stored import Stored, loaded_bytes, sent_bytes

__all__ = [
    "Connection",
    "HostClosed",
    "HostDied",
    "HostFailure",
    "HostHung",
    "HostNotStarted",
    "HostProcesses",
    "HostRaised",
    "Stored",
    "connect",
    "disconnect",
    "loaded_bytes",
    "sent_bytes",
]

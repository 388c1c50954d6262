"""Processes on the machines of a Ray cluster: started, called together, and told apart when they fail.

Ray is imported where it is used. Nothing here knows what the processes compute.
"""

from jaxrlhf.single_controller.ray.cluster import Connection, connect, disconnect
from jaxrlhf.single_controller.ray.failure import (
    HostClosed,
    HostDied,
    HostFailure,
    HostHung,
    HostNotStarted,
    HostRaised,
)
from jaxrlhf.single_controller.ray.processes import HostProcesses
from jaxrlhf.single_controller.ray.stored import Stored, loaded_bytes, sent_bytes

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

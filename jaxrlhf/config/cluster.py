"""Hosts that a run spreads over."""

from dataclasses import dataclass

from jaxrlhf.config.check import not_negative, positive


@dataclass(frozen=True)
class RayCluster:
    """Host processes joined by Ray.

    Attributes:
      address: Of a running cluster; None starts one on this machine.
      devices_per_host: Devices of one host process; on CPU as many fake ones.
      call_timeout_s: Bound on one call of a verb.
      restarts: Times that the run is launched anew from its last checkpoint after a host failed.
    """

    address: str | None = None
    devices_per_host: int = 1
    start_timeout_s: float = 120.0
    call_timeout_s: float = 1800.0
    restarts: int = 0

    def __post_init__(self) -> None:
        positive(self, "devices_per_host", "start_timeout_s", "call_timeout_s")
        not_negative(self, "restarts")

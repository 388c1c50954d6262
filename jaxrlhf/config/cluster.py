"""Where a run's processes are started when one process is not enough."""

from dataclasses import dataclass
from typing import Literal

from jaxrlhf.config.refusal import finite, not_negative, positive, require


@dataclass(frozen=True)
class RayCluster:
    """Host processes started by Ray, which needs the `ray` extra.

    On a cluster that runs already, Ray starts processes with niceness 15, unless its machines were
    started under `RAY_worker_niceness=0`.

    Attributes:
      address: `host:port` of a running Ray cluster, or `auto` on one of its machines; None
        starts a cluster on this machine and ends it with the run.
      devices_per_host: Devices that one host process drives. On `cuda` and `tpu` they are
        asked of Ray; on `cpu` they are made up.
      platform: `auto` is what the cluster's machines report: tpu, else cuda, else cpu.
      cpus_per_host: Cores that Ray sets aside for a host process. It only counts them.
      start_timeout_s: Within this, the processes of a pool are placed, started and joined.
      call_timeout_s: Within this, every host answers a call; compilation counts.
      restarts: How often a run whose hosts failed starts them again and goes on from the
        newest checkpoint.
      weights: How they travel between pools: `direct` from device to device by JAX's transfer
        server, or through the memory of the hosts where the backend has none.
    """

    address: str | None = None
    devices_per_host: int = 1
    platform: Literal["auto", "cpu", "cuda", "tpu"] = "auto"
    cpus_per_host: float = 1.0
    start_timeout_s: float = 120.0
    call_timeout_s: float = 1800.0
    restarts: int = 0
    weights: Literal["direct", "host"] = "direct"

    def __post_init__(self) -> None:
        positive(self, "devices_per_host", "cpus_per_host", "start_timeout_s", "call_timeout_s")
        finite(self, "cpus_per_host", "start_timeout_s", "call_timeout_s")
        not_negative(self, "restarts")
        if self.address is not None:
            self._check_address()

    def _check_address(self) -> None:
        host, _, port = str(self.address).rpartition(":")
        require(
            self.address == "auto" or (bool(host) and "/" not in host and port.isdigit()),
            f"RayCluster.address must be 'auto' or host:port, such as 10.0.0.1:6379, got {self.address!r}; "
            "Ray Client (ray://) is not supported, start the run on a machine of the cluster",
        )

"""Host processes on a Ray cluster."""

from dataclasses import dataclass
from typing import Literal

from jaxrlhf.config.refusal import require
from jaxrlhf.config.settings import Finite, NotNegative, Positive, Settings


@dataclass(frozen=True)
class RayCluster(Settings):
    """Host processes started by Ray; needs the `ray` extra.

    A running cluster starts processes with niceness 15, unless its machines were started under `RAY_worker_niceness=0`.

    Attributes:
      address: `host:port` of a running Ray cluster, or `auto` on one of its machines; None starts a cluster on this
        machine and ends it with the run.
      devices_per_host: Devices of one host process; asked of Ray on `cuda` and `tpu`, made up on `cpu`.
      platform: Kind of device; `auto` takes what the cluster's machines report: tpu, else cuda, else cpu.
      cpus_per_host: Cores that Ray sets aside for a host process. It only counts them.
      start_timeout_s: Seconds in which a pool's processes are placed, started and joined.
      call_timeout_s: Seconds in which every host answers a call, compilation included.
      restarts: Times that a run whose hosts failed starts them again, from its newest checkpoint. A pool that only
        generates and scores is started again by itself, as often, with fewer hosts where there is no room for all in
        `start_timeout_s`, and what it had under way is begun again.
      weights: Transfer of weights between pools: `direct`, from device to device by JAX's transfer server, or `host`,
        through the hosts' memory where the backend has no such server.
    """

    address: str | None = None
    devices_per_host: Positive[int] = 1
    platform: Literal["auto", "cpu", "cuda", "tpu"] = "auto"
    cpus_per_host: Finite[Positive[float]] = 1.0
    start_timeout_s: Finite[Positive[float]] = 120.0
    call_timeout_s: Finite[Positive[float]] = 1800.0
    restarts: NotNegative[int] = 0
    weights: Literal["direct", "host"] = "direct"

    def __post_init__(self) -> None:
        super().__post_init__()
        host, _, port = str(self.address).rpartition(":")
        require(
            self.address in (None, "auto") or (bool(host) and "/" not in host and port.isdigit()),
            f"RayCluster.address must be 'auto' or host:port, such as 10.0.0.1:6379, got {self.address!r}; "
            "Ray Client (ray://) is not supported, start the run on a machine of the cluster",
        )

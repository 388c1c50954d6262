"""Settings of a Ray cluster."""

import re
from dataclasses import dataclass
from typing import Annotated, Literal

from jaxrlhf.config.settings import Bound, Finite, NotNegative, Positive, Settings

_ADDRESS = Bound(
    lambda address: re.fullmatch(r"auto|[^/]+:\d+", address) is not None,
    "'auto' or host:port, such as 10.0.0.1:6379 (Ray Client, ray://, is not supported)",
    str,
)


@dataclass(frozen=True)
class RayCluster(Settings):
    """Host processes started by Ray; needs the `ray` extra.

    A running cluster starts processes with niceness 15, unless its machines were started under `RAY_worker_niceness=0`.

    Attributes:
      address: `host:port` of a running Ray cluster, or `auto` on one of its machines; None starts a cluster on this
        machine and ends it with the run.
      devices_per_host: Devices of one host process: requested from Ray on `cuda` and `tpu`, simulated on `cpu`.
      platform: Device type; `auto` uses what the machines of the cluster report: tpu, else cuda, else cpu.
      cpus_per_host: CPU cores that Ray reserves for one host process. The number is bookkeeping only; it does not limit
        the process.
      start_timeout_s: Time limit in seconds for the processes of a pool to be placed, started and joined.
      call_timeout_s: Time limit in seconds for every host to answer a call, compilation included.
      restarts: Number of times that a run is restarted from its newest checkpoint after hosts failed. A pool that only
        generates and scores is restarted by itself, as many times. If not all of its hosts can be placed within
        `start_timeout_s`, it gets fewer hosts. Its unfinished work starts again.
      weights: Transfer of weights between pools: `direct` sends from device to device with JAX's transfer server;
        `host` sends through host memory, for backends without a transfer server.
    """

    address: Annotated[str, _ADDRESS] | None = None
    devices_per_host: Positive[int] = 1
    platform: Literal["auto", "cpu", "cuda", "tpu"] = "auto"
    cpus_per_host: Finite[Positive[float]] = 1.0
    start_timeout_s: Finite[Positive[float]] = 120.0
    call_timeout_s: Finite[Positive[float]] = 1800.0
    restarts: NotNegative[int] = 0
    weights: Literal["direct", "host"] = "direct"

"""Hardware description: the figures that predictions are made from.

A datasheet gives peaks; what a model reaches of them is in the `*_efficiency` shares. A file
that `python -m jaxrlhf.calibrate` wrote holds measured rates and shares.
"""

from dataclasses import dataclass
from typing import Annotated

from jaxrlhf.config.refusal import require
from jaxrlhf.config.settings import Finite, NotNegative, Positive, Settings, within

_COUNTS = ("machines", "devices_per_machine")


@dataclass(frozen=True)
class Hardware(Settings):
    """Machines of equal devices.

    Devices of a machine are consecutive. Rates are per device and, for links, in one direction.

    Attributes:
      name: Name it is asked for by, such as `a100`.
      machines: Number of machines joined by the network.
      devices_per_machine: Devices that share a machine's fast links, and one host process.
      memory_bytes: Memory of one device.
      matmul_flops_per_s: Peak of dense matrix products in the compute dtype.
      memory_bytes_per_s: Peak of reading device memory.
      link_bytes_per_s: Rate at which a device sends to others of its machine.
      network_bytes_per_s: A machine's connection to other machines, over its devices. One
        device alone may use the whole machine's.
      host_bytes_per_s: Rate between a device and its host's memory.
      link_latency_s: Latency of one step of a collective inside a machine.
      network_latency_s: Latency of one step of a collective between machines.
      layer_overhead_s: Overhead of running one layer once, whatever its size: kernel launches.
      dispatch_overhead_s: Overhead of starting one program, host work included.
      matmul_efficiency: Share of the matmul peak that a layer's forward and backward reach.
      memory_efficiency: Share of the memory's peak that decoding reaches.
      link_efficiency: Share of a link's or the network's peak that collectives reach.
      usable_memory: Share of a device's memory that a plan may fill.
      shared_compute: Devices are made up on one processor, as JAX does on CPU: rates are of a
        device while all are busy, and one that works alone has the others' share too.
      source: Where the figures are from.
    """

    name: str
    machines: Positive[int]
    devices_per_machine: Positive[int]
    memory_bytes: Finite[Positive[float]]
    matmul_flops_per_s: Finite[Positive[float]]
    memory_bytes_per_s: Finite[Positive[float]]
    link_bytes_per_s: Finite[Positive[float]]
    network_bytes_per_s: Finite[Positive[float]]
    host_bytes_per_s: Finite[Positive[float]]
    link_latency_s: Finite[NotNegative[float]]
    network_latency_s: Finite[NotNegative[float]]
    layer_overhead_s: Finite[NotNegative[float]]
    dispatch_overhead_s: Finite[NotNegative[float]]
    matmul_efficiency: Annotated[Positive[float], within(0, 1)] = 0.5
    memory_efficiency: Annotated[Positive[float], within(0, 1)] = 0.7
    link_efficiency: Annotated[Positive[float], within(0, 1)] = 0.8
    usable_memory: Annotated[Positive[float], within(0, 1)] = 0.9
    shared_compute: bool = False
    source: str = ""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in _COUNTS:
            value = getattr(self, name)
            require(type(value) is int, f"Hardware.{name} must be a whole number, got {value!r}")

    @property
    def takes_turns(self) -> bool:
        """True if all pools share one processor, so that none gains by running beside another."""
        return self.shared_compute and self.machines == 1

    @property
    def devices(self) -> int:
        """Number of devices in all machines."""
        return self.machines * self.devices_per_machine

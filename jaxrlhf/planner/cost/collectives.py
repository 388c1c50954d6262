"""Seconds of collectives, from the position of a group's devices in the machines.

A group is `size` devices, `stride` apart. Inside a machine every device has its own link. A group that spans machines
is bound by the network. Groups through the same machine share the network: `stride` groups, but at most as many as a
machine has devices.

Source: Thakur et al. 2005 (Optimization of collective communication operations in MPICH), sections 4.1 and 4.5, rings.
"""

from dataclasses import dataclass

from jaxrlhf.planner.hardware import Hardware


@dataclass(frozen=True)
class DeviceGroup:
    """Device groups of `size` devices, `stride` apart, that all communicate at once."""

    size: int
    stride: int


def crosses_machines(group: DeviceGroup, hardware: Hardware) -> bool:
    """Return whether any of the consecutive groups spans more than one machine."""
    several = group.size > 1 and hardware.machines > 1
    return several and hardware.devices_per_machine % (group.size * group.stride) != 0


def bytes_per_s(group: DeviceGroup, hardware: Hardware) -> float:
    """Return the bytes per second that one device of the group can send, in one direction."""
    if not crosses_machines(group, hardware):
        return hardware.link_bytes_per_s * hardware.link_efficiency
    machine = hardware.devices_per_machine
    share = hardware.network_bytes_per_s * machine / min(group.stride, machine)
    return min(hardware.link_bytes_per_s, share) * hardware.link_efficiency


def latency_s(group: DeviceGroup, hardware: Hardware) -> float:
    """Return the latency of one step of a ring."""
    return hardware.network_latency_s if crosses_machines(group, hardware) else hardware.link_latency_s


def all_gather_s(num_bytes: float, group: DeviceGroup, hardware: Hardware) -> float:
    """Return the seconds of an all-gather: each of n devices receives the parts of the n - 1 other devices.

        t = (n - 1) latency + bytes (n - 1) / n / bandwidth

    A reduce-scatter of the same size takes as long.

    Args:
      num_bytes: Size of the gathered array.
    """
    if group.size == 1:
        return 0.0
    steps = group.size - 1
    return steps * latency_s(group, hardware) + num_bytes * steps / group.size / bytes_per_s(group, hardware)


def all_reduce_s(num_bytes: float, group: DeviceGroup, hardware: Hardware) -> float:
    """Return the seconds of an all-reduce: a reduce-scatter and an all-gather of an array of `num_bytes`."""
    return 2 * all_gather_s(num_bytes, group, hardware)


def send_s(num_bytes: float, group: DeviceGroup, hardware: Hardware) -> float:
    """Return the seconds in which every device sends `num_bytes` to the next of its group; the slowest pair decides."""
    if group.size == 1:
        return 0.0
    return latency_s(group, hardware) + num_bytes / bytes_per_s(group, hardware)

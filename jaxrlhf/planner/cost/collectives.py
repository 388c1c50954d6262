"""Seconds of collectives, from where the devices of a group lie.

A group is `size` devices, `stride` apart. Inside a machine every device has its own link. A group that spans machines
is bound by the network, which the groups that run through the same machine at the same time share: with `stride`
devices between two of its members there are that many groups, up to a machine's devices.

Source: Thakur et al. 2005 (Optimization of collective communication operations in MPICH), sections 4.1 and 4.5, rings.
"""

from dataclasses import dataclass

from jaxrlhf.planner.hardware import Hardware


@dataclass(frozen=True)
class DeviceGroup:
    """Equal groups of `size` devices, `stride` apart, that all communicate at once."""

    size: int
    stride: int


def crosses_machines(group: DeviceGroup, hardware: Hardware) -> bool:
    """Return whether any of the groups, which lie one after another, spans more than one machine."""
    several = group.size > 1 and hardware.machines > 1
    return several and hardware.devices_per_machine % (group.size * group.stride) != 0


def bytes_per_s(group: DeviceGroup, hardware: Hardware) -> float:
    """Most bytes per second that one device of the group sends, in one direction."""
    if not crosses_machines(group, hardware):
        return hardware.link_bytes_per_s * hardware.link_efficiency
    machine = hardware.devices_per_machine
    share = hardware.network_bytes_per_s * machine / min(group.stride, machine)
    return min(hardware.link_bytes_per_s, share) * hardware.link_efficiency


def latency_s(group: DeviceGroup, hardware: Hardware) -> float:
    """Latency of one step of a ring."""
    return hardware.network_latency_s if crosses_machines(group, hardware) else hardware.link_latency_s


def all_gather_s(num_bytes: float, group: DeviceGroup, hardware: Hardware) -> float:
    """Seconds of an all-gather: each of n devices receives what the n - 1 others hold.

        t = (n - 1) latency + bytes (n - 1) / n / bandwidth

    `num_bytes` is the size of the gathered array. A reduce-scatter of as many takes as long.
    """
    if group.size == 1:
        return 0.0
    steps = group.size - 1
    return steps * latency_s(group, hardware) + num_bytes * steps / group.size / bytes_per_s(group, hardware)


def all_reduce_s(num_bytes: float, group: DeviceGroup, hardware: Hardware) -> float:
    """Seconds of an all-reduce: a reduce-scatter and an all-gather of an array of `num_bytes` on every device."""
    return 2 * all_gather_s(num_bytes, group, hardware)


def send_s(num_bytes: float, group: DeviceGroup, hardware: Hardware) -> float:
    """Seconds in which every member sends `num_bytes` to the next one of its group; the slowest pair decides."""
    if group.size == 1:
        return 0.0
    return latency_s(group, hardware) + num_bytes / bytes_per_s(group, hardware)

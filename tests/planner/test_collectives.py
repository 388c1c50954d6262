"""Seconds of collectives, compared with rings simulated device by device."""

import itertools
import math
from dataclasses import replace

import pytest
from unit_machines import UNIT

from jaxrlhf.planner.cost.collectives import (
    DeviceGroup,
    all_gather_s,
    all_reduce_s,
    bytes_per_s,
    crosses_machines,
    latency_s,
    send_s,
)
from jaxrlhf.planner.cost.simulate import pool_hardware
from jaxrlhf.planner.hardware import Hardware

CLUSTER = replace(
    UNIT, machines=2, devices_per_machine=8, link_bytes_per_s=100.0, network_bytes_per_s=4.0,
    link_latency_s=1.0, network_latency_s=3.0,
)  # fmt: skip


def groups_of(group: DeviceGroup, devices: int) -> list[list[int]]:
    """Return the devices of every group."""
    found = []
    for block in range(0, devices, group.size * group.stride):
        for first in range(group.stride):
            found.append([block + first + member * group.stride for member in range(group.size)])
    return found


def walked(group: DeviceGroup, hardware: Hardware) -> tuple[bool, float]:
    """Return whether any ring leaves a machine, and the rate of such a ring."""
    machine = hardware.devices_per_machine
    leaving = dict.fromkeys(range(hardware.machines), 0)
    for ring in groups_of(group, hardware.machines * machine):
        for one, after in zip(ring, ring[1:] + ring[:1], strict=True):
            leaving[one // machine] += one // machine != after // machine
    busiest = max(leaving.values())
    if not busiest:
        return False, hardware.link_bytes_per_s
    return True, min(hardware.link_bytes_per_s, hardware.network_bytes_per_s * machine / busiest)


@pytest.mark.parametrize("machine", [1, 4, 6, 8, 16])
def test_groups_are_where_walking_their_rings_says(machine: int) -> None:
    seen = set()
    for size, stride in itertools.product([1, 2, 3, 4, 5, 6, 8, 16, 24], [1, 2, 3, 4, 8, 16]):
        group, block = DeviceGroup(size, stride), size * stride
        # Enough machines that a group ends at the end of a machine.
        hardware = replace(CLUSTER, machines=math.lcm(machine, block) // machine, devices_per_machine=machine)
        crosses, rate = walked(group, hardware)
        assert crosses_machines(group, hardware) == crosses, group
        assert latency_s(group, hardware) == (3.0 if crosses else 1.0), group
        if not crosses or block % machine == 0:
            assert bytes_per_s(group, hardware) == rate, group
        else:
            # If one group ends and another begins in a machine, both may send at once.
            assert rate <= bytes_per_s(group, hardware) <= 2 * rate, group
        seen.add((crosses, block % machine == 0))
    assert {(True, True), (machine == 1, machine == 1)} <= seen
    assert machine == 1 or (True, False) in seen


def ring(shards: list[float], *, latency: float, rate: float) -> float:
    """Return the seconds of a ring: in each step every device sends what it received last, the largest part longest."""
    held, seconds = list(shards), 0.0
    for _ in shards[1:]:
        seconds += latency + max(held) / rate
        held = held[-1:] + held[:-1]
    return seconds


@pytest.mark.parametrize("latency", [0.0, 0.25])
@pytest.mark.parametrize("size", [2, 3, 8])
def test_an_all_gather_passes_every_shard_around_a_ring(size: int, latency: float) -> None:
    hardware = replace(UNIT, devices_per_machine=24, link_bytes_per_s=10.0, link_latency_s=latency)
    expected = ring([240 / size] * size, latency=latency, rate=10.0)
    assert all_gather_s(240, DeviceGroup(size, 1), hardware) == pytest.approx(expected)
    assert all_reduce_s(240, DeviceGroup(size, 1), hardware) == pytest.approx(2 * expected)


def test_one_machine_has_no_network() -> None:
    alone = replace(CLUSTER, machines=1, network_bytes_per_s=1e-9, network_latency_s=1e9)
    for group in (DeviceGroup(3, 1), DeviceGroup(2, 3), DeviceGroup(8, 1)):  # 3 and 6 do not divide its 8 devices
        assert not crosses_machines(group, alone)
        assert (latency_s(group, alone), bytes_per_s(group, alone)) == (1.0, 100.0)
        steps = group.size - 1
        assert all_gather_s(600, group, alone) == pytest.approx(steps + 600 * steps / group.size / 100)
        assert send_s(600, group, alone) == 1.0 + 6.0


@pytest.mark.parametrize("shared", [False, True])
def test_a_pool_within_a_machine_is_one_machine(shared: bool) -> None:
    hardware = replace(CLUSTER, shared_compute=shared)
    seen = {devices: pool_hardware(hardware, devices) for devices in (1, 3, 4, 8, 16)}
    assert {devices: pool.machines for devices, pool in seen.items()} == {1: 1, 3: 1, 4: 1, 8: 1, 16: 2}
    assert not crosses_machines(DeviceGroup(3, 1), seen[3])
    assert crosses_machines(DeviceGroup(2, 8), seen[16])
    # Simulated devices also have the share of idle devices of their machine, but not of other machines.
    for devices, pool in seen.items():
        share = {1: 8, 3: 8 / 3, 4: 2, 8: 1, 16: 1}[devices] if shared else 1
        assert (pool.link_bytes_per_s, pool.network_bytes_per_s) == (100 * share, 4 * share)
        assert (pool.matmul_flops_per_s, pool.memory_bytes_per_s) == (share, share)
        assert (pool.host_bytes_per_s, pool.link_latency_s) == (1.0, 1.0)


@pytest.mark.parametrize("machines", [1, 2, 4])
def test_the_slowest_pair_of_a_pipeline_decides(machines: int) -> None:
    hardware = replace(CLUSTER, machines=machines)
    powers = [2**n for n in range(6) if 2**n <= 8 * machines]
    for group in [
        DeviceGroup(size, stride) for size in powers[1:] for stride in powers if size * stride <= 8 * machines
    ]:
        pairs = [pair for pipeline in groups_of(group, 8 * machines) for pair in itertools.pairwise(pipeline)]
        leaving = [one // 8 for one, after in pairs if one // 8 != after // 8]
        seconds = [
            1.0 + 400 / 100 if one // 8 == after // 8 else 3.0 + 400 / min(100, 32 / leaving.count(one // 8))
            for one, after in pairs
        ]
        assert send_s(400, group, hardware) == pytest.approx(max(seconds)), group

"""Known hardware: plausible figures, names of machines and slices, and hardware files."""

import dataclasses
import json
import math

import pytest

from jaxrlhf.planner.hardware import (
    KNOWN_HARDWARE,
    compiler_of,
    hardware,
    load_hardware,
    recognise,
)


@pytest.mark.parametrize("name", KNOWN_HARDWARE)
def test_every_kind_is_plausible_and_says_where_its_figures_are_from(name):
    kind = KNOWN_HARDWARE[name]
    assert kind.name == name
    assert kind.machines == 1
    assert len(kind.source) > 40
    assert kind.shared_compute == (name == "cpu")
    # Memory is faster than links, and links are as fast as the network or faster.
    assert kind.memory_bytes_per_s > kind.link_bytes_per_s >= kind.network_bytes_per_s
    assert 0 < kind.link_latency_s <= kind.network_latency_s < kind.dispatch_overhead_s
    # TPU chips are connected without their hosts.
    fabric = (kind.network_bytes_per_s, kind.network_latency_s) == (kind.link_bytes_per_s, kind.link_latency_s)
    assert fabric == (compiler_of(kind) == "tpu")


def test_pools_of_one_processor_take_turns():
    for spec, turns in [("cpu", True), ("cpux1x2", True), ("cpux2", False), ("a100", False), ("a100x2", False)]:
        assert hardware(spec).takes_turns == turns, spec


@pytest.mark.parametrize(
    ("spec", "name", "machines", "devices"),
    [
        ("h100", "h100", 1, 8),
        ("h100x4", "h100", 4, 8),
        (" H200X2x4 ", "h200", 2, 4),
        ("v4x3", "v4", 3, 4),
        # Slices, with chips and virtual machines by Google's documentation.
        ("v4-32", "v4", 4, 4),
        ("v5p-8", "v5p", 1, 4),
        ("V5P-12288", "v5p", 1536, 4),
        ("v5e-1", "v5e", 1, 1),
        ("v5e-8", "v5e", 1, 8),
        ("v5litepod-16", "v5e", 4, 4),
        ("v6e-256", "v6e", 64, 4),
        ("tpu7x-8", "v7", 1, 8),
    ],
)
def test_names_mean_machines(spec, name, machines, devices):
    found = hardware(spec)
    assert (found.name, found.machines, found.devices_per_machine) == (name, machines, devices)
    assert found.devices == machines * devices


def test_devices_of_another_number_bring_their_own_rates():
    whole, half = hardware("h100x2"), hardware("h100x2x4")
    assert dataclasses.replace(half, devices_per_machine=8) == whole


def test_devices_of_another_number_share_what_a_machine_has_once():
    whole, half = hardware("a100x2"), hardware("a100x2x4")
    assert half.network_bytes_per_s * 4 == whole.network_bytes_per_s * 8 == 25e9
    assert half.matmul_flops_per_s == whole.matmul_flops_per_s
    eight, two = hardware("cpu"), hardware("cpux1x2")
    for name in ("matmul_flops_per_s", "memory_bytes", "memory_bytes_per_s", "host_bytes_per_s"):
        assert getattr(two, name) * 2 == getattr(eight, name) * 8, name


@pytest.mark.parametrize(
    ("spec", "first"),
    [("a10", "a100"), ("v5", "v5"), ("gb200", "b200"), ("", "")],
)
def test_an_unknown_name_lists_the_known_ones_closest_first(spec, first):
    with pytest.raises(ValueError, match="unknown hardware") as error:
        hardware(spec)
    message = str(error.value)
    assert repr(spec) in message
    assert f"known names are {first}" in message
    listed = message.split("known names are ")[1].split(";")[0].split(", ")
    assert sorted(listed) == sorted(KNOWN_HARDWARE)
    assert "NAMExMACHINESxDEVICES" in message
    assert "\n" not in message


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("a100x0x8", "sizes must be whole numbers of at least 1"),
        ("a100x", "sizes must be whole numbers of at least 1"),
        ("a100x2x8x2", "sizes must be whole numbers of at least 1"),
        ("a100x2.5", "sizes must be whole numbers of at least 1"),
        ("h100-16", "only TPU slices have names with a dash"),
        ("v5p-0", "size of a slice must be a whole number"),
        ("v5p-2x2x1", "size of a slice must be a whole number"),
        ("v4-7", "two per chip; give an even number"),
        ("v5e-18", "18 devices do not fill hosts of 4"),
    ],
)
def test_bad_sizes_are_refused(spec, message):
    with pytest.raises(ValueError, match=message) as error:
        hardware(spec)
    assert repr(spec) in str(error.value)


@pytest.mark.parametrize(
    ("kind", "platform", "name"),
    [
        ("NVIDIA H100 80GB HBM3", "gpu", "h100"),
        ("TPU v5 lite", "tpu", "v5e"),
        ("TPU v5", "tpu", "v5p"),
        ("TPU7x", "tpu", "v7"),
        ("cpu", "cpu", "cpu"),
        ("NVIDIA A100-SXM4-40GB", "gpu", None),
        ("NVIDIA A100-SXM4-80GB MIG 1g.10gb", "gpu", None),
        ("TPU v4 lite", "tpu", None),
    ],
)
def test_devices_are_recognised_by_what_jax_calls_them(kind, platform, name):
    assert recognise(kind, platform) == name


def test_a_file_has_all_fields_or_those_that_differ_from_a_known_kind(tmp_path):
    file = tmp_path / "My.JSON"
    file.write_text(json.dumps(dataclasses.asdict(KNOWN_HARDWARE["v5p"])))
    assert load_hardware(file) == hardware(str(file)) == KNOWN_HARDWARE["v5p"]
    file.write_text(json.dumps({"like": "h100x2x4", "memory_bytes": 48e9}))
    assert load_hardware(file) == dataclasses.replace(hardware("h100x2x4"), memory_bytes=48e9)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"memory_bytes": "80e9"}, "memory_bytes in {file} must be float, got '80e9'"),
        ({"machines": 1.5}, "machines in {file} must be int, got 1.5"),
        ({"shared_compute": 0}, "shared_compute in {file} must be True or False, got 0"),
        ({"memory_gb": 80}, "{file} has unknown fields memory_gb"),
        ({"like": 3}, "like in {file} must be str, got 3"),
        ({"machines": 0}, "{file}: Hardware.machines must be above 0, got 0"),
        ({"link_bytes_per_s": math.inf}, "{file}: Hardware.link_bytes_per_s must be finite, got inf"),
        ({"link_efficiency": 1.2}, "{file}: Hardware.link_efficiency must be in [0, 1], got 1.2"),
    ],
)
def test_a_wrong_field_of_a_file_is_named(change, message, tmp_path):
    file = tmp_path / "hardware.json"
    file.write_text(json.dumps(dataclasses.asdict(KNOWN_HARDWARE["h100"]) | change))
    with pytest.raises(ValueError, match=r"hardware\.json") as error:
        hardware(str(file))
    assert message.format(file=file) in str(error.value)


@pytest.mark.parametrize("text", ["{", "[1]", '{"name": "h100"}'])
def test_a_file_of_something_else_is_refused(refused, text, tmp_path):
    file = tmp_path / "hardware.json"
    file.write_text(text)
    with refused():
        load_hardware(file)


def test_a_missing_file_is_refused(refused, tmp_path):
    with refused():
        hardware(str(tmp_path / "none.json"))

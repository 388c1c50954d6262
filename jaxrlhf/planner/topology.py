"""Topologies of absent hardware: devices that the chips' own compilers compile programs for.

TPUs need the package `libtpu`, NVIDIA GPUs `jax-cuda13-plugin`; neither needs a driver or a chip. Both packages come
with `jaxrlhf[compile]`.
"""

import os
from collections.abc import Mapping
from typing import Any

import jax
from jax.experimental import topologies

from jaxrlhf.config import Refusal
from jaxrlhf.planner.hardware import Hardware
from jaxrlhf.runtime.xla_flags import GPU_FLAGS

_CUBES = {4: "2x2x1", 8: "2x2x2", 16: "2x2x4", 32: "2x4x4", 64: "4x4x4", 128: "4x4x8", 256: "4x8x8", 512: "8x8x8"}
_SQUARES = {1: "1x1", 4: "2x2", 8: "2x4", 16: "4x4", 32: "4x8", 64: "8x8", 128: "8x16", 256: "16x16"}
_TPU_SLICES: Mapping[str, Mapping[int, str]] = {"v4": _CUBES, "v5p": _CUBES, "v5e": _SQUARES, "v6e": _SQUARES}
"""Shape of a slice, by its number of chips. Source: https://cloud.google.com/tpu/docs, the pages of each version."""

_HOPPER = {
    "threads_per_block_limit": 1024,
    "threads_per_warp": 32,
    "shared_memory_per_block": 49_152,
    "shared_memory_per_core": 233_472,
    "threads_per_core_limit": 2048,
    "core_count": 132,
    "fpus_per_core": 128,
    "block_dim_limit_x": 2_147_483_647,
    "block_dim_limit_y": 65_535,
    "block_dim_limit_z": 65_535,
    "l2_cache_size": 52_428_800,
    "clock_rate_ghz": 1.98,
    "shared_memory_per_block_optin": 232_448,
    "registers_per_core_limit": 65_536,
    "registers_per_block_limit": 65_536,
}
_BLACKWELL = {**_HOPPER, "core_count": 148, "l2_cache_size": 132_644_864, "clock_rate_ghz": 1.965}
_GPUS: Mapping[str, Mapping[str, Any]] = {
    "h100": {"memory_bandwidth": 3_352_320_000_000, "device_memory_size": 84_978_434_048, **_HOPPER},
    "h200": {"memory_bandwidth": 4_800_000_000_000, "device_memory_size": 150_754_820_096, **_HOPPER},
    "b200": {"memory_bandwidth": 7_672_320_000_000, "device_memory_size": 191_514_411_008, **_BLACKWELL},
}
"""Description of each GPU for XLA; an H200 is an H100 with more memory.

Source: openxla/xla, xla/backends/gpu/target_config/specs.
"""

_NO_TPU_HERE = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5p-8",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}
"""Environment in which libtpu does not query a cloud about its machine, and several processes may compile."""

_LABELS = {"h100": "NVIDIA H100 80GB HBM3", "h200": "NVIDIA H200", "b200": "NVIDIA B200"}
_CAPABILITY = {"h100": 9, "h200": 9, "b200": 10}
"""Major CUDA compute capability; the minor number is 0 for all."""


def compiler_options(hardware: Hardware) -> dict[str, bool | str] | None:
    """Return the XLA flags of a run on this hardware, as compiler options; None for TPUs: libtpu reads its variable."""
    return dict(GPU_FLAGS) if hardware.name in _GPUS else None


def topology(hardware: Hardware) -> tuple[jax.Device, ...]:
    """Return the devices of some hardware, for meshes and compilation; nothing runs on these devices.

    Raises:
      Refusal: No compiler supports the hardware, no slice has this size, or a package is missing.
    """
    if hardware.name in _TPU_SLICES:
        return _tpu(hardware)
    if hardware.name in _GPUS:
        return _gpu(hardware)
    known = ", ".join([*_GPUS, *_TPU_SLICES])
    raise Refusal(f"compilation without the hardware supports only {known}, got {hardware.name}")


def _tpu(hardware: Hardware) -> tuple[jax.Device, ...]:
    slices = _TPU_SLICES[hardware.name]
    if hardware.devices not in slices:
        sizes = ", ".join(map(str, slices))
        raise Refusal(f"no slice has {hardware.devices} {hardware.name} chips; slices have {sizes} chips")
    if jax.default_backend() != "tpu":  # default_backend also makes other backends read their flags first
        for name, value in _NO_TPU_HERE.items():
            os.environ.setdefault(name, value)
        os.environ.pop("XLA_FLAGS", None)  # libtpu ends the process at flags of other backends
    # Otherwise libtpu assumes that every host has 2 x 2 chips.
    alone = {"chips_per_host_bounds": [1, 1, 1]} if hardware.devices == 1 else {}
    return _described("tpu", f"{hardware.name}:{slices[hardware.devices]}", "libtpu", alone)


def _gpu(hardware: Hardware) -> tuple[jax.Device, ...]:
    os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")  # a driver need not be installed
    fields = "\n".join(f"  {name}: {value}" for name, value in _GPUS[hardware.name].items())
    capability = f"cuda_compute_capability {{ major: {_CAPABILITY[hardware.name]} minor: 0 }}"
    target = (
        f"gpu_device_info {{\n{fields}\n  {capability}\n}}\n"
        'platform_name: "CUDA"\ndnn_version_info { major: 9 minor: 8 patch: 0 }\n'
        f'device_description_str: "{_LABELS[hardware.name]}"\n'
    )
    shape = f"1x{hardware.machines}x{hardware.devices_per_machine}"
    return _described("cuda", hardware.name, "jax-cuda13-plugin", {"topology": shape, "target_config": target})


def _described(platform: str, name: str, package: str, options: Mapping[str, Any]) -> tuple[jax.Device, ...]:
    try:
        found = topologies.get_topology_desc(platform=platform, topology_name=name, **options)
    except Exception as error:  # a missing or incomplete plugin may raise anything
        reason = str(error).partition("\n")[0]
        raise Refusal(
            f"compiling for {name} requires the package {package}, which failed with {type(error).__name__}: "
            f"{reason}; pip install 'jaxrlhf[compile]'"
        ) from error
    return tuple(found.devices)

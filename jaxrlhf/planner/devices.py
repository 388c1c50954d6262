"""Known machines, the names they are asked for by, and the files that hold measured ones.

Peaks are of dense bfloat16 products. Vendors give links in both directions together; here is
one direction. Latencies and overheads are orders of magnitude: no datasheet has them.
`python -m jaxrlhf.calibrate` measures all of it on the devices at hand.
"""

import dataclasses
import difflib
import json
import re
from pathlib import Path
from typing import Any

from jaxrlhf.config import Refusal
from jaxrlhf.config.cli.annotations import check_type, field_types
from jaxrlhf.planner.hardware import Hardware

_GIB = 2.0**30

_ROUGH = "latencies and overheads are orders of magnitude"
_DGX_NETWORK = "DGX reference network: one 400 Gb/s adapter per GPU; PCIe 5.0 x16: 50 of 63 GB/s taken as usable"
_CLOUD = "Google Cloud documentation"
_ICI = "all ICI links of a chip in one direction, of which a collective along one torus axis uses a half (2D) or third"
_BOOK = "How to Scale Your Model, part 2"


def _nvidia(
    name: str,
    *,
    memory_bytes: float,
    matmul_flops_per_s: float,
    memory_bytes_per_s: float,
    link_bytes_per_s: float,
    network_bytes_per_s: float = 50e9,
    host_bytes_per_s: float = 50e9,
    source: str,
) -> Hardware:
    # Of a GPU's memory JAX takes three quarters unless XLA_PYTHON_CLIENT_MEM_FRACTION says otherwise.
    # A collective of few bytes takes NCCL tens of microseconds in all; a program that XLA
    # compiled launches some ten kernels a layer, of a few microseconds each.
    return Hardware(
        name=name,
        machines=1,
        devices_per_machine=8,
        memory_bytes=memory_bytes,
        matmul_flops_per_s=matmul_flops_per_s,
        memory_bytes_per_s=memory_bytes_per_s,
        link_bytes_per_s=link_bytes_per_s,
        network_bytes_per_s=network_bytes_per_s,
        host_bytes_per_s=host_bytes_per_s,
        link_latency_s=10e-6,
        network_latency_s=25e-6,
        layer_overhead_s=30e-6,
        dispatch_overhead_s=0.5e-3,
        usable_memory=0.7,
        source=f"{source}; {_ROUGH}",
    )


def _tpu(
    name: str,
    *,
    devices_per_machine: int,
    memory_bytes: float,
    matmul_flops_per_s: float,
    memory_bytes_per_s: float,
    link_bytes_per_s: float,
    torus_axes: int,
    host_bytes_per_s: float,
    source: str,
) -> Hardware:
    # Chips of a slice reach each other without their hosts, also across hosts, at about 1 us a
    # hop, and a whole program runs without the host starting its kernels.
    return Hardware(
        name=name,
        machines=1,
        devices_per_machine=devices_per_machine,
        memory_bytes=memory_bytes,
        matmul_flops_per_s=matmul_flops_per_s,
        memory_bytes_per_s=memory_bytes_per_s,
        link_bytes_per_s=link_bytes_per_s,
        network_bytes_per_s=link_bytes_per_s,
        host_bytes_per_s=host_bytes_per_s,
        link_latency_s=2e-6,
        network_latency_s=2e-6,
        layer_overhead_s=5e-6,
        dispatch_overhead_s=0.5e-3,
        link_efficiency=0.8 / torus_axes,  # a ring lies along one of them
        source=f"{source}; {_ICI}; {_ROUGH}",
    )


_KINDS = (
    _nvidia(
        "a100",
        memory_bytes=80e9,
        matmul_flops_per_s=312e12,
        memory_bytes_per_s=2.039e12,
        link_bytes_per_s=300e9,
        network_bytes_per_s=25e9 / 8,
        host_bytes_per_s=25e9,
        source="NVIDIA A100 80GB SXM datasheet (NVLink 600 GB/s both ways); 200 Gb/s between machines of 8, the "
        "test bed of HybridFlow (arXiv:2409.19256, section 8.1); PCIe 4.0 x16: 25 of 31.5 GB/s taken as usable; "
        "44 to 52 % of peak in training: Megatron-LM (arXiv:2104.04473)",
    ),
    _nvidia(
        "h100",
        memory_bytes=80e9,
        matmul_flops_per_s=989e12,
        memory_bytes_per_s=3.35e12,
        link_bytes_per_s=450e9,
        source=f"NVIDIA H100 SXM datasheet (1979 TFLOPS sparse, NVLink 900 GB/s both ways); {_DGX_NETWORK}",
    ),
    _nvidia(
        "h200",
        memory_bytes=141e9,
        matmul_flops_per_s=989e12,
        memory_bytes_per_s=4.8e12,
        link_bytes_per_s=450e9,
        source=f"NVIDIA H200 SXM datasheet (1979 TFLOPS sparse, NVLink 900 GB/s both ways); {_DGX_NETWORK}",
    ),
    _nvidia(
        "b200",
        memory_bytes=180e9,
        matmul_flops_per_s=2.25e15,
        memory_bytes_per_s=8e12,
        link_bytes_per_s=900e9,
        source="NVIDIA DGX B200 datasheet, an eighth of 1440 GB, 64 TB/s and 14.4 TB/s of NVLink both ways; "
        f"bfloat16 is a quarter of its 72 PFLOPS sparse FP8; {_DGX_NETWORK}",
    ),
    _tpu(
        "v4",
        devices_per_machine=4,
        memory_bytes=32 * _GIB,
        matmul_flops_per_s=275e12,
        memory_bytes_per_s=1.2e12,
        link_bytes_per_s=300e9,
        torus_axes=3,
        host_bytes_per_s=15e9,
        source=f"{_CLOUD}, TPU v4, 4 chips a host; 6 ICI links of 50 GB/s each way: TPU v4 paper (arXiv:2304.01433); "
        f"host link: about 15 GB/s a chip ({_BOOK})",
    ),
    _tpu(
        "v5e",
        devices_per_machine=8,
        memory_bytes=16e9,
        matmul_flops_per_s=197e12,
        memory_bytes_per_s=819e9,
        link_bytes_per_s=200e9,
        torus_axes=2,
        host_bytes_per_s=15e9,
        source=f"{_CLOUD}, TPU v5e (ICI 400 GB/s both ways), 8 chips in the largest virtual machine and 4 in those of "
        f"slices over 8; host link: about 15 GB/s a chip ({_BOOK})",
    ),
    _tpu(
        "v5p",
        devices_per_machine=4,
        memory_bytes=95 * _GIB,
        matmul_flops_per_s=459e12,
        memory_bytes_per_s=2.765e12,
        link_bytes_per_s=600e9,
        torus_axes=3,
        host_bytes_per_s=15e9,
        source=f"{_CLOUD}, TPU v5p (ICI 1200 GB/s both ways), 4 chips a host; "
        f"host link: about 15 GB/s a chip ({_BOOK})",
    ),
    _tpu(
        "v6e",
        devices_per_machine=8,
        memory_bytes=32e9,
        matmul_flops_per_s=918e12,
        memory_bytes_per_s=1.638e12,
        link_bytes_per_s=400e9,
        torus_axes=2,
        host_bytes_per_s=32e9,
        source=f"{_CLOUD}, TPU v6e (ICI 800 GB/s both ways), 8 chips in the largest virtual machine and 4 in those of "
        f"slices over 8; host link: 32 GB/s a chip ({_BOOK})",
    ),
    _tpu(
        "v7",
        devices_per_machine=8,
        memory_bytes=192 * _GIB / 2,
        matmul_flops_per_s=2307e12 / 2,
        memory_bytes_per_s=7.38e12 / 2,
        link_bytes_per_s=600e9 / 2,
        torus_axes=3,
        host_bytes_per_s=16e9,
        source=f"{_CLOUD}, TPU7x (Ironwood), 4 chips a host (ICI 1200 GB/s both ways); JAX sees a chip as two devices, "
        "and each is given half of the chip, although the two are closer to each other; "
        "host link: not published, taken as half of a v6e chip's",
    ),
    Hardware(
        name="cpu",
        machines=1,
        devices_per_machine=8,
        memory_bytes=2e9,
        matmul_flops_per_s=50e9,
        memory_bytes_per_s=5e9,
        link_bytes_per_s=2e9,
        network_bytes_per_s=1.25e9 / 8,
        host_bytes_per_s=5e9,
        link_latency_s=50e-6,
        network_latency_s=200e-6,
        layer_overhead_s=100e-6,
        dispatch_overhead_s=1e-3,
        shared_compute=True,
        source="rough: a processor of 400 GFLOP/s, 40 GB/s and 16 GB, as 8 devices; "
        "measure yours with `python -m jaxrlhf.calibrate`",
    ),
)

KNOWN_HARDWARE: dict[str, Hardware] = {kind.name: kind for kind in _KINDS}
"""One machine of each kind."""

_ALIASES = {"v5litepod": "v5e", "tpu7x": "v7"}

# What the number in the name of a TPU slice counts: TensorCores, of which a v4 or v5p device has two.
_CORES_PER_DEVICE = {"v4": 2, "v5e": 1, "v5p": 2, "v6e": 1, "v7": 1}

# Slices of more chips than one virtual machine can hold are made of smaller ones.
_DEVICES_PER_HOST_OF_MANY = {"v5e": 4, "v6e": 4}

# Where devices of a machine share one connection; elsewhere each brings its own.
_ONE_CONNECTION = ("a100", "cpu")

_FORMS = (
    "write NAME, NAMExMACHINES or NAMExMACHINESxDEVICES (a100x16x8: 16 machines of 8), a TPU slice (v5p-128), "
    "or the path of a .json file that `python -m jaxrlhf.calibrate` wrote"
)

_BY_DEVICE_KIND = {
    "nvidia a100-sxm4-80gb": "a100",
    "nvidia h100 80gb hbm3": "h100",
    "nvidia h200": "h200",
    "nvidia b200": "b200",
    "tpu v4": "v4",
    "tpu v5 lite": "v5e",
    "tpu v5e": "v5e",
    "tpu v5": "v5p",
    "tpu v5p": "v5p",
    "tpu v6 lite": "v6e",
    "tpu v6e": "v6e",
    "tpu7x": "v7",
    "tpu v7": "v7",
    "tpu v7x": "v7",
}


def hardware(spec: str) -> Hardware:
    """The machines that a name means.

    `h100` is one machine, `h100x4` four, `a100x16x8` 16 machines of 8 devices, `v5p-128` a TPU
    slice by Google's name (128 TensorCores, 64 devices), `my.json` a measured machine.

    Raises:
      Refusal: Unknown name, sizes that are no whole numbers of at least 1, a slice that does
        not fill its hosts, or a file that does not describe hardware.
    """
    if spec.lower().endswith(".json"):
        return load_hardware(spec)
    given = spec.strip().lower()
    for name in (*KNOWN_HARDWARE, *_ALIASES):
        sizes = given.removeprefix(name)
        if given.startswith(name) and sizes[:1] in ("", "x", "-"):
            kind = KNOWN_HARDWARE[_ALIASES.get(name, name)]
            return _slice(spec, kind, sizes[1:]) if sizes.startswith("-") else _machines(spec, kind, sizes)
    raise Refusal(f"unknown hardware {spec!r}; known are {', '.join(_closest_first(given))}; {_FORMS}")


def recognise(device_kind: str, platform: str) -> str | None:
    """The known name of a device, from what JAX calls it; None if it is of no known kind.

    An A100 of 40 GB, a PCIe card or a part of a GPU (MIG) is none: it has other figures.
    """
    return "cpu" if platform == "cpu" else _BY_DEVICE_KIND.get(device_kind.lower())


def save_hardware(hardware: Hardware, path: str | Path) -> None:
    """Write a description that `load_hardware` reads back as the same."""
    Path(path).write_text(json.dumps(dataclasses.asdict(hardware), indent=2) + "\n")


def load_hardware(path: str | Path) -> Hardware:
    """Read a description that `save_hardware` wrote; fields may have been changed by hand since.

    Raises:
      Refusal: The file is missing or no JSON object, or a field is missing, unknown, of
        another type, or out of range.
    """
    file = Path(path).expanduser()
    if not file.is_file():
        raise Refusal(f"no hardware file {str(path)!r}; `python -m jaxrlhf.calibrate` writes one")
    try:
        fields = json.loads(file.read_text())
    except ValueError as error:
        raise Refusal(f"{file} is not valid JSON ({error}); calibrate again") from error
    if not isinstance(fields, dict):
        raise Refusal(f"{file} holds {type(fields).__name__}, expected a JSON object with the fields of Hardware")
    types = field_types(Hardware)
    if missing := [name for name in types if name not in fields]:
        raise Refusal(f"{file} has no {', '.join(missing)}; a hardware file gives every field")
    if unknown := [name for name in fields if name not in types]:
        raise Refusal(f"{file} has unknown fields {', '.join(unknown)}; the fields are {', '.join(types)}")
    for name, kind in types.items():
        check_type(f"{name} in {file}", fields[name], kind)
    values: dict[str, Any] = {
        name: float(fields[name]) if kind is float else fields[name] for name, kind in types.items()
    }
    try:
        return Hardware(**values)
    except ValueError as error:
        raise Refusal(f"{file}: {error}") from error


def _machines(spec: str, kind: Hardware, sizes: str) -> Hardware:
    """`sizes` is what follows the name: nothing, `x4` or `x16x8`."""
    numbers = sizes.split("x")[1:]
    if len(numbers) > 2 or not all(map(_whole, numbers)):
        raise Refusal(f"hardware {spec!r}: sizes must be whole numbers of at least 1; {_FORMS}")
    machines, devices = [*map(int, numbers), *(1, kind.devices_per_machine)[len(numbers) :]]
    return _sized(kind, machines, devices)


def _slice(spec: str, kind: Hardware, number: str) -> Hardware:
    """`number` is what a slice's name counts, which is not always devices."""
    if kind.name not in _CORES_PER_DEVICE:
        raise Refusal(f"hardware {spec!r}: only TPU slices are named with a dash; {_FORMS}")
    if not _whole(number):
        raise Refusal(f"hardware {spec!r}: the size of a slice must be a whole number of at least 1; {_FORMS}")
    devices, rest = divmod(int(number), _CORES_PER_DEVICE[kind.name])
    if rest:
        raise Refusal(f"hardware {spec!r}: {kind.name} slices count TensorCores, two a chip; give an even number")
    if devices <= kind.devices_per_machine:
        return _sized(kind, 1, devices)
    per_host = _DEVICES_PER_HOST_OF_MANY.get(kind.name, kind.devices_per_machine)
    if devices % per_host:
        raise Refusal(f"hardware {spec!r}: {devices} devices do not fill hosts of {per_host}; give a multiple of it")
    return _sized(kind, devices // per_host, per_host)


def _sized(kind: Hardware, machines: int, devices: int) -> Hardware:
    """Hardware of `machines` machines of `devices` each; what a machine's devices share is divided by their number."""
    share = kind.devices_per_machine / devices
    shared = ["network_bytes_per_s"] if kind.name in _ONE_CONNECTION else []
    if kind.shared_compute:
        shared += ["memory_bytes", "matmul_flops_per_s", "memory_bytes_per_s", "link_bytes_per_s", "host_bytes_per_s"]
    rates = {name: getattr(kind, name) * share for name in shared}
    return dataclasses.replace(kind, machines=machines, devices_per_machine=devices, **rates)


def _whole(text: str) -> bool:
    return re.fullmatch(r"[0-9]+", text) is not None and int(text) > 0


def _closest_first(name: str) -> list[str]:
    return sorted(KNOWN_HARDWARE, key=lambda known: -difflib.SequenceMatcher(None, known, name).ratio())

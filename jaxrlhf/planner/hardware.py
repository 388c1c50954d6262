"""Hardware descriptions for plans: known machines by name, files of other machines, and this machine's devices.

Rates from datasheets are peaks; the `*_efficiency` fields are the shares of these peaks that a model reaches.
"""

import dataclasses
import difflib
import re
import tomllib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from jaxrlhf.config import Config, Refusal
from jaxrlhf.config.cli.annotations import check_type, field_types
from jaxrlhf.config.refusal import read_object
from jaxrlhf.config.settings import Finite, NotNegative, Positive, Settings, within

_OF_PROCESSOR = ("memory_bytes", "matmul_flops_per_s", "memory_bytes_per_s", "link_bytes_per_s", "host_bytes_per_s")
"""Figures that JAX devices simulated on one processor share."""


@dataclass(frozen=True)
class Hardware(Settings):
    """Machines of equal devices.

    Devices of a machine are consecutive. Rates are per device and, for links, in one direction.

    Attributes:
      name: Name that selects the hardware, such as `a100`.
      machines: Number of machines joined by the network.
      devices_per_machine: Devices that share a machine's fast links, and one host process.
      memory_bytes: Memory of one device.
      matmul_flops_per_s: Peak of dense matrix products in the compute dtype.
      memory_bytes_per_s: Peak of reading device memory.
      link_bytes_per_s: Rate at which a device sends to others of its machine.
      network_bytes_per_s: Rate of a machine's connection to other machines, divided by its devices; a single device may
        use the rate of the whole machine.
      host_bytes_per_s: Rate between a device and its host's memory.
      link_latency_s: Latency of one step of a collective inside a machine.
      network_latency_s: Latency of one step of a collective between machines.
      layer_overhead_s: Overhead of running one layer once, for any size: kernel launches.
      dispatch_overhead_s: Overhead of starting one program, host work included.
      matmul_efficiency: Share of the matmul peak that a layer's forward and backward reach.
      memory_efficiency: Share of the memory's peak that decoding reaches.
      link_efficiency: Share of a link's or the network's peak that collectives reach.
      usable_memory: Share of a device's memory that a plan may fill.
      shared_compute: JAX simulates the devices on one processor (CPU): rates are of a device while all are
        busy, and a device that works alone has the shares of the other devices too.
      source: Source of the figures.
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

    @property
    def reached_flops_per_s(self) -> float:
        """Rate of matrix products that a model reaches, in FLOPs per second."""
        return self.matmul_flops_per_s * self.matmul_efficiency

    @property
    def reached_bytes_per_s(self) -> float:
        """Rate of reading device memory that a model reaches, in bytes per second."""
        return self.memory_bytes_per_s * self.memory_efficiency

    @property
    def takes_turns(self) -> bool:
        """True if all pools share one processor, so that running pools at the same time gains nothing."""
        return self.shared_compute and self.machines == 1

    @property
    def devices(self) -> int:
        """Number of devices in all machines."""
        return self.machines * self.devices_per_machine


_TABLE = tomllib.loads(Path(__file__).with_name("devices.toml").read_text(encoding="utf-8"))
_KINDS: dict[str, dict[str, Any]] = {
    name: {**_TABLE["defaults"].get(kind.get("like"), {}), **kind} for name, kind in _TABLE["kinds"].items()
}
KNOWN_HARDWARE: dict[str, Hardware] = {
    name: Hardware(
        name=name, machines=1, **{field: value for field, value in kind.items() if field in field_types(Hardware)}
    )
    for name, kind in _KINDS.items()
}
"""Hardware of one machine of each known kind, by name."""

_ALIASES = {alias: name for name, kind in _KINDS.items() for alias in kind.get("aliases", ())}

_FORMS = (
    "write NAME, NAMExMACHINES or NAMExMACHINESxDEVICES (a100x16x8: 16 machines of 8), a TPU slice (v5p-128), "
    "or the path of a .json file with other figures (docs/planning.md)"
)

_BY_DEVICE_KIND = {known: name for name, kind in _KINDS.items() for known in kind.get("device_kinds", ())}


def hardware(spec: str) -> Hardware:
    """Return the hardware of a name.

    `h100` is one machine, `h100x4` four machines, `a100x16x8` 16 machines of 8 devices, `v5p-128` a TPU slice by
    Google's name (128 TensorCores, 64 devices), `my.json` a file of `load_hardware`.

    Raises:
      Refusal: The name is unknown, a size is no whole number of at least 1, a slice does not fill its hosts, or a file
        does not describe hardware.
    """
    return load_hardware(spec) if spec.lower().endswith(".json") else _known_hardware(spec)


def _known_hardware(spec: str) -> Hardware:
    given = spec.strip().lower()
    for name in (*KNOWN_HARDWARE, *_ALIASES):
        sizes = given.removeprefix(name)
        if given.startswith(name) and sizes[:1] in ("", "x", "-"):
            kind = KNOWN_HARDWARE[_ALIASES.get(name, name)]
            return _slice(spec, kind, sizes[1:]) if sizes.startswith("-") else _machines(spec, kind, sizes)
    known = sorted(KNOWN_HARDWARE, key=lambda name: -difflib.SequenceMatcher(None, name, given).ratio())
    raise Refusal(f"unknown hardware {spec!r}; known names are {', '.join(known)}; {_FORMS}")


def recognise(device_kind: str, platform: str) -> str | None:
    """Return the known name of a device kind of JAX; None for an unknown kind, such as a part of a GPU (MIG)."""
    return "cpu" if platform == "cpu" else _BY_DEVICE_KIND.get(device_kind.lower())


def compiler_of(hardware: Hardware) -> Literal["gpu", "tpu"] | None:
    """Return the XLA backend that compiles for this hardware; None for unknown kinds and CPUs."""
    compilers: dict[str, Literal["gpu", "tpu"]] = {"nvidia": "gpu", "tpu": "tpu"}
    return compilers.get(_KINDS.get(hardware.name, {}).get("like", ""))


def load_hardware(path: str | Path) -> Hardware:
    """Read hardware from a JSON file.

    The file has the fields of `Hardware`. A file with `like`, a hardware name such as `h100x2`, has only the fields
    that differ. The hardware keeps the name of its kind unless the file has another, so its compiler is known.

    Raises:
      Refusal: The file is missing or no JSON object, or a field is missing, unknown, of another type, or out of range.
    """
    file = Path(path).expanduser()
    fields = read_object(file, "give a JSON object with the fields of the hardware")
    if "like" in fields:
        check_type(f"like in {file}", fields["like"], str)
        fields = dataclasses.asdict(_known_hardware(fields.pop("like"))) | fields
    types = field_types(Hardware)
    if missing := [name for name in types if name not in fields]:
        raise Refusal(f"{file} lacks {', '.join(missing)}; add them, or name similar hardware in the field 'like'")
    if unknown := [name for name in fields if name not in types]:
        raise Refusal(f"{file} has unknown fields {', '.join(unknown)}; the fields are like, {', '.join(types)}")
    for name, kind in types.items():
        check_type(f"{name} in {file}", fields[name], kind)
    values: Any = {name: float(fields[name]) if kind is float else fields[name] for name, kind in types.items()}
    try:
        return Hardware(**values)
    except ValueError as error:
        raise Refusal(f"{file}: {error}") from error


def _machines(spec: str, kind: Hardware, sizes: str) -> Hardware:
    """Return machines of a kind.

    Args:
      sizes: Text after the name: empty, `x4` or `x16x8`.
    """
    numbers = sizes.split("x")[1:]
    if len(numbers) > 2 or not all(map(_whole, numbers)):
        raise Refusal(f"hardware {spec!r}: sizes must be whole numbers of at least 1; {_FORMS}")
    machines, devices = [*map(int, numbers), *(1, kind.devices_per_machine)[len(numbers) :]]
    return _sized(kind, machines, devices)


def _slice(spec: str, kind: Hardware, number: str) -> Hardware:
    """Return a TPU slice of a kind.

    Args:
      number: Number in the slice's name, which counts devices or TensorCores.
    """
    counted = _KINDS[kind.name].get("slice_counts_per_device")  # 2 for v4 and v5p, which count TensorCores
    if counted is None:
        raise Refusal(f"hardware {spec!r}: only TPU slices have names with a dash; {_FORMS}")
    if not _whole(number):
        raise Refusal(f"hardware {spec!r}: the size of a slice must be a whole number of at least 1; {_FORMS}")
    devices, rest = divmod(int(number), counted)
    if rest:
        raise Refusal(f"hardware {spec!r}: {kind.name} slices count TensorCores, two per chip; give an even number")
    if devices <= kind.devices_per_machine:
        return _sized(kind, 1, devices)
    per_host = _KINDS[kind.name].get("devices_per_host_of_many", kind.devices_per_machine)
    if devices % per_host:
        raise Refusal(f"hardware {spec!r}: {devices} devices do not fill hosts of {per_host} devices; give a multiple")
    return _sized(kind, devices // per_host, per_host)


def _sized(kind: Hardware, machines: int, devices: int) -> Hardware:
    """Return `machines` machines of `devices` devices each; shared rates of a machine are divided by its devices."""
    share = kind.devices_per_machine / devices
    shared = ["network_bytes_per_s"] if _KINDS[kind.name].get("one_connection") else []
    shared += _OF_PROCESSOR if kind.shared_compute else []
    rates = {name: getattr(kind, name) * share for name in shared}
    return replace(kind, machines=machines, devices_per_machine=devices, **rates)


def gib(num_bytes: float) -> str:
    """Return bytes as text, such as `74.5 GiB`."""
    size = num_bytes / 2**30
    return f"{size:,.0f} GiB" if size >= 100 else f"{size:.3g} GiB"


def _whole(text: str) -> bool:
    return re.fullmatch(r"[0-9]+", text) is not None and int(text) > 0


_HOW = "set hardware to a name such as a100x16x8, or to a .json file with the figures of the devices"


def hardware_of(config: Config, spec: str | None = None) -> Hardware:
    """Return the hardware that a run is planned for, limited to the configuration's number of devices.

    Args:
      spec: Name or file; None is the hardware of the configuration, or of this process.

    Raises:
      Refusal: The name is unknown, there are fewer devices than requested, the devices are of no known kind, or the
        configuration has a cluster without naming its hardware (its devices are not visible from here).
    """
    if spec is None and config.cluster is None:
        return _hardware_here(config)
    name = config.hardware if spec is None else spec
    if name is None:
        raise Refusal(f"placement='auto' with a cluster requires hardware, as its devices are not visible here; {_HOW}")
    return _first(hardware(name), config.devices)


def _hardware_here(config: Config) -> Hardware:
    """Return the devices of this process that the run uses, as one machine."""
    import jax

    devices = jax.devices()
    kind, platform = devices[0].device_kind, devices[0].platform
    count = config.devices or len(devices)
    if count > len(devices):
        raise Refusal(
            f"devices={count}, but JAX sees {len(devices)} {platform} devices; lower devices, or plan for other "
            "devices with --hardware"
        )
    if config.hardware is None:
        name = recognise(kind, platform)
        if name is None:
            raise Refusal(f"the speed of the {len(devices)} devices here, {kind!r}, is unknown; {_HOW}")
        return _first(hardware(f"{name}x1x{len(devices)}"), count)
    described = hardware(config.hardware)
    if count > described.devices_per_machine:
        raise Refusal(
            f"hardware={config.hardware!r} has machines of {described.devices_per_machine} devices, but this process "
            f"uses {count}; {_HOW}"
        )
    return _first(replace(described, machines=1), count)


def _first(machines: Hardware, devices: int | None) -> Hardware:
    """Return the hardware with only the first `devices` devices; None is all devices."""
    if devices is None or devices == machines.devices:
        return machines
    if devices > machines.devices:
        raise Refusal(
            f"devices={devices}, but {machines.machines} machines of {machines.devices_per_machine} x {machines.name} "
            f"have {machines.devices}; lower devices, or add machines"
        )
    each = machines.devices_per_machine
    if devices % each == 0:
        return replace(machines, machines=devices // each)
    if devices > each:
        raise Refusal(f"devices={devices} is not a multiple of {each}, the devices of a machine; change devices")
    shared = _OF_PROCESSOR if machines.shared_compute else ()  # the other devices are idle
    rates = {name: getattr(machines, name) * each / devices for name in shared}
    return replace(machines, machines=1, devices_per_machine=devices, **rates)

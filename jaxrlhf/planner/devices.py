"""Known machines, of which `devices.toml` is the table, the names they are asked for by, and files of measured ones.

`python -m jaxrlhf.calibrate` measures the devices at hand.
"""

import dataclasses
import difflib
import json
import re
import tomllib
from pathlib import Path
from typing import Any

from jaxrlhf.config import Refusal
from jaxrlhf.config.cli.annotations import check_type, field_types
from jaxrlhf.planner.hardware import Hardware

_TABLE = tomllib.loads(Path(__file__).with_name("devices.toml").read_text(encoding="utf-8"))
_KINDS: dict[str, dict[str, Any]] = {
    name: {**_TABLE["defaults"].get(kind.get("like"), {}), **kind} for name, kind in _TABLE["kinds"].items()
}
_FIELDS = {field.name for field in dataclasses.fields(Hardware)}

KNOWN_HARDWARE: dict[str, Hardware] = {
    name: Hardware(name=name, machines=1, **{field: kind[field] for field in kind if field in _FIELDS})
    for name, kind in _KINDS.items()
}
"""One machine of each kind."""

_ALIASES = {alias: name for name, kind in _KINDS.items() for alias in kind.get("aliases", ())}

_FORMS = (
    "write NAME, NAMExMACHINES or NAMExMACHINESxDEVICES (a100x16x8: 16 machines of 8), a TPU slice (v5p-128), "
    "or the path of a .json file that `python -m jaxrlhf.calibrate` wrote"
)

_BY_DEVICE_KIND = {known: name for name, kind in _KINDS.items() for known in kind.get("device_kinds", ())}


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
    counted = _KINDS[kind.name].get("slice_counts_per_device")  # TensorCores, of which a v4 or v5p device has two
    if counted is None:
        raise Refusal(f"hardware {spec!r}: only TPU slices are named with a dash; {_FORMS}")
    if not _whole(number):
        raise Refusal(f"hardware {spec!r}: the size of a slice must be a whole number of at least 1; {_FORMS}")
    devices, rest = divmod(int(number), counted)
    if rest:
        raise Refusal(f"hardware {spec!r}: {kind.name} slices count TensorCores, two a chip; give an even number")
    if devices <= kind.devices_per_machine:
        return _sized(kind, 1, devices)
    per_host = _KINDS[kind.name].get("devices_per_host_of_many", kind.devices_per_machine)
    if devices % per_host:
        raise Refusal(f"hardware {spec!r}: {devices} devices do not fill hosts of {per_host}; give a multiple of it")
    return _sized(kind, devices // per_host, per_host)


def _sized(kind: Hardware, machines: int, devices: int) -> Hardware:
    """Hardware of `machines` machines of `devices` each; what a machine's devices share is divided by their number."""
    share = kind.devices_per_machine / devices
    shared = ["network_bytes_per_s"] if _KINDS[kind.name].get("one_connection") else []
    if kind.shared_compute:
        shared += ["memory_bytes", "matmul_flops_per_s", "memory_bytes_per_s", "link_bytes_per_s", "host_bytes_per_s"]
    rates = {name: getattr(kind, name) * share for name in shared}
    return dataclasses.replace(kind, machines=machines, devices_per_machine=devices, **rates)


def _whole(text: str) -> bool:
    return re.fullmatch(r"[0-9]+", text) is not None and int(text) > 0


def _closest_first(name: str) -> list[str]:
    return sorted(KNOWN_HARDWARE, key=lambda known: -difflib.SequenceMatcher(None, known, name).ratio())

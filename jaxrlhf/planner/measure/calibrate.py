"""Measure the devices at hand, and describe them as `Hardware`.

In every figure all devices of this process are busy at once, as they are in an SPMD program.
CPU devices, which share a processor, so get their part of it; `shared_compute` records that.
"""

import datetime
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxrlhf.config import Refusal
from jaxrlhf.planner.hardware import Hardware, hardware, recognise
from jaxrlhf.planner.measure import measure, measure_decoder, measure_links
from jaxrlhf.planner.measure.measure_links import fit_link

Progress = Callable[[str, int, int], None]
"""`(figure, done, total)`, before each figure and after the last."""

FIGURES = ("program start", "matrix products", "memory", "host", "links", "network", "decoding", "training")


Row = tuple[str, str, object, str]

_PREFIXES = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"), (1.0, ""), (1e-3, "m"), (1e-6, "u"))

_FIGURES = (
    ("compute", "matrix products", "matmul_flops_per_s", "FLOP/s"),
    ("compute", "share in training", "matmul_efficiency", "%"),
    ("memory", "size", "memory_bytes", "B"),
    ("memory", "reading", "memory_bytes_per_s", "B/s"),
    ("memory", "share in decoding", "memory_efficiency", "%"),
    ("links", "inside a machine", "link_bytes_per_s", "B/s"),
    ("links", "latency of a step", "link_latency_s", "s"),
    ("links", "between machines", "network_bytes_per_s", "B/s"),
    ("links", "latency of a step between machines", "network_latency_s", "s"),
    ("links", "to host memory", "host_bytes_per_s", "B/s"),
    ("overhead", "of a layer", "layer_overhead_s", "s"),
    ("overhead", "of a program", "dispatch_overhead_s", "s"),
)


class Link(NamedTuple):
    """A connection, and where its figures are from if they were not measured."""

    latency_s: float
    bytes_per_s: float
    note: str = ""


def datasheet(devices: Sequence[jax.Device]) -> Hardware | None:
    """Datasheet figures of such devices, for as many machines; None if they are of no known kind."""
    name = recognise(devices[0].device_kind, devices[0].platform)
    machines, per_machine = _machines(devices)
    return None if name is None else hardware(f"{name}x{machines}x{per_machine}")


def calibrate(devices: Sequence[jax.Device], *, seconds_per_figure: float, progress: Progress) -> Hardware:
    """Measure devices of one kind.

    With several processes each of them has to call this; the network is measured between them.

    Args:
      devices: Devices of all processes, as many of each.
      seconds_per_figure: About, for each of `FIGURES` and without compiling; sizes are chosen to fit.

    Raises:
      Refusal: Seconds that are not above 0, or processes with different numbers of devices.
    """
    if not seconds_per_figure > 0:
        raise Refusal(f"seconds_per_figure must be above 0, got {seconds_per_figure}")
    machines, per_machine = _machines(devices)
    own = [device for device in devices if device.process_index == jax.process_index()]
    dtype = jnp.float32 if own[0].platform == "cpu" else jnp.bfloat16
    known, memory_bytes = datasheet(devices), measure.device_memory_bytes(own)

    def begin(figure: str) -> float:
        progress(figure, FIGURES.index(figure), len(FIGURES))
        return seconds_per_figure

    dispatch_s = measure.dispatch_s(own, seconds=begin("program start") / 10)
    seconds = begin("matrix products")
    flops_per_s = measure.matmul_flops_per_s(own, dtype=dtype, memory_bytes=memory_bytes, seconds=seconds)
    bytes_per_s = measure.memory_bytes_per_s(own, memory_bytes=memory_bytes, seconds=begin("memory"))
    host_bytes_per_s = measure.host_bytes_per_s(own, memory_bytes=memory_bytes, seconds=begin("host"))
    if per_machine > 1:
        link = Link(*fit_link(measure_links.link_samples(own, memory_bytes=memory_bytes, seconds=begin("links"))))
    else:
        link = _unmeasured_link(known, memory_bytes_per_s=bytes_per_s, dispatch_s=dispatch_s)
    begin("network")
    if machines > 1:
        network = Link(*fit_link(measure_links.network_samples(devices)))
    else:
        network = link._replace(note="; one machine: network taken as the link")
    seconds = begin("decoding")
    overhead_s, memory_share = _decoding(own, dtype, bytes_per_s, memory_bytes=memory_bytes, seconds=seconds)
    seconds = begin("training")
    matmul_share = _training(own, dtype, flops_per_s, memory_bytes=memory_bytes, seconds=seconds)
    progress(FIGURES[-1], len(FIGURES), len(FIGURES))
    kind = devices[0].device_kind
    today = datetime.date.today().isoformat()
    return Hardware(
        name=f"{known.name if known else '-'.join(kind.lower().split())}-measured",
        machines=machines,
        devices_per_machine=per_machine,
        memory_bytes=memory_bytes,
        matmul_flops_per_s=flops_per_s,
        memory_bytes_per_s=bytes_per_s,
        link_bytes_per_s=link.bytes_per_s,
        network_bytes_per_s=network.bytes_per_s,
        host_bytes_per_s=host_bytes_per_s,
        link_latency_s=link.latency_s,
        network_latency_s=network.latency_s,
        layer_overhead_s=overhead_s,
        dispatch_overhead_s=dispatch_s,
        matmul_efficiency=matmul_share,
        memory_efficiency=memory_share,
        link_efficiency=1.0,  # the rate is what collectives reached
        usable_memory=0.95,  # of what the allocator has
        shared_compute=own[0].platform == "cpu",
        source=f"measured on {kind} x {len(devices)}, jax {jax.__version__}, {today}{link.note}{network.note}",
    )


def _machines(devices: Sequence[jax.Device]) -> tuple[int, int]:
    """Processes, and devices of each."""
    counts = dict.fromkeys(sorted({device.process_index for device in devices}), 0)
    for device in devices:
        counts[device.process_index] += 1
    if len(set(counts.values())) > 1:
        raise Refusal(f"processes have {counts} devices; machines are described by one number, give each as many")
    return len(counts), next(iter(counts.values()))


def _unmeasured_link(known: Hardware | None, *, memory_bytes_per_s: float, dispatch_s: float) -> Link:
    """Link of a device that is alone in its machine."""
    if known is None:
        return Link(dispatch_s, memory_bytes_per_s, "; one device: link taken to be as fast as its memory")
    rate = known.link_bytes_per_s * known.link_efficiency
    return Link(known.link_latency_s, rate, f"; one device: link as `--hardware {known.name}` has it")


def _decoding(
    own: Sequence[jax.Device], dtype: type, bytes_per_s: float, *, memory_bytes: float, seconds: float
) -> tuple[float, float]:
    """Seconds that a layer takes at least, and the share of the memory's rate.

    Both are read off a model that is nearly all overhead and one that is nearly all reading.
    """
    size = measure_decoder.choose_decoding(
        bytes_per_s=bytes_per_s, memory_bytes=memory_bytes, itemsize=jnp.dtype(dtype).itemsize, seconds=seconds
    )
    narrow = measure_decoder.NARROW if seconds >= 1 else measure_decoder.SHALLOW
    sizes = ((narrow, seconds / 10), (size, seconds))
    samples = [measure_decoder.decode_sample(own, size, dtype=dtype, seconds=each) for size, each in sizes]
    overhead_s, reached_bytes_per_s = fit_link(samples)
    return overhead_s, min(1.0, reached_bytes_per_s / bytes_per_s)


def _training(
    own: Sequence[jax.Device], dtype: type, flops_per_s: float, *, memory_bytes: float, seconds: float
) -> float:
    """Share of the matmul rate that training reaches."""
    size = measure_decoder.choose_training(
        flops_per_s=flops_per_s, memory_bytes=memory_bytes, itemsize=jnp.dtype(dtype).itemsize, seconds=seconds
    )
    model = measure_decoder.decoder(size.hidden, size.layers)
    flops = measure_decoder.training_flops(model, rows=size.rows, width=size.width)
    taken_s = measure_decoder.training_s(own, size, dtype=dtype, seconds=seconds)
    return min(1.0, flops / taken_s / flops_per_s)


def measured_rows(measured: Hardware, known: Hardware | None) -> list[Row]:
    """Measured hardware as rows for `tracking.SettingsTable`; every figure is of one device while all are busy.

    Args:
      known: The same number of devices by their datasheet; None if they are of no known kind.
    """
    rows: list[Row] = []
    for section, name, field, unit in _FIGURES:
        note = "" if known is None else f"{known.name}: {quantity(getattr(known, field), unit)}"
        rows.append((section, name, quantity(getattr(measured, field), unit), note))
    return rows


def quantity(value: float, unit: str) -> str:
    """Figure with three digits and a prefix: `312 TFLOP/s`, `25.7 us`; shares as `45 %`."""
    if unit == "%":
        return f"{value:.0%}".replace("%", " %")
    scale, prefix = next((each for each in _PREFIXES if value >= each[0]), _PREFIXES[-1])
    return f"{float(f'{value / scale:.3g}'):g} {prefix}{unit}"

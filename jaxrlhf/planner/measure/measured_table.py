"""Measured hardware as rows of a table, beside what is known of such devices."""

from jaxrlhf.planner.hardware import Hardware

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


def measured_rows(measured: Hardware, known: Hardware | None) -> list[Row]:
    """Rows for `tracking.SettingsTable`; every figure is of one device while all are busy.

    Args:
      known: The same number of devices by their datasheet; None if they are of no known kind.
    """
    rows: list[Row] = []
    for section, name, field, unit in _FIGURES:
        note = "" if known is None else f"{known.name}: {quantity(getattr(known, field), unit)}"
        rows.append((section, name, quantity(getattr(measured, field), unit), note))
    return rows


def quantity(value: float, unit: str) -> str:
    """Three digits and a prefix: `312 TFLOP/s`, `25.7 us`; shares as `45 %`."""
    if unit == "%":
        return f"{value:.0%}".replace("%", " %")
    scale, prefix = next((each for each in _PREFIXES if value >= each[0]), _PREFIXES[-1])
    return f"{float(f'{value / scale:.3g}'):g} {prefix}{unit}"

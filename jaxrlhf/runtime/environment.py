"""Environment variables that have to be set before JAX and transformers start; imported first, for its effect."""

import os
import re
from importlib.metadata import entry_points
from pathlib import Path

from jaxrlhf.runtime.xla_flags import GPU_FLAGS, TPU_FLAGS, with_flags


def cpu_devices() -> int:
    """Number of devices that the environment asks JAX to make of the processor."""
    forced = re.search(r"xla_force_host_platform_device_count=(\d+)", os.environ.get("XLA_FLAGS", ""))
    return int(os.environ.get("JAX_NUM_CPU_DEVICES") or (forced[1] if forced else 1))


_CHIP_FILES = ("/dev/nvidia0", "/dev/nvidiactl", "/dev/dxg", "/dev/kfd", "/dev/accel0", "/dev/vfio/0")
"""Device files of GPUs (the third of Windows' Linux, the fourth of AMD) and TPUs."""
_PCI_DEVICES = Path("/sys/bus/pci/devices")
_GOOGLE = "0x1ae0"
"""PCI vendor of TPUs."""


def _read(file: Path) -> str:
    """The text of a file, empty where it cannot be read."""
    try:
        return file.read_text().strip()
    except OSError:
        return ""


def chips_are_here() -> bool:
    """Return whether the machine has a GPU or TPU, or an installed plugin of JAX is for other chips."""
    others = [plugin for plugin in entry_points(group="jax_plugins") if "cuda" not in plugin.name]
    return (
        any(Path(file).exists() for file in _CHIP_FILES)
        or any(_read(vendor) == _GOOGLE for vendor in _PCI_DEVICES.glob("*/vendor"))
        or any(name in os.environ for name in ("JAX_FORCE_TPU_INIT", "PJRT_NAMES_AND_LIBRARY_PATHS"))
        or len(others) > 0
    )


# The compilers of `jaxrlhf[compile]` are plugins of JAX too, which would try them for chips at every start and print
# tracebacks where there are none.
if "JAX_PLATFORMS" not in os.environ and not chips_are_here():
    os.environ["JAX_PLATFORMS"] = "cpu"

# XLA:CPU sizes its thread pool from this. The collectives of several devices wait for each other for ever in a pool
# that is smaller; for one device a thread for each core is fastest, by a quarter on two cores.
if cpu_devices() > 1:
    os.environ.setdefault("NPROC", "32")

# Models run in JAX here; transformers, which reads tokenizers, would advise to install PyTorch.
os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")

# Only libtpu reads its own variable. XLA_FLAGS are read by all compilers, and libtpu ends a process at those of GPUs.
os.environ["LIBTPU_INIT_ARGS"] = with_flags(os.environ.get("LIBTPU_INIT_ARGS", ""), TPU_FLAGS)
if Path("/proc/driver/nvidia/version").exists():
    os.environ["XLA_FLAGS"] = with_flags(os.environ.get("XLA_FLAGS", ""), GPU_FLAGS)

"""Environment variables that must be set before JAX and transformers start; import this module first."""

import os
import re
from importlib.metadata import entry_points
from pathlib import Path

from jaxrlhf.runtime.xla_flags import GPU_FLAGS, TPU_FLAGS, with_flags


def cpu_devices() -> int:
    """Return the number of CPU devices that the environment requests of JAX."""
    forced = re.search(r"xla_force_host_platform_device_count=(\d+)", os.environ.get("XLA_FLAGS", ""))
    return int(os.environ.get("JAX_NUM_CPU_DEVICES") or (forced[1] if forced else 1))


_CHIP_FILES = ("/dev/nvidia0", "/dev/nvidiactl", "/dev/dxg", "/dev/kfd", "/dev/accel0", "/dev/vfio/0")
"""Device files of NVIDIA GPUs, of GPUs under WSL (`dxg`), of AMD GPUs (`kfd`) and of TPUs (`accel0`, `vfio/0`)."""
_PCI_DEVICES = Path("/sys/bus/pci/devices")
_GOOGLE = "0x1ae0"
"""PCI vendor of TPUs."""


def _read(file: Path) -> str:
    """Return the text of a file; empty if the file cannot be read."""
    try:
        return file.read_text().strip()
    except OSError:
        return ""


def chips_are_here() -> bool:
    """Return whether the machine has a GPU or TPU, or a JAX plugin or environment variable announces an accelerator."""
    others = [plugin for plugin in entry_points(group="jax_plugins") if "cuda" not in plugin.name]
    return (
        any(Path(file).exists() for file in _CHIP_FILES)
        or any(_read(vendor) == _GOOGLE for vendor in _PCI_DEVICES.glob("*/vendor"))
        or any(name in os.environ for name in ("JAX_FORCE_TPU_INIT", "PJRT_NAMES_AND_LIBRARY_PATHS"))
        or len(others) > 0
    )


# The compilers of `jaxrlhf[compile]` are JAX plugins too: JAX would look for their chips at every start, and print
# tracebacks on machines without such chips.
if "JAX_PLATFORMS" not in os.environ and not chips_are_here():
    os.environ["JAX_PLATFORMS"] = "cpu"

# XLA:CPU sizes its thread pool by NPROC. In a smaller pool the collectives of several devices deadlock. For one device
# one thread per core is fastest, by a quarter on two cores.
if cpu_devices() > 1:
    os.environ.setdefault("NPROC", "32")

# Models run in JAX here. transformers, used for tokenizers, would advise to install PyTorch.
os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")

# Only libtpu reads LIBTPU_INIT_ARGS. All compilers read XLA_FLAGS, and libtpu aborts the process on GPU flags.
os.environ["LIBTPU_INIT_ARGS"] = with_flags(os.environ.get("LIBTPU_INIT_ARGS", ""), TPU_FLAGS)
if Path("/proc/driver/nvidia/version").exists():
    os.environ["XLA_FLAGS"] = with_flags(os.environ.get("XLA_FLAGS", ""), GPU_FLAGS)

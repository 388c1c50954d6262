"""Environment variables that have to be set before JAX and transformers start; imported first, for its effect."""

import os
import re
from pathlib import Path

from jaxrlhf.runtime.xla_flags import GPU_FLAGS, TPU_FLAGS, with_flags


def cpu_devices() -> int:
    """Number of devices that the environment asks JAX to make of the processor."""
    forced = re.search(r"xla_force_host_platform_device_count=(\d+)", os.environ.get("XLA_FLAGS", ""))
    return int(os.environ.get("JAX_NUM_CPU_DEVICES") or (forced[1] if forced else 1))


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

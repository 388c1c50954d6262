"""Benchmark parts for one GPU; `scripts/tools/gpu_day.sh` runs them one after the other."""

import jaxrlhf  # noqa: F401  (sets the environment before JAX starts)

"""Parts of an afternoon on one GPU, which `scripts/tools/gpu_day.sh` runs one after the other."""

import jaxrlhf  # noqa: F401  (sets the environment before JAX starts)

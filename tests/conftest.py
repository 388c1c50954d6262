"""Eight CPU devices, strict JAX, checked annotations."""

import os

# XLA:CPU can deadlock when collectives of eight devices queue on few threads; the thread
# pool is sized from this variable, which has to be set before JAX starts.
os.environ["NPROC"] = "32"
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["JAX_ENABLE_COMPILATION_CACHE"] = "false"  # nothing of one test reaches another, or the user's own cache

from jaxtyping import install_import_hook

# Every annotated call in these rooms is checked while tests run. `batch` is left out: JAX
# rebuilds pytrees with arbitrary leaves.
_ARRAYS = ["blocks", "hybrid", "islands", "mesh", "offload", "overlap", "pool", "relayout", "rules", "transfer", "wire"]
_CHECKED = ["algos", "data", *(f"parallel.{module}" for module in _ARRAYS), "models", "rewards", "engine"]
install_import_hook([f"jaxrlhf.{room}" for room in _CHECKED], "beartype.beartype")

import jax  # noqa: E402 - after its environment is set and the hook is in place

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_rank_promotion", "raise")

"""XLA flags by backend, each with its purpose; `environment` sets the flags once, before JAX starts.

No flag changes a result. A flag in the user's environment keeps the user's value.

Source: MaxText's scripts for A3 (H100) and v5e, https://github.com/AI-Hypercomputer/maxtext.
"""

from collections.abc import Mapping
from importlib.metadata import version

_PIPELINED: Mapping[str, bool | str] = {
    # While a layer computes, gather the next layer's weights and sum the previous layer's gradients.
    "xla_gpu_enable_pipelined_all_gather": True,
    "xla_gpu_enable_pipelined_reduce_scatter": True,
    "xla_gpu_enable_pipelined_all_reduce": True,
}
"""Flags that XLA accepts before JAX 0.11 only."""

GPU_FLAGS: Mapping[str, bool | str] = {
    # Collectives start as early and end as late as their data allow, on a separate stream, alongside matrix products.
    "xla_gpu_enable_latency_hiding_scheduler": True,
    "xla_gpu_enable_highest_priority_async_stream": True,
    **(_PIPELINED if version("jaxlib") < "0.11" else {}),
    # The matrices of one layer are sent together: few large messages.
    "xla_gpu_all_gather_combine_threshold_bytes": "134217728",
    "xla_gpu_all_reduce_combine_threshold_bytes": "134217728",
    "xla_gpu_reduce_scatter_combine_threshold_bytes": "67108864",
    # Command buffers (CUDA graphs) for the small kernels of decoding; collectives stay outside, to overlap.
    "xla_gpu_enable_command_buffer": "FUSION,CUBLAS,CUBLASLT,CUSTOM_CALL",
}
"""Flags in XLA_FLAGS if an NVIDIA driver is installed; also compile options of programs for GPUs of other machines."""

TPU_FLAGS: Mapping[str, bool | str] = {
    # Collectives run alongside matrix products, in several steps. Fused all-gathers are left out: libtpu of JAX 0.12
    # warns of wrong results on chips other than v5e, and refuses to compile for them.
    "xla_enable_async_all_gather": True,
    "xla_tpu_enable_async_collective_fusion": True,
    "xla_tpu_enable_async_collective_fusion_multiple_steps": True,
    "xla_tpu_overlap_compute_collective_tc": True,
    # Gradient all-reduces over replicas are deferred to where they overlap with compute, also for unequal sizes.
    "xla_tpu_enable_data_parallel_all_reduce_opt": True,
    "xla_tpu_data_parallel_opt_different_sized_ops": True,
}
"""Flags in LIBTPU_INIT_ARGS, which only libtpu reads."""


def with_flags(given: str, flags: Mapping[str, bool | str]) -> str:
    """Return the value of an environment variable with the missing `flags` added."""
    own = [f"--{name}={_text(value)}" for name, value in flags.items() if f"--{name}=" not in given]
    return " ".join([given, *own]).strip()


def _text(value: bool | str) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)

"""Flags of XLA by backend, each with what it is for; `environment` sets them once, before JAX starts.

None changes a result. A flag that the user's environment names keeps the user's value.

Source: MaxText's scripts for A3 (H100) and v5e, https://github.com/AI-Hypercomputer/maxtext.
"""

from collections.abc import Mapping
from importlib.metadata import version

_PIPELINED: Mapping[str, bool | str] = {
    # In the loop over layers the next layer's weights are gathered, and the last one's gradients summed, meanwhile.
    "xla_gpu_enable_pipelined_all_gather": True,
    "xla_gpu_enable_pipelined_reduce_scatter": True,
    "xla_gpu_enable_pipelined_all_reduce": True,
}
"""Flags that XLA had until JAX 0.11."""

GPU_FLAGS: Mapping[str, bool | str] = {
    # Collectives start as early and end as late as their data allow, on a stream of their own, beside products.
    "xla_gpu_enable_latency_hiding_scheduler": True,
    "xla_gpu_enable_highest_priority_async_stream": True,
    **(_PIPELINED if version("jaxlib") < "0.11" else {}),
    # Matrices of one layer travel together: few large messages.
    "xla_gpu_all_gather_combine_threshold_bytes": "134217728",
    "xla_gpu_all_reduce_combine_threshold_bytes": "134217728",
    "xla_gpu_reduce_scatter_combine_threshold_bytes": "67108864",
    # Command buffers (CUDA graphs) for the small kernels of decoding; collectives stay out, where they overlap.
    "xla_gpu_enable_command_buffer": "FUSION,CUBLAS,CUBLASLT,CUSTOM_CALL",
}
"""Flags in XLA_FLAGS where an NVIDIA driver is, and options of programs that are compiled for GPUs elsewhere."""

TPU_FLAGS: Mapping[str, bool | str] = {
    # Collectives run beside products, in several steps.
    "xla_enable_async_all_gather": True,
    "xla_tpu_enable_async_collective_fusion": True,
    "xla_tpu_enable_async_collective_fusion_fuse_all_gather": True,
    "xla_tpu_enable_async_collective_fusion_multiple_steps": True,
    "xla_tpu_overlap_compute_collective_tc": True,
    # Sums of gradients over replicas are put off to where they can be overlapped, also those of unlike sizes.
    "xla_tpu_enable_data_parallel_all_reduce_opt": True,
    "xla_tpu_data_parallel_opt_different_sized_ops": True,
}
"""Flags in LIBTPU_INIT_ARGS, which only libtpu reads."""


def with_flags(given: str, flags: Mapping[str, bool | str]) -> str:
    """Value of an environment variable with flags added that it does not name."""
    own = [f"--{name}={_text(value)}" for name, value in flags.items() if f"--{name}=" not in given]
    return " ".join([given, *own]).strip()


def _text(value: bool | str) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)

"""Which attention kernels a process uses: the best of its backend that compute what `xla` computes.

A kernel is tried once, on small random arrays with the model's heads and scores, before anything is
compiled with it. One that fails or gives other numbers is replaced by `xla` with a warning.
"""

import functools
import math
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxrlhf.batch import Array
from jaxrlhf.models.attention import DECODE, ROWS, XLA, Attention, DecodeKernel, RowsKernel
from jaxrlhf.models.own_model import AnyModel, OwnModel
from jaxrlhf.models.scores import Scores

BEST: dict[str, tuple[RowsKernel, DecodeKernel]] = {"gpu": ("cudnn", "pallas"), "tpu": ("splash", "xla")}
"""By platform; others have `xla` alone."""

_WIDTH, _CAPACITY = 199, 700
"""Of the arrays: no multiple of any tile."""
_WINDOW = 45
"""Of scores that have one: it ends inside of segments and of tiles."""


def choose_attention(
    config: AnyModel,
    dtype: Any,
    mesh: Mesh,
    *,
    row_axes: tuple[str, ...],
    head_axes: tuple[str, ...],
    expert_axes: tuple[str, ...] = (),
    stage_axes: tuple[str, ...] = (),
    decodes: bool = False,
    wanted: Literal["auto", "xla"] = "auto",
) -> Attention:
    """The kernels for a model on a mesh. Call it outside of traced functions.

    Args:
      dtype: Of activations and of the cache.
      row_axes: Mesh axes that split rows (or slots).
      head_axes: Mesh axes that split heads.
      expert_axes: Mesh axes that divide experts.
      stage_axes: Mesh axes that divide the layers; only `xla` can be used inside one of several stages.
      decodes: Whether a decode kernel is needed as well.
      wanted: `xla` tries nothing.
    """
    platform = mesh.local_devices[0].platform
    split = Attention(mesh=mesh, row_axes=row_axes, head_axes=head_axes, expert_axes=expert_axes)
    if wanted == "xla" or platform not in BEST or isinstance(config, OwnModel):
        return XLA if config.experts is None else split
    rows, decode = BEST[platform]
    ways, stages = (math.prod(mesh.shape[axis] for axis in axes) for axes in (head_axes, stage_axes))
    heads = config.num_heads // ways, config.num_kv_heads // ways, config.head_dim
    name = jnp.dtype(dtype).name
    window = None if config.sliding_window is None else _WINDOW
    scores = Scores(config.score_divisor, config.attn_logit_softcapping, window)

    obstacle = "it does not run inside pipeline stages" if stages > 1 else None

    def usable(use: Literal["rows", "decode"], kernel: str) -> bool:
        if use == "decode" and config.latent is not None:
            return kernel == "xla" or _usable(use, kernel, platform, heads, scores, name, "it reads no latents")
        return kernel == "xla" or _usable(use, kernel, platform, heads, scores, name, obstacle)

    return replace(
        split,
        rows=rows if usable("rows", rows) else "xla",
        decode=decode if decodes and usable("decode", decode) else "xla",
    )


@functools.cache
def _usable(
    use: Literal["rows", "decode"],
    kernel: str,
    platform: str,
    heads: tuple[int, int, int],
    scores: Scores,
    dtype: str,
    obstacle: str | None,
) -> bool:
    """Whether a kernel can be used; warns, the first time it is asked, where it cannot."""
    objection = obstacle or _objection(use, kernel, platform, heads, scores, dtype)
    if objection is not None:
        warnings.warn(
            f"attention kernel {kernel!r} ({use}) is not used on {platform} for heads "
            f"{' x '.join(map(str, heads))} in {dtype}, but the slower 'xla': {objection}",
            RuntimeWarning,
            stacklevel=2,
        )
    return objection is None


def _objection(
    use: Literal["rows", "decode"],
    kernel: str,
    platform: str,
    heads: tuple[int, int, int],
    scores: Scores,
    dtype: str,
) -> str | None:
    """What speaks against a kernel: that it raises, or how far it is from `xla` in float32."""
    device = jax.local_devices(backend=platform)[0]
    table, problem = (ROWS, _rows_problem) if use == "rows" else (DECODE, _decode_problem)
    arrays, rest = problem(*heads)
    # Rounded before either kernel sees them, so that the difference is the kernel's own.
    arrays = [np.asarray(array, dtype) for array in arrays]
    # Half precision rounds weights, products and results in turn; what is wrong is far beyond it.
    tolerance = max(1e-4, 2 * float(jnp.finfo(dtype).eps))
    gradients = use == "rows"
    with jax.default_device(device), jax.default_matmul_precision("highest"):
        wide = [array.astype(np.float32) for array in arrays]
        exact = jax.device_get(_results(wide, rest, scores, kernel=table["xla"], gradients=gradients))
    try:
        with jax.default_device(device):
            ours = jax.device_get(_results(arrays, rest, scores, kernel=table[kernel], gradients=gradients))
    except Exception as error:  # whatever a backend, a driver or another JAX raises is a reason
        return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
    names = ("output", "gradient of queries", "gradient of keys", "gradient of values")
    for name, got, true in zip(names, ours, exact, strict=False):
        off = float(np.abs(np.float32(got) - true).max() / np.abs(true).max())
        if not off <= tolerance:  # NaN is not
            return f"its {name} is off by {off:.1e} of the largest entry, more than {tolerance:.1e}"
    return None


@functools.partial(jax.jit, static_argnames=("kernel", "gradients"))
def _results(
    arrays: list[Array], rest: Array, scores: Scores, *, kernel: Callable[..., Array], gradients: bool
) -> tuple[Array, ...]:
    """The kernel's output and, if asked for, the gradients of a weighted sum of it."""
    if not gradients:
        return (kernel(*arrays, rest, scores),)
    out, pull = jax.vjp(lambda *arrays: kernel(*arrays, rest, scores), *arrays)
    # Neither constant nor symmetric, or errors could cancel.
    weight = jnp.cos(jnp.arange(out.size, dtype=jnp.float32)).reshape(out.shape).astype(out.dtype)
    return out, *pull(weight)


def _rows_problem(heads: int, kv_heads: int, head_dim: int) -> tuple[list[np.ndarray], np.ndarray]:
    """Two rows: three segments and padding; one segment."""
    draw = np.random.default_rng(0).standard_normal
    shapes = [(2, _WIDTH, count, head_dim) for count in (heads, kv_heads, kv_heads)]
    segment_RW = np.ones((2, _WIDTH), np.int32)
    segment_RW[0] = np.searchsorted([70, 71, 150], np.arange(_WIDTH), side="right") + 1
    segment_RW[0, 180:] = 0
    return [draw(shape, np.float32) for shape in shapes], segment_RW


def _decode_problem(heads: int, kv_heads: int, head_dim: int) -> tuple[list[np.ndarray], np.ndarray]:
    """Five slots: from one filled entry to all, and one whose position has run past its cache."""
    draw = np.random.default_rng(0).standard_normal
    position_B = np.array([0, 63, 512, _CAPACITY - 1, _CAPACITY + 9], np.int32)
    slots = len(position_B)
    shapes = [(slots, heads, head_dim), (slots, kv_heads, head_dim, _CAPACITY), (slots, kv_heads, _CAPACITY, head_dim)]
    return [draw(shape, np.float32) for shape in shapes], position_B

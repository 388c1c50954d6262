"""Choice of attention kernels: the best kernels of a backend that compute the same as `xla`.

A kernel is tested once, on small random arrays with the model's heads and scores, before programs are compiled with
it. A kernel that fails or returns other numbers is replaced by `xla` with a warning. Processes that share a mesh use
a kernel only if it passes in all of them. Otherwise they would compile programs that wait for each other.

If programs are only compiled for devices that are not present, a kernel is traced and not run.

A cache is stored in pages if a kernel reads pages, so that memory follows the number of tokens. The `xla` kernel
copies every page that it reads. With `xla` a cache is therefore stored in pages only on request.
"""

import functools
import math
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxrlhf.batch import Array
from jaxrlhf.config import Refusal
from jaxrlhf.models.attention.attention import DECODE, LANES, PAGES, ROWS, WIDEST, WITHOUT_SINKS
from jaxrlhf.models.attention.head_exchange import exchanged_heads
from jaxrlhf.models.attention.pages import PAGE_TOKENS
from jaxrlhf.models.attention.score_mod import ScoreMod
from jaxrlhf.models.causal_lm import AnyModel, CausalLM
from jaxrlhf.models.config import ModelConfig
from jaxrlhf.models.execution import ONE_DEVICE, DecodeKernel, Execution, PagesKernel, RowsKernel
from jaxrlhf.models.pipeline import pipeline_over
from jaxrlhf.sharding.described import are_here

BEST: dict[str, tuple[RowsKernel, DecodeKernel, PagesKernel]] = {
    "gpu": ("flash", "pallas", "pallas"),
    "tpu": ("splash", "xla", "ragged"),
}
"""Kernels of rows, of decoding and of pages by platform; other platforms have only `xla`."""

_Use = Literal["rows", "decode", "pages"]
_Problem = tuple[list[np.ndarray], tuple[np.ndarray, ...]]

_WIDTH, _CAPACITY, _SHARED_CAPACITY = 199, 700, 2112
"""Width of rows and capacity of slots that kernels are tested on, no multiples of any tile; then the capacity in pages.

The capacity in pages includes a prompt that is read once for several slots.
"""
_WINDOW = 45
"""Window that kernels are tested with: it ends inside of segments and of tiles."""


def choose_execution(
    config: AnyModel,
    dtype: Any,
    mesh: Mesh,
    *,
    row_axes: tuple[str, ...],
    head_axes: tuple[str, ...],
    expert_axes: tuple[str, ...] = (),
    stage_axes: tuple[str, ...] = (),
    weight_axes: tuple[str, ...] = (),
    token_axes: tuple[str, ...] = (),
    cache_axes: tuple[str, ...] = (),
    remat: bool = False,
    decodes: bool = False,
    wanted: Literal["auto", "xla"] = "auto",
    cache: Literal["auto", "slots", "pages"] = "slots",
) -> Execution:
    """Return the execution of a model on a mesh, with kernels that compute correctly there. Call it outside of tracing.

    Args:
      dtype: Dtype of activations and of the cache.
      row_axes, head_axes, expert_axes, token_axes, cache_axes, remat: See `Execution`; axes may be of one device.
      stage_axes: Mesh axes that divide the layers.
      weight_axes: Last axes of `row_axes`, which also split each layer's weights.
      decodes: True if a decode kernel is needed as well.
      wanted: `xla` tests no other kernel.
      cache: Layout of the cache if a decode kernel is needed; `auto` is pages if a kernel that reads pages is usable.

    Raises:
      Refusal: Pages are requested for a model or mesh without support for pages.
    """
    platform = mesh.devices.flat[0].platform  # described devices may all belong to other processes
    all_axes = head_axes, token_axes, weight_axes, cache_axes
    ways, context, split_weights, shared = (math.prod(mesh.shape[axis] for axis in axes) for axes in all_axes)
    kv_ways = 1 if isinstance(config, CausalLM) or config.latent is not None else ways  # latents serve all heads
    pipeline = pipeline_over(mesh, stage_axes, row_axes=row_axes, weight_axes=weight_axes) if stage_axes else None
    plain = Execution(dtype, remat, kv_ways=kv_ways, pipeline=pipeline)
    split = replace(plain, mesh=mesh, row_axes=row_axes, head_axes=head_axes, expert_axes=expert_axes)
    token_axes, cache_axes = token_axes if context > 1 else (), cache_axes if shared > 1 else ()
    width_axes = (*token_axes, *weight_axes) if split_weights * context > 1 else ()
    split = replace(split, token_axes=token_axes, width_axes=width_axes, cache_axes=cache_axes)
    pageless = _pageless(config, split)
    if cache == "pages" and decodes and pageless is not None:
        raise Refusal(f"cache='pages' is not supported, because {pageless}; set 'auto' or 'slots'")
    if wanted == "xla" or platform not in BEST or isinstance(config, CausalLM):
        if cache == "pages" and decodes:
            return replace(split, pages_kernel="xla")
        return plain if config.experts is None and not width_axes and not cache_axes else split
    rows, decode, pages = BEST[platform]
    name = jnp.dtype(dtype).name
    problems = [_scores_of_device(layer, split, ways, context) for _, _, layer in config.kinds]

    def usable(use: _Use, kernel: str, obstacle: str | None = None) -> bool:
        if kernel == "xla":
            return True
        here = are_here(list(mesh.devices.flat))
        trials = [_Trial(use, kernel, platform, *scores, name) for scores in problems]
        usable_here = all(_usable(trial, obstacle, here) for trial in trials)
        everywhere = _in_all_processes(usable_here, mesh)
        if usable_here and not everywhere:
            trials[0].warn("another process of the mesh does not support it")
        return everywhere

    no_sinks = _no_sinks(config, rows)
    paged: PagesKernel | None = None
    if decodes and cache != "slots" and pageless is None:
        paged = pages if usable("pages", pages, _no_pages(config, pages)) else "xla" if cache == "pages" else None
    no_latents = _no_sinks(config, decode) or (
        None if config.latent is None else "it does not support latent attention"
    )
    both_ways = config.vision is not None and config.vision.both_ways
    causal = no_sinks or (
        "it is causal, but tokens of an image attend to later tokens of the image" if both_ways else None
    )
    return replace(
        split,
        rows_kernel=rows if usable("rows", rows, causal) else "xla",
        decode_kernel=decode if decodes and paged is None and usable("decode", decode, no_latents) else "xla",
        pages_kernel=paged,
    )


def _scores_of_device(
    layer: ModelConfig, execution: Execution, ways: int, context: int
) -> tuple[tuple[int, int, int], ScoreMod]:
    """Return the numbers and width of heads on a device in layers of one kind, and their scores."""
    kv_heads = layer.num_kv_heads * execution.kv_copies(layer.num_kv_heads)
    heads = *_heads_of_device(layer.num_heads // ways, kv_heads // ways, context), layer.head_dim
    window = None if layer.sliding_window is None else _WINDOW
    return heads, ScoreMod(layer.score_divisor, layer.attn_logit_softcapping, window)


def _heads_of_device(heads: int, kv_heads: int, context: int) -> tuple[int, int]:
    """Return how many query heads and key-value heads a device attends with, from the heads of its tensor shard."""
    inside = exchanged_heads(kv_heads, heads // kv_heads, context)
    return inside.heads // context, inside.kv_heads // context


def _pageless(config: AnyModel, execution: Execution = ONE_DEVICE) -> str | None:
    """Return the reason that a cache cannot be stored in pages; None if it can."""
    if isinstance(config, CausalLM):
        return "a user-defined model has its own cache"
    if config.latent is not None:
        return "latent attention has no cache in pages"
    if config.linear is not None:
        return "linear attention has no cache in pages"
    if config.full_heads is not None:
        return "layers with different heads have no cache in pages"
    if execution.stages > 1:
        return "layers split over stages have their cache in slots"
    return (
        "devices that split the positions of a sequence have their cache in slots" if execution.cache_ways > 1 else None
    )


def _no_sinks(config: ModelConfig, kernel: str) -> str | None:
    return "it does not support attention sinks" if config.attention_sinks and kernel in WITHOUT_SINKS else None


def _no_pages(config: ModelConfig, kernel: PagesKernel) -> str | None:
    too_wide = config.head_dim > WIDEST.get(kernel, config.head_dim)
    return _no_sinks(config, kernel) or (f"it supports head_dim up to {WIDEST[kernel]}" if too_wide else None)


def uses_pages(config: ModelConfig, platform: str | None, *, cache: Literal["auto", "slots", "pages"]) -> bool:
    """Return whether a cache is expected to be in pages, without tests of kernels and without pipeline stages."""
    if cache == "slots" or _pageless(config) is not None:
        return False
    return cache == "pages" or (platform in BEST and _no_pages(config, BEST[platform][2]) is None)


class _Trial(NamedTuple):
    """Test of a kernel: query heads, key-value heads and head width on a device, scores, and dtype."""

    use: _Use
    kernel: str
    platform: str
    heads: tuple[int, int, int]
    score_mod: ScoreMod
    dtype: str

    def warn(self, objection: str) -> None:
        """Warn that the kernel is not used."""
        warnings.warn(
            f"attention kernel {self.kernel!r} ({self.use}) is not used on {self.platform} for heads "
            f"{' x '.join(map(str, self.heads))} in {self.dtype}, so attention is slower: {objection}",
            RuntimeWarning,
            stacklevel=2,
        )


@functools.cache
def _usable(trial: _Trial, obstacle: str | None, devices_here: bool) -> bool:
    """Return whether a kernel can be used. The first call warns if it cannot."""
    objection = obstacle or _objection(trial, devices_here)
    if objection is not None:
        trial.warn(objection)
    return objection is None


def _in_all_processes(holds: bool, mesh: Mesh) -> bool:
    """Return whether `holds` is true in every process that runs devices of the mesh; all of them must call this."""
    if not mesh.is_multi_process or not are_here(list(mesh.devices.flat)):
        return holds
    by_device = NamedSharding(mesh, PartitionSpec(mesh.axis_names))
    held = jax.make_array_from_callback((mesh.size,), by_device, lambda _: np.array([holds]))
    return bool(jax.jit(jnp.all, out_shardings=NamedSharding(mesh, PartitionSpec()))(held))


def _objection(trial: _Trial, devices_here: bool) -> str | None:
    """Return the reason not to use a kernel: it raises, or is too far from `xla` in float32. None if it is correct."""
    table, problem = _TRIED[trial.use]
    arrays, rest = problem(*trial.heads)
    if trial.use == "pages":
        arrays = [_wide(array, LANES.get(trial.kernel, 1)) for array in arrays]
    # Inputs are rounded before either kernel gets them, so that any difference comes from the kernel.
    arrays = [np.asarray(array, trial.dtype) for array in arrays]
    # Half precision rounds weights, products and results in turn; errors of wrong kernels are far larger.
    tolerance = max(1e-4, 2 * float(jnp.finfo(trial.dtype).eps))
    results = partial(_results, gradients=trial.use == "rows")
    device = jax.local_devices(backend=trial.platform)[0] if devices_here else None
    try:
        if device is None:
            jax.eval_shape(partial(results, kernel=table[trial.kernel]), arrays, rest, trial.score_mod)
            return None
        with jax.default_device(device):
            ours = jax.device_get(results(arrays, rest, trial.score_mod, kernel=table[trial.kernel]))
    except Exception as error:  # any error of a backend, a driver or another JAX version is a reason
        return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
    # Compilation for a CPU takes a second, and several seconds for an accelerator.
    with jax.default_device(_processor() or device), jax.default_matmul_precision("highest"):
        wide = [array.astype(np.float32) for array in arrays]
        exact = jax.device_get(results(wide, rest, trial.score_mod, kernel=table["xla"]))
    names = ("output", "gradient of queries", "gradient of keys", "gradient of values")
    for name, got, true in zip(names, ours, exact, strict=False):
        off = float(np.abs(np.float32(got) - true).max() / np.abs(true).max())
        if not off <= tolerance:  # also true for NaN
            return f"its {name} is off by {off:.1e} of the largest entry, more than {tolerance:.1e}"
    return None


def _processor() -> jax.Device | None:
    """Return the first CPU device; None if JAX_PLATFORMS excludes CPU."""
    try:
        return jax.local_devices(backend="cpu")[0]
    except RuntimeError:
        return None


@functools.partial(jax.jit, static_argnames=("kernel", "gradients"))
def _results(
    arrays: list[Array], rest: tuple[Array, ...], score_mod: ScoreMod, *, kernel: Callable[..., Array], gradients: bool
) -> tuple[Array, ...]:
    """Compute the kernel's output and, if requested, the gradients of a weighted sum of it."""
    if not gradients:
        return (kernel(*arrays, *rest, score_mod),)
    out, pull = jax.vjp(lambda *arrays: kernel(*arrays, *rest, score_mod), *arrays)
    # Weights are neither constant nor symmetric; otherwise errors could cancel.
    weight = jnp.cos(jnp.arange(out.size, dtype=jnp.float32)).reshape(out.shape).astype(out.dtype)
    return out, *pull(weight)


def _rows_problem(heads: int, kv_heads: int, head_dim: int) -> _Problem:
    """Build a test of two rows: three segments and padding; one segment."""
    draw = np.random.default_rng(0).standard_normal
    shapes = [(2, _WIDTH, count, head_dim) for count in (heads, kv_heads, kv_heads)]
    segment_RW = np.ones((2, _WIDTH), np.int32)
    segment_RW[0] = np.searchsorted([70, 71, 150], np.arange(_WIDTH), side="right") + 1
    segment_RW[0, 180:] = 0
    return [draw(shape, np.float32) for shape in shapes], (segment_RW,)


def _decode_problem(heads: int, kv_heads: int, head_dim: int) -> _Problem:
    """Build a test of five slots: from one filled entry to all, and one slot whose position has run past its cache."""
    draw = np.random.default_rng(0).standard_normal
    position_B = np.array([0, 63, 512, _CAPACITY - 1, _CAPACITY + 9], np.int32)
    slots = len(position_B)
    shapes = [(slots, heads, head_dim), (slots, kv_heads, head_dim, _CAPACITY), (slots, kv_heads, _CAPACITY, head_dim)]
    return [draw(shape, np.float32) for shape in shapes], (position_B,)


def _pages_problem(heads: int, kv_heads: int, head_dim: int) -> _Problem:
    """Build a test of four slots, from one filled entry to all, in random pages; three share a prompt of many pages."""
    rng = np.random.default_rng(0)
    columns, pages = _SHARED_CAPACITY // PAGE_TOKENS, 96
    newest_B = np.array([0, 63, 1600, columns * PAGE_TOKENS - 1], np.int32)
    table_BQ = rng.integers(0, pages, (len(newest_B), columns)).astype(np.int32)
    table_BQ[1:, :41] = table_BQ[1, :41]
    shapes = [(len(newest_B), heads, head_dim), (pages, PAGE_TOKENS, 2 * kv_heads, head_dim)]
    return [rng.standard_normal(shape, np.float32) for shape in shapes], (table_BQ, newest_B)


def _wide(array: np.ndarray, multiple: int) -> np.ndarray:
    """Pad heads to their width in pages."""
    return np.pad(array, [(0, 0)] * (array.ndim - 1) + [(0, -array.shape[-1] % multiple)])


_TRIED: dict[_Use, tuple[dict[str, Callable[..., Array]], Callable[[int, int, int], _Problem]]] = {
    "rows": (ROWS, _rows_problem),
    "decode": (DECODE, _decode_problem),
    "pages": (PAGES, _pages_problem),
}
"""Kernels of each use, and the function that builds their test: arrays, and the rest of the arguments."""

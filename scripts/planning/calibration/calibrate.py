"""Calibration: measures the available devices as `Hardware`, and the share of their rates that the decoder reaches.

For every figure all devices of this process are busy at once, as in an SPMD program. So CPU devices, which share a
processor, are measured with their share of the processor; `shared_compute` records that.
"""

import datetime
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxrlhf import models
from jaxrlhf.batch import Params
from jaxrlhf.config import Layout, Refusal, Rollout
from jaxrlhf.engine import programs
from jaxrlhf.engine.compiled import EngineShardings
from jaxrlhf.models.config import ModelConfig
from jaxrlhf.models.memory import training_activation_bytes
from jaxrlhf.planner.cost.cost import head_flops, layer_flops
from jaxrlhf.planner.cost.memory import cache_bytes_per_token
from jaxrlhf.planner.hardware import MEASURED, Hardware, hardware, recognise
from jaxrlhf.sharding.mesh import BATCH_AXES, SLOT_AXES, mesh_of
from jaxrlhf.sharding.rules import cast_shapes
from scripts.planning.calibration import measure
from scripts.planning.calibration.measure import CALLS, RateSample, fit_link, timed

Progress = Callable[[str, int, int], None]
"""Callback with `(figure, done, total)`, called before each figure and after the last."""

FIGURES = ("program start", "matrix products", "memory", "host", "links", "network", "decoding", "training")

TOKENS = Rollout.decode_tokens_per_dispatch  # tokens of each slot in one call of the decode program
EXPECTED_SHARE = 1 / 3  # expected share of the devices' rates; only used to choose sizes
MODEL_SHARE = 1 / 2  # largest share of a device's memory for a model and its activations or cache

_PREFIXES = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"), (1.0, ""), (1e-3, "m"), (1e-6, "u"))
_ROWS = (
    ("compute", "matrix products", "matmul_flops_per_s", "FLOP/s"),
    ("compute", "share in training", "matmul_efficiency", "%"),
    ("memory", "size", "memory_bytes", "B"),
    ("memory", "reading", "memory_bytes_per_s", "B/s"),
    ("memory", "share in decoding", "memory_efficiency", "%"),
    ("links", "inside a machine", "link_bytes_per_s", "B/s"),
    ("links", "latency of a step", "link_latency_s", "s"),
    ("links", "between machines", "network_bytes_per_s", "B/s"),
    ("links", "latency of a step between machines", "network_latency_s", "s"),
    ("links", "to host memory", "host_bytes_per_s", "B/s"),
    ("overhead", "of a layer", "layer_overhead_s", "s"),
    ("overhead", "of a program", "dispatch_overhead_s", "s"),
)


class DecoderSize(NamedTuple):
    """Size of a test decoder, and of the work of a call on each device.

    Attributes:
      rows: Number of rows, or of slots.
      width: Number of tokens of a row, or of positions of a slot's cache.
    """

    hidden: int
    layers: int
    rows: int
    width: int

    @property
    def model(self) -> ModelConfig:
        """Decoder of usual proportions, with half as many key-value heads as heads if there are several."""
        hidden = self.hidden
        head_dim = min(128 if hidden >= 1024 else 64, hidden)
        heads = hidden // head_dim
        sizes = (8 * hidden, hidden, 3 * hidden, self.layers, heads, max(1, heads // 2), head_dim)
        return ModelConfig("llama", *sizes, tie_embeddings=True)


TRAININGS = tuple(
    DecoderSize(*numbers)
    for numbers in (
        (64, 2, 1, 64), (128, 4, 1, 128), (256, 4, 1, 256), (512, 6, 1, 512), (1024, 8, 4, 1024), (2048, 8, 8, 1024),
    )
)  # fmt: skip
NARROW = DecoderSize(64, 16, 4, 64)
"""Size whose layers take little more than the fixed overhead of a layer."""
SHALLOW = DecoderSize(64, 2, 4, 64)
"""Size as narrow as `NARROW` with fewer layers: compiles faster, but work outside the layers has a larger share."""
DECODINGS = tuple(
    DecoderSize(*numbers)
    for numbers in (
        (128, 2, 4, 128), (256, 4, 8, 128), (512, 8, 8, 256), (1024, 12, 16, 512), (2048, 16, 32, 1024),
        (4096, 16, 32, 2048),
    )
)  # fmt: skip


class Link(NamedTuple):
    """Connection between devices, with a note if it was not measured."""

    latency_s: float
    bytes_per_s: float
    note: str = ""


def datasheet(devices: Sequence[jax.Device]) -> Hardware | None:
    """Return the datasheet figures of devices, for the same number of machines; None for an unknown kind."""
    name = recognise(devices[0].device_kind, devices[0].platform)
    machines, per_machine = _machines(devices)
    return None if name is None else hardware(f"{name}x{machines}x{per_machine}")


def calibrate(devices: Sequence[jax.Device], *, seconds_per_figure: float, progress: Progress) -> Hardware:
    """Measure devices of one kind.

    With several processes each process has to call this; the network is measured between processes.

    Args:
      devices: Devices of all processes, the same number of each.
      seconds_per_figure: Approximate seconds for each of `FIGURES`, without compilation; sizes are chosen to fit.

    Raises:
      Refusal: Seconds are not above 0, or processes have different numbers of devices.
    """
    if not seconds_per_figure > 0:
        raise Refusal(f"seconds_per_figure must be above 0, got {seconds_per_figure}")
    machines, per_machine = _machines(devices)
    own = [device for device in devices if device.process_index == jax.process_index()]
    dtype = jnp.float32 if own[0].platform == "cpu" else jnp.bfloat16
    known, memory_bytes = datasheet(devices), measure.device_memory_bytes(own)

    def begin(figure: str) -> float:
        progress(figure, FIGURES.index(figure), len(FIGURES))
        return seconds_per_figure

    dispatch_s = measure.dispatch_s(own, seconds=begin("program start") / 10)
    seconds = begin("matrix products")
    flops_per_s = measure.matmul_flops_per_s(own, dtype=dtype, memory_bytes=memory_bytes, seconds=seconds)
    bytes_per_s = measure.memory_bytes_per_s(own, memory_bytes=memory_bytes, seconds=begin("memory"))
    host_bytes_per_s = measure.host_bytes_per_s(own, memory_bytes=memory_bytes, seconds=begin("host"))
    if per_machine > 1:
        link = Link(*fit_link(measure.link_samples(own, memory_bytes=memory_bytes, seconds=begin("links"))))
    elif known is None:
        link = Link(dispatch_s, bytes_per_s, "; one device: link taken to be as fast as its memory")
    else:
        rate, note = known.link_bytes_per_s * known.link_efficiency, f"link as `--hardware {known.name}` has it"
        link = Link(known.link_latency_s, rate, f"; one device: {note}")
    begin("network")
    if machines > 1:
        network = Link(*fit_link(measure.network_samples(devices)))
    else:
        network = link._replace(note="; one machine: network taken as the link")
    seconds = begin("decoding")
    overhead_s, memory_share = _decoding(own, dtype, bytes_per_s, memory_bytes=memory_bytes, seconds=seconds)
    seconds = begin("training")
    matmul_share = _training(own, dtype, flops_per_s, memory_bytes=memory_bytes, seconds=seconds)
    progress(FIGURES[-1], len(FIGURES), len(FIGURES))
    kind, today = devices[0].device_kind, datetime.date.today().isoformat()
    return Hardware(
        name=f"{known.name if known else '-'.join(kind.lower().split())}{MEASURED}",
        machines=machines,
        devices_per_machine=per_machine,
        memory_bytes=memory_bytes,
        matmul_flops_per_s=flops_per_s,
        memory_bytes_per_s=bytes_per_s,
        link_bytes_per_s=link.bytes_per_s,
        network_bytes_per_s=network.bytes_per_s,
        host_bytes_per_s=host_bytes_per_s,
        link_latency_s=link.latency_s,
        network_latency_s=network.latency_s,
        layer_overhead_s=overhead_s,
        dispatch_overhead_s=dispatch_s,
        matmul_efficiency=matmul_share,
        memory_efficiency=memory_share,
        link_efficiency=1.0,  # the measured rate is the rate that collectives reach
        usable_memory=0.95,  # share of the allocator's memory
        shared_compute=own[0].platform == "cpu",
        source=f"measured on {kind} x {len(devices)}, jax {jax.__version__}, {today}{link.note}{network.note}",
    )


def _machines(devices: Sequence[jax.Device]) -> tuple[int, int]:
    """Return the number of processes, and the number of devices of each process."""
    counts = dict.fromkeys(sorted({device.process_index for device in devices}), 0)
    for device in devices:
        counts[device.process_index] += 1
    if len(set(counts.values())) > 1:
        raise Refusal(f"processes have {counts} devices; machines are described by one number, give each as many")
    return len(counts), next(iter(counts.values()))


def measured_rows(measured: Hardware, known: Hardware | None) -> list[tuple[str, str, object, str]]:
    """Return measured hardware as rows for `tracking.SettingsTable`; figures are of one device while all are busy.

    Args:
      known: Datasheet figures of the same number of devices; None for an unknown kind.
    """
    rows: list[tuple[str, str, object, str]] = []
    for section, name, field, unit in _ROWS:
        note = "" if known is None else f"{known.name}: {quantity(getattr(known, field), unit)}"
        rows.append((section, name, quantity(getattr(measured, field), unit), note))
    return rows


def quantity(value: float, unit: str) -> str:
    """Return a figure as text with three digits and a prefix: `312 TFLOP/s`, `25.7 us`; shares as `45 %`."""
    if unit == "%":
        return f"{value:.0%}".replace("%", " %")
    scale, prefix = next((each for each in _PREFIXES if value >= each[0]), _PREFIXES[-1])
    return f"{float(f'{value / scale:.3g}'):g} {prefix}{unit}"


# Shares that the decoder reaches. Every device runs a copy of the model on its own rows, without collectives.


def _decoding(
    own: Sequence[jax.Device], dtype: type, bytes_per_s: float, *, memory_bytes: float, seconds: float
) -> tuple[float, float]:
    """Measure the fixed overhead of a layer in seconds, and the share of the memory rate that decoding reaches.

    Both are fitted to a model that is nearly all overhead and a model that is nearly all memory reads.
    """
    room: Any = {"memory_bytes": memory_bytes, "itemsize": jnp.dtype(dtype).itemsize, "seconds": seconds}
    size = choose_decoding(bytes_per_s=bytes_per_s, **room)
    sizes = ((NARROW if seconds >= 1 else SHALLOW, seconds / 10), (size, seconds))
    overhead_s, reached = fit_link([decode_sample(own, size, dtype=dtype, seconds=each) for size, each in sizes])
    return overhead_s, min(1.0, reached / bytes_per_s)


def _training(
    own: Sequence[jax.Device], dtype: type, flops_per_s: float, *, memory_bytes: float, seconds: float
) -> float:
    """Measure the share of the matmul rate that training reaches."""
    room: Any = {"memory_bytes": memory_bytes, "itemsize": jnp.dtype(dtype).itemsize, "seconds": seconds}
    size = choose_training(flops_per_s=flops_per_s, **room)
    return min(1.0, training_flops(size) / training_s(own, size, dtype=dtype, seconds=seconds) / flops_per_s)


def training_flops(size: DecoderSize) -> float:
    """Return the FLOPs of a forward pass and a backward pass (twice a forward pass), without masked scores."""
    model, tokens = size.model, float(size.rows * size.width)
    layers = size.layers * layer_flops(model, tokens=tokens, context=size.width / 2)
    return 3 * (layers + head_flops(model, "lm", tokens=tokens))


def decode_bytes(size: DecoderSize, *, itemsize: int) -> float:
    """Return the bytes read to decode one token of every slot: layers and head once, and the whole cache."""
    model = size.model
    weights = size.layers * (model.attention_parameters + model.mlp_parameters()) + model.head_parameters("lm")
    cache = size.rows * size.width * cache_bytes_per_token(model, Layout(), itemsize=itemsize)
    return weights * itemsize + cache


def choose_training(*, flops_per_s: float, memory_bytes: float, itemsize: int, seconds: float) -> DecoderSize:
    """Return the largest training size expected to fit into the seconds and the memory; at least the smallest."""

    def needed(size: DecoderSize) -> tuple[float, float]:
        sizes: Any = {"tokens": float(size.rows * size.width), "row_tokens": size.width, "itemsize": 4}  # as in float32
        kept = training_activation_bytes(size.model, "lm", Layout(), **sizes, remat=False)
        held = kept + size.model.num_parameters() * (4 + 4 + itemsize)
        return CALLS * training_flops(size) / (flops_per_s * EXPECTED_SHARE), held

    return _largest(TRAININGS, needed, seconds, memory_bytes)


def choose_decoding(*, bytes_per_s: float, memory_bytes: float, itemsize: int, seconds: float) -> DecoderSize:
    """Return the largest decoding size expected to fit into the seconds and the memory; at least the smallest."""

    def needed(size: DecoderSize) -> tuple[float, float]:
        read = decode_bytes(size, itemsize=itemsize)
        # In addition to the bytes read there is a copy of the layers, unstacked.
        held = read + size.model.num_parameters() * itemsize
        return CALLS * TOKENS * read / (bytes_per_s * EXPECTED_SHARE), held

    return _largest(DECODINGS, needed, seconds, memory_bytes)


def _largest(
    sizes: Sequence[DecoderSize],
    needed: Callable[[DecoderSize], tuple[float, float]],
    seconds: float,
    memory_bytes: float,
) -> DecoderSize:
    """Return the last size that fits into the seconds and the memory; the first size if none fits."""
    chosen = sizes[0]
    for size in sizes:
        needed_s, held_bytes = needed(size)
        if needed_s <= seconds and held_bytes <= memory_bytes * MODEL_SHARE:
            chosen = size
    return chosen


def training_s(devices: Sequence[jax.Device], size: DecoderSize, *, dtype: Any, seconds: float) -> float:
    """Measure the seconds of a forward and backward pass of every device over its rows, without rematerialization."""
    mesh, model = mesh_of({"data": len(devices)}, devices), size.model
    split, whole = PartitionSpec(BATCH_AXES), PartitionSpec()
    token_RW = _tokens(mesh, (len(devices) * size.rows, size.width), model)

    def loss(params: Params, token_RW: jax.Array) -> jax.Array:
        position_RW = jnp.broadcast_to(jnp.arange(size.width), token_RW.shape)
        hidden_RWD = models.hidden_states(
            params, model, token_RW, position_RW, jnp.ones_like(token_RW), execution=models.Execution(dtype)
        ).hidden_RWD
        return -models.token_logp(params, model, hidden_RWD, token_RW).logp.mean()

    def gradient(params: Params, token_RW: jax.Array) -> Params:
        return jax.tree.map(lambda leaf: leaf[None], jax.grad(loss)(params, token_RW))

    # A gradient per device: a single gradient of all rows would need a collective, which must not be timed.
    program = jax.jit(jax.shard_map(gradient, mesh=mesh, in_specs=(whole, split), out_specs=split, check_vma=False))
    params = _params(mesh, model, jnp.float32)
    return timed(lambda: program(params, token_RW), seconds=seconds)


def decode_sample(devices: Sequence[jax.Device], size: DecoderSize, *, dtype: Any, seconds: float) -> RateSample:
    """Time the engine's decode program for one token of every slot; the steps of the sample are the layers."""
    mesh, model = mesh_of({"data": len(devices)}, devices), size.model
    shape = programs.Shape(
        config=model,
        replicas=len(devices),
        most_stop_tokens=1,
        tokens_per_dispatch=TOKENS,
        execution=models.Execution(dtype),
    )
    layout = EngineShardings(mesh, SLOT_AXES, None, None)
    count = size.rows * len(devices)

    def begun() -> tuple[Any, programs.Slots]:
        slots = programs.empty_slots(slots=count, shape=shape)
        endless_B, cached_B = jnp.full_like(slots.limit_B, 2**30), slots.cached_B + size.width // 2
        slots = slots._replace(active_B=~slots.active_B, cached_B=cached_B, limit_B=endless_B)
        return programs.empty_cache(slots=count, capacity=size.width, shape=shape), slots

    cached = layout.of_slots(jax.eval_shape(begun)[0])
    cache, slots = jax.jit(begun, out_shardings=(cached, layout.slots))()
    params = _params(mesh, model, dtype)
    program = jax.jit(
        partial(programs.decode, shape=shape),
        out_shardings=(cached, layout.slots, layout.whole),
        donate_argnums=(2, 3),
    )
    layers = jax.jit(partial(programs.unstack, shape=shape))(params)

    def call() -> Any:
        # After many calls, slots run past their capacity: nothing is written there, and the whole cache is still read.
        nonlocal cache, slots
        cache, slots, window = program(layers, params, cache, slots)
        return window

    read = decode_bytes(size, itemsize=jnp.dtype(dtype).itemsize)
    return RateSample(size.layers, read, timed(call, seconds=seconds) / TOKENS)


def _params(mesh: Mesh, model: ModelConfig, dtype: Any) -> Params:
    """Make pseudo-random weights of the usual scale, replicated on every device."""
    declared = models.declare(model, "lm")
    kinds = cast_shapes(models.param_dims(model, "lm"), models.param_shapes(model, "lm"), dtype=dtype)

    def draw(offset: jax.Array) -> Params:  # an argument, so that nothing is computed while compiling
        return jax.tree.map(lambda param, kind: _scattered(param, offset).astype(kind.dtype), declared, kinds)

    return jax.jit(draw, out_shardings=NamedSharding(mesh, PartitionSpec()))(np.uint32(0))


def _scattered(param: models.Param, offset: jax.Array) -> jax.Array:
    """Make uniform weights with the variance of normal weights, by a hash: a generator would compile for seconds.

    Source: Knuth 1998 (The Art of Computer Programming 3), section 6.4, multiplicative hashing.
    """
    if param.init != "normal":
        return jnp.full(param.shape, 1.0 if param.init == "ones" else 0.0, jnp.float32)
    place = jax.lax.iota(jnp.uint32, math.prod(param.shape)).reshape(param.shape)
    share = ((place + offset) * jnp.uint32(2654435769)).astype(jnp.float32) / 2.0**32
    return (share - 0.5) * math.sqrt(12 / param.fan_in)


def _tokens(mesh: Mesh, shape: tuple[int, int], model: ModelConfig) -> jax.Array:
    token_RW = np.random.default_rng(0).integers(model.vocab_size, size=shape, dtype=np.int32)
    return jax.device_put(token_RW, NamedSharding(mesh, PartitionSpec(BATCH_AXES)))

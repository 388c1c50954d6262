"""Share of the devices' rates that this package's own decoder reaches: training, and decoding through a cache.

Every device runs its own copy on its own rows, so no collective is in these times.
"""

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
from jaxrlhf.config import Layout
from jaxrlhf.engine import programs
from jaxrlhf.engine.layout import EngineShardings
from jaxrlhf.models.attention.kv_cache import Cache
from jaxrlhf.models.config import ModelConfig
from jaxrlhf.models.memory import training_activation_bytes
from jaxrlhf.planner.cost.cost import head_flops, layer_flops
from jaxrlhf.planner.cost.memory import cache_bytes_per_token
from jaxrlhf.planner.measure.measure import CALLS, timed
from jaxrlhf.planner.measure.measure_links import RateSample
from jaxrlhf.sharding.mesh import BATCH_AXES, SLOT_AXES, mesh_of
from jaxrlhf.sharding.rules import cast_shapes

TOKENS = 16  # of each slot in one call of the decode program, as `config.Rollout` has it
EXPECTED_SHARE = 1 / 3  # of the devices' rates; only sizes are chosen by it
ROOM = 2  # a model and what it computes take this part of a device's memory at most


class TrainingSize(NamedTuple):
    """A decoder and the rows that each device gives to one forward and backward pass."""

    hidden: int
    layers: int
    rows: int
    width: int


class DecodingSize(NamedTuple):
    """A decoder and the slots that each device decodes, all of whose cache is read at every token."""

    hidden: int
    layers: int
    slots: int
    capacity: int


TRAININGS = (
    TrainingSize(64, 2, 1, 64),
    TrainingSize(128, 4, 1, 128),
    TrainingSize(256, 4, 1, 256),
    TrainingSize(512, 6, 1, 512),
    TrainingSize(1024, 8, 4, 1024),
    TrainingSize(2048, 8, 8, 1024),
)
NARROW = DecodingSize(64, 16, 4, 64)
"""Its layers take little more than running a layer takes at least."""
SHALLOW = DecodingSize(64, 2, 4, 64)
"""Size as narrow as `NARROW`, with more of what a token takes beside its layers; compiles in less time."""
DECODINGS = (
    DecodingSize(128, 2, 4, 128),
    DecodingSize(256, 4, 8, 128),
    DecodingSize(512, 8, 8, 256),
    DecodingSize(1024, 12, 16, 512),
    DecodingSize(2048, 16, 32, 1024),
    DecodingSize(4096, 16, 32, 2048),
)


def decoder(hidden: int, layers: int) -> ModelConfig:
    """A model in usual proportions, with half as many key-value heads as heads where it has several."""
    head_dim = min(128 if hidden >= 1024 else 64, hidden)
    heads = hidden // head_dim
    return ModelConfig(
        family="llama",
        vocab_size=8 * hidden,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=max(1, heads // 2),
        head_dim=head_dim,
        tie_embeddings=True,
    )


def training_flops(model: ModelConfig, *, rows: int, width: int) -> float:
    """FLOPs of a forward and a backward pass, the latter twice the former.

    Counted as plans count this package's: scores that the mask hides are not computed. All tokens are read, and
    recomputing logits is not counted.
    """
    tokens = float(rows * width)
    layers = model.num_layers * layer_flops(model, tokens=tokens, context=width / 2)
    return 3 * (layers + head_flops(model, "lm", tokens=tokens))


def decode_bytes(model: ModelConfig, *, slots: int, capacity: int, itemsize: int) -> float:
    """Read for one token of every slot: layers and head once, and all of the cache."""
    weights = model.num_layers * (model.attention_parameters + model.mlp_parameters()) + model.head_parameters("lm")
    return weights * itemsize + slots * capacity * cache_bytes_per_token(model, Layout(), itemsize=itemsize)


def choose_training(*, flops_per_s: float, memory_bytes: float, itemsize: int, seconds: float) -> TrainingSize:
    """The largest that is expected to fit into the seconds and the memory; the smallest in any case."""
    chosen = TRAININGS[0]
    for size in TRAININGS:
        model = decoder(size.hidden, size.layers)
        expected = training_flops(model, rows=size.rows, width=size.width) / (flops_per_s * EXPECTED_SHARE)
        kept = training_activation_bytes(
            model,
            "lm",
            Layout(),
            tokens=float(size.rows * size.width),
            row_tokens=size.width,
            itemsize=4,  # scores and norms are float32
            remat=False,
        )
        held = kept + model.num_parameters() * (4 + 4 + itemsize)
        if CALLS * expected <= seconds and held <= memory_bytes / ROOM:
            chosen = size
    return chosen


def choose_decoding(*, bytes_per_s: float, memory_bytes: float, itemsize: int, seconds: float) -> DecodingSize:
    """The largest that is expected to fit into the seconds and the memory; the smallest in any case."""
    chosen = DECODINGS[0]
    for size in DECODINGS:
        model = decoder(size.hidden, size.layers)
        read = decode_bytes(model, slots=size.slots, capacity=size.capacity, itemsize=itemsize)
        # Beside what is read, the copy of layers that are taken apart.
        held = read + model.num_parameters() * itemsize
        if CALLS * TOKENS * read / (bytes_per_s * EXPECTED_SHARE) <= seconds and held <= memory_bytes / ROOM:
            chosen = size
    return chosen


def training_s(devices: Sequence[jax.Device], size: TrainingSize, *, dtype: Any, seconds: float) -> float:
    """Seconds of one forward and backward pass of every device over its own rows, without rematerialisation."""
    mesh = mesh_of({"data": len(devices)}, devices)
    model = decoder(size.hidden, size.layers)
    split, whole = PartitionSpec(BATCH_AXES), PartitionSpec()
    token_RW = _tokens(mesh, (len(devices) * size.rows, size.width), model)

    def loss(params: Params, token_RW: jax.Array) -> jax.Array:
        position_RW = jnp.broadcast_to(jnp.arange(size.width), token_RW.shape)
        hidden_RWD = models.hidden_states(
            params, model, token_RW, position_RW, jnp.ones_like(token_RW), remat=False, dtype=dtype
        ).hidden_RWD
        return -models.token_logp(params, model, hidden_RWD, token_RW).logp.mean()

    def gradient(params: Params, token_RW: jax.Array) -> Params:
        return jax.tree.map(lambda leaf: leaf[None], jax.grad(loss)(params, token_RW))

    # Not one gradient of all rows: that would sum the devices' and time a collective.
    program = jax.jit(jax.shard_map(gradient, mesh=mesh, in_specs=(whole, split), out_specs=split, check_vma=False))
    params = _params(mesh, model, jnp.float32)
    return timed(lambda: program(params, token_RW), seconds=seconds)


def decode_sample(devices: Sequence[jax.Device], size: DecodingSize, *, dtype: Any, seconds: float) -> RateSample:
    """One token of every slot by the engine's own program: its layers are the steps."""
    model, itemsize = decoder(size.hidden, size.layers), jnp.dtype(dtype).itemsize
    call = _decode_call(devices, model, size, dtype)
    read = decode_bytes(model, slots=size.slots, capacity=size.capacity, itemsize=itemsize)
    return RateSample(size.layers, read, timed(call, seconds=seconds) / TOKENS)


def _decode_call(
    devices: Sequence[jax.Device], model: ModelConfig, size: DecodingSize, dtype: Any
) -> Callable[[], Any]:
    mesh = mesh_of({"data": len(devices)}, devices)
    shape = programs.Shape(
        config=model,
        replicas=len(devices),
        max_response_tokens=2**30,
        stop_tokens=(),
        tokens_per_dispatch=TOKENS,
        dtype=dtype,
    )
    layout = EngineShardings(mesh, SLOT_AXES, None, None)

    count = size.slots * len(devices)

    def begun() -> tuple[Cache, programs.Slots]:
        slots = programs.empty_slots(slots=count, shape=shape)
        slots = slots._replace(active_B=~slots.active_B, cached_B=slots.cached_B + size.capacity // 2)
        return programs.empty_cache(slots=count, capacity=size.capacity, shape=shape), slots

    cache, slots = jax.jit(begun, out_shardings=(layout.cache, layout.slots))()
    params = _params(mesh, model, dtype)
    program = jax.jit(
        partial(programs.decode, shape=shape),
        out_shardings=(layout.cache, layout.slots, layout.whole),
        donate_argnums=(2, 3),
    )
    layers = jax.jit(partial(programs.unstack, shape=shape))(params)

    def call() -> Any:
        # As calls go on, slots run past their capacity: nothing is written there, and still all of the cache is read.
        nonlocal cache, slots
        cache, slots, window = program(layers, params, cache, slots)
        return window

    return call


def _params(mesh: Mesh, model: ModelConfig, dtype: Any) -> Params:
    """Weights without a pattern and of the usual size, whole on every device."""
    declared = models.declare(model, "lm")
    kinds = cast_shapes(models.param_dims(model, "lm"), models.param_shapes(model, "lm"), dtype=dtype)

    def draw(offset: jax.Array) -> Params:
        return jax.tree.map(lambda param, kind: _scattered(param, offset).astype(kind.dtype), declared, kinds)

    # The offset is an argument so that nothing is computed while compiling.
    return jax.jit(draw, out_shardings=NamedSharding(mesh, PartitionSpec()))(np.uint32(0))


def _scattered(param: models.Param, offset: jax.Array) -> jax.Array:
    """Normal weights as uniform ones of their variance, by a hash: a generator would take seconds to compile.

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

"""What a configuration comes down to on the devices of one pool, as rows of a table."""

import math
from collections.abc import Collection

import numpy as np

from jaxrlhf.architecture import Head
from jaxrlhf.config import ROLLOUT, Layout
from jaxrlhf.models.parameters import param_dims, param_shapes
from jaxrlhf.parallel import BATCH_AXES, TRAIN, activation_bytes, logit_bytes, shard_bytes, shardings
from jaxrlhf.workers.build import Builder
from jaxrlhf.workers.model import microbatch_shape

Row = tuple[str, str, str, str]
"""Section, name, value, and what the value follows from."""


def pool_rows(builder: Builder, roles: Collection[str]) -> list[Row]:
    """The pool, and each role on it.

    Raises:
      ValueError: A layout or a token budget that the pool cannot hold.
    """
    pool = builder.pool
    hosts = len({device.process_index for device in pool.devices})
    place = f"{', '.join(roles)}; compute in {builder.dtype.name}"
    over = f" on {hosts} hosts" if hosts > 1 else ""
    rows: list[Row] = [("pool", pool.name, f"{len(pool.devices)} x {pool.devices[0].device_kind}{over}", place)]
    trained = [role for role in roles if role in builder.config.algorithm.training(builder.config)]
    for role in trained:
        rows += _trained_rows(role, builder)
    if "reference" in roles:
        layout = shardings(builder.mesh("reference"), param_dims(builder.model, "lm"), TRAIN)
        held = _bytes(shard_bytes(builder.generation_shapes(), layout))
        rows.append(("reference", "weights", held, _waits(builder, "reference") or "per device"))
    if builder.hybrid is not None and builder.sampler is not None:
        rows += _switch_rows(builder)
    if builder.sampler is not None:
        rows += _generation_rows(builder, apart=ROLLOUT in roles)
    return rows


def _trained_rows(role: str, builder: Builder) -> list[Row]:
    training, mesh = builder.training(role), builder.mesh(role)
    head: Head = "lm" if role == "actor" else "value"
    shapes = param_shapes(builder.model, head, np.float32)
    weights = shard_bytes(shapes, shardings(mesh, param_dims(builder.model, head), TRAIN))
    row_tokens, microbatch_rows = microbatch_shape(training, mesh, width=builder.width, role=role)
    shards = math.prod(mesh.shape[axis] for axis in BATCH_AXES)
    per_device = microbatch_rows * row_tokens // shards
    activations = activation_bytes(
        builder.model,
        tokens=per_device,
        row_tokens=row_tokens,
        itemsize=builder.dtype.itemsize,
        remat=training.remat,
    )
    logits = logit_bytes(builder.model, tokens=per_device) if head == "lm" else 0
    state = _waits(builder, role) or "per device: float32 weights, gradient, two Adam moments"
    return [
        (role, "train layout", _layout(training.layout, mesh.shape["data"]), "data x fsdp x stage x tensor"),
        (role, "microbatch", f"{microbatch_rows} x {row_tokens} tokens", f"{per_device} tokens per device"),
        (role, "train state", _bytes(4 * weights), state),
        (role, "activations", _bytes(activations + logits), "per device while updating, about, logits included"),
    ]


def _waits(builder: Builder, role: str) -> str:
    """What of a role waits in host memory."""
    parts = [entry for entry in builder.config.offload if entry.partition(".")[0] == role]
    return f"per device while in use; {', '.join(parts)} waits in host memory" if parts else ""


def _switch_rows(builder: Builder) -> list[Row]:
    hybrid = builder.hybrid
    assert hybrid is not None
    how = "training refines generation" if hybrid.refines else "training does NOT refine generation"
    rows: list[Row] = [
        ("switch", "weights", _bytes(hybrid.train_bytes_per_device), "per device in the train layout"),
        ("switch", "received", _bytes(hybrid.bytes_per_device), f"per device per switch; {how}"),
        ("switch", "received back", _bytes(hybrid.bytes_back_per_device), "per device per switch"),
        ("switch", "redundant", _bytes(hybrid.redundancy_bytes_per_device), "per device, not needed to generate"),
    ]
    if hybrid.copy_bytes_per_device:
        copied = f"per device while generating: {builder.dtype.name} beside the float32 masters"
        rows.append(("switch", "copied", _bytes(hybrid.copy_bytes_per_device), copied))
    return rows


def _generation_rows(builder: Builder, *, apart: bool) -> list[Row]:
    model, sampler = builder.model, builder.sampler
    assert sampler is not None
    engine, mesh, layout = sampler.engine, sampler.mesh, builder.config.actor.layout
    weights = shard_bytes(builder.generation_shapes(), builder.generation_layout(mesh))
    per_token = 2 * model.num_layers * model.num_kv_heads * model.head_dim * builder.dtype.itemsize
    cache = engine.slots * builder.width * per_token // sampler.island.size
    split = f"stage {layout.generation_stage} x tensor {layout.generation_tensor}"
    replicas = mesh.size // (layout.generation_stage * layout.generation_tensor)
    here = replicas * sampler.island.size // mesh.size
    where = "weights are sent by the actor" if apart else "on the actor's devices"
    return [
        ("generation", "layout", f"{replicas} replicas x {split}", where),
        ("generation", "slots", f"{engine.slots * replicas // here}", f"{engine.slots // here} per replica"),
        ("generation", "weights", _bytes(weights), "per device while generating"),
        ("generation", "cache", _bytes(cache), "per device at capacity, freed after generation"),
    ]


def _layout(layout: Layout, data: int) -> str:
    return f"{data} x {layout.fsdp} x {layout.stage} x {layout.tensor}"


def _bytes(number: int) -> str:
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if number >= size:
            return f"{number / size:.1f} {unit}"
    return f"{number} B"

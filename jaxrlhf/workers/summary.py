"""Rows of a pool in the settings table at the start of a run: devices, layouts, kernels, bytes."""

import math
from dataclasses import replace

import jax
from jax.sharding import Mesh

from jaxrlhf.batching.transfer_protocol import RankCoordinates
from jaxrlhf.config import ROLLOUT, Layout, PolicyGradient, Preference, Refusal
from jaxrlhf.engine import Engine
from jaxrlhf.engine.servers.server_engine import ServerEngine
from jaxrlhf.models import CausalLM, empty_cache
from jaxrlhf.resharding.hybrid import HybridEngine
from jaxrlhf.sharding.mesh import BATCH_AXES, SLOT_AXES
from jaxrlhf.sharding.rules import shard_bytes
from jaxrlhf.workers.build import Builder
from jaxrlhf.workers.model import microbatch_shape
from jaxrlhf.workers.remat import activation_bytes, optimizer_bytes
from jaxrlhf.workers.role_weights import layout_in
from jaxrlhf.workers.router_replay import router_coefficient
from jaxrlhf.workers.sampler import Sampler
from jaxrlhf.workers.trained_model import mtp_coefficient

SummaryRow = tuple[str, str, str, str]
"""Section, name, value, and reason or unit of the value."""


def pool_rows(builder: Builder) -> list[SummaryRow]:
    """Return the rows of the pool and of each role on it.

    Raises:
      Refusal: The pool cannot hold a layout, a batch or a token budget.
    """
    pool, roles = builder.on.pool, builder.on.roles
    hosts = len({device.process_index for device in pool.devices})
    place = f"{', '.join(roles)}; compute in {builder.on.dtype.name}"
    over = f" on {hosts} hosts" if hosts > 1 else ""
    rows: list[SummaryRow] = [("pool", pool.name, f"{len(pool.devices)} x {pool.devices[0].device_kind}{over}", place)]
    _check_batches(builder)
    for role in builder.on.trained:
        rows += _trained_rows(role, builder)
    for role in builder.on.frozen:
        weights = builder.on.weights(role).frozen_params(builder.on.mesh(role))
        size = _bytes(shard_bytes(weights, layout_in(weights)))
        where = _waits(builder, role) or "per device"
        if role == "reference" and builder.config.reference_is_frozen_actor:
            size, where = "none", "shared with the actor, without the trained adapters"
        rows.append((role, "weights", size, where))
    if builder.hybrid is not None:
        rows += _switch_rows(builder.hybrid, builder)
    if builder.sampler is not None:
        rows += _generation_rows(builder.sampler, builder, apart=ROLLOUT in roles)
    return rows


def _check_batches(builder: Builder) -> None:
    """Raise `Refusal` if a batch has fewer rows than there are groups of hosts that share it."""
    config, algorithm = builder.config, builder.config.algorithm
    setting = "pairs_per_update" if isinstance(algorithm, Preference) else "examples_per_update"
    update = (f"algorithm.{setting}", algorithm.problems_per_step(config.rollout))
    if isinstance(algorithm, PolicyGradient):
        update = ("algorithm.responses_per_update", algorithm.responses_per_update)
    prompts = ("rollout.prompts_per_step", config.rollout.prompts_per_step)
    scored = ("evaluation.problems", config.evaluation.problems)
    taken: list[tuple[str, tuple[str, int], RankCoordinates, tuple[str, ...]]]
    taken = [(role, update, RankCoordinates.of(builder.on.mesh(role)), BATCH_AXES) for role in builder.on.trained]
    if builder.sampler is not None:
        place = RankCoordinates.of(builder.sampler.mesh)
        taken += [("generation", prompts, place, SLOT_AXES), ("generation", scored, place, SLOT_AXES)]
    if "reward" in builder.on.roles:
        place = RankCoordinates.alone(*builder.rank)
        taken += [("reward", prompts, place, BATCH_AXES), ("reward", scored, place, BATCH_AXES)]
    for role, (setting, count), place, axes in taken:
        _, parts = place.part(axes)
        if count < parts:
            raise Refusal(
                f"{role}: {setting}={count} is less than one row for each of the {parts} groups of hosts; set at "
                f"least {parts}, or use fewer hosts"
            )


def _trained_rows(role: str, builder: Builder) -> list[SummaryRow]:
    training, mesh, model = builder.on.training(role), builder.on.mesh(role), builder.on.model_of(role)
    remat = builder.remat[role]
    router_coefficient(model, training.router_loss, role=role)  # raises Refusal early
    mtp_coefficient(model, training, role=role)
    weights, state = _train_state(builder, role)
    row_tokens, microbatch_rows = microbatch_shape(training, mesh, width=builder.on.widest_row(role), role=role)
    shards = math.prod(mesh.shape[axis] for axis in BATCH_AXES)
    per_device = microbatch_rows * row_tokens // shards // training.layout.context
    rows: list[SummaryRow] = [
        (role, "train layout", _layout(training.layout, mesh.shape["data"]), "data x fsdp x stage x tensor"),
        (role, "microbatch", f"{microbatch_rows} x {row_tokens} tokens", f"{per_device} tokens per device"),
        (role, "train state", _bytes(weights), _waits(builder, role) or state),
        (role, "remat", remat.kind, remat.why),
    ]
    if isinstance(model, CausalLM):  # kernels and activations of a user-defined model are not known
        return rows
    activations = activation_bytes(builder.on, role, remat=remat.on, offloads=remat.kind == "offload")
    return [
        *rows,
        (role, "attention", f"rows={builder.on.execution(role).rows_kernel}", _kernels_from(builder)),
        (role, "activations", _bytes(int(activations)), "per device during updates, estimated, including logits"),
    ]


def _train_state(builder: Builder, role: str) -> tuple[int, str]:
    """Return the bytes of a role's training state on a device, and its parts in words."""
    mesh, weights = builder.on.mesh(role), builder.on.weights(role)
    params = weights.trained_params(mesh)
    params_bytes = shard_bytes(params, layout_in(params))
    optimizer = builder.on.training(role).optimizer
    copies = 2 + optimizer_bytes(builder.on, role) / 4
    if weights.lora is None:
        kept = f"two Adam moments{'' if optimizer.state_dtype == 'float32' else ' in bfloat16'}"
        kept = kept if optimizer.factory is None else f"state of {optimizer.factory}"
        average = "" if optimizer.average_decay is None else ", average of the weights"
        return int(copies * params_bytes), f"per device: float32 weights, gradient, {kept}{average}"
    trained = shard_bytes(weights.adapter_shapes(), weights.adapter_layout(mesh))
    kind = "frozen" if weights.lora.quantize is None else weights.lora.quantize
    adapters = f"{_bytes(int(copies * trained))} for adapters of rank {weights.lora.rank}"
    return params_bytes + int(copies * trained), f"per device: {kind} weights, and {adapters}"


def _waits(builder: Builder, role: str) -> str:
    """Name the parts of a role that are offloaded to host memory; empty if none are."""
    parts = [entry for entry in builder.config.offload if entry.partition(".")[0] == role]
    return f"per device while in use; {', '.join(parts)} offloaded to host memory otherwise" if parts else ""


def _switch_rows(hybrid: HybridEngine, builder: Builder) -> list[SummaryRow]:
    how = "training refines generation" if hybrid.refines else "training does NOT refine generation"
    rows: list[SummaryRow] = [
        ("switch", "weights", _bytes(hybrid.train_bytes_per_device), "per device in the train layout"),
        ("switch", "received", _bytes(hybrid.bytes_per_device), f"per device per switch; {how}"),
        ("switch", "received back", _bytes(hybrid.bytes_back_per_device), "per device per switch"),
        ("switch", "redundant", _bytes(hybrid.redundancy_bytes_per_device), "per device, not needed to generate"),
    ]
    if hybrid.copy_bytes_per_device:
        kind = builder.policy.quantize or builder.on.dtype.name
        copied = f"per device during generation: {kind}, in addition to the float32 masters"
        rows.append(("switch", "copied", _bytes(hybrid.copy_bytes_per_device), copied))
    return rows


def _generation_rows(sampler: Sampler, builder: Builder, *, apart: bool) -> list[SummaryRow]:
    model, engine, mesh, layout = builder.on.model, sampler.engine, sampler.mesh, builder.config.actor.layout
    if isinstance(engine, ServerEngine):
        read = "whole checkpoints" if engine.server.weights == "whole" else "layers with changed tensors"
        note = f"{engine.server.api}; servers read {read} from {engine.files.folder}"
        return [("generation", "servers", ", ".join(engine.server.urls), note)]
    if not isinstance(engine, Engine):
        return [("generation", "engine", type(engine).__name__, "user-defined")]
    weights = shard_bytes(builder.policy.generation_shapes(), builder.policy.generation_layout(mesh))
    sizes = {"slots": engine.slots, "capacity": builder.on.width, "execution": replace(engine.execution, pipeline=None)}
    cached = jax.tree.leaves(jax.eval_shape(lambda: empty_cache(model, **sizes)))
    cache = sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in cached) // sampler.submesh.size
    split = f"stage {layout.generation_stage} x tensor {layout.generation_tensor}"
    if layout.generation_context > 1:
        split = f"context {layout.generation_context} x {split}"
    replicas = mesh.size // layout.slot_devices
    here = replicas * sampler.submesh.size // mesh.size
    kernels, pages = engine.execution, engine.execution.pages_kernel
    of_slots = f"decode={kernels.decode_kernel}" if pages is None else f"pages={pages}"
    attention = f"rows={kernels.rows_kernel}, {of_slots}"
    freed = "freed after generation" if pages is None else "allocated in pages, freed as responses end"
    ring = engine.execution.ring_entries
    near = "" if ring is None else f"{ring} entries in sliding-window layers, "
    where = "weights are sent by the actor" if apart else "on the actor's devices"
    rows: list[SummaryRow] = [
        ("generation", "layout", f"{replicas} replicas x {split}", where),
        ("generation", "slots", f"{engine.slots * replicas // here}", f"{engine.slots // here} per replica"),
        ("generation", "attention", attention, _kernels_from(builder)),
        ("generation", "weights", _bytes(weights), "per device during generation"),
        ("generation", "cache", _bytes(cache), f"per device at capacity, {near}{freed}"),
    ]
    if builder.config.rollout.speculation is not None:
        rows.append(("generation", "speculation", "off" if engine.speculation.off else "auto", _drafts_of(engine)))
    if apart and builder.config.rollout.staleness:
        most = f"up to {builder.config.steps_ahead + 1} x {_bytes(_sent_bytes(builder, mesh))}"
        rows.append(("generation", "next weights", most, "per device in host memory, fetched during decoding"))
    return rows


def _drafts_of(engine: Engine) -> str:
    """Return the widths of verifications, or the reason why there are none."""
    widths = " or ".join(map(str, engine.speculation.widths))
    by = "texts and the model's layer for the second next token" if engine.execution.mtp_slots else "texts"
    how = f"up to {widths} tokens of a response per forward pass, drafted by {by}, where this is faster"
    return engine.speculation.off or how


def _sent_bytes(builder: Builder, mesh: Mesh) -> int:
    """Return the bytes per device of the weights sent every step: adapters if there are any, else the parameters."""
    sent = builder.policy.sent
    shapes, layout = sent.generation_shapes(), sent.generation_layout(mesh)
    part = "adapters" if "adapters" in shapes else "parameters"
    return shard_bytes(shapes[part], layout[part])


def _kernels_from(builder: Builder) -> str:
    return f"attention={builder.config.attention!r} on {builder.on.pool.devices[0].platform}"


def _layout(layout: Layout, data: int) -> str:
    sizes = f"{data} x {layout.fsdp} x {layout.stage} x {layout.tensor}"
    sizes += f", experts {layout.expert} ways" if layout.expert > 1 else ""
    return sizes + (f", tokens {layout.context} ways" if layout.context > 1 else "")


def _bytes(number: int) -> str:
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if number >= size:
            return f"{number / size:.1f} {unit}"
    return f"{number} B"

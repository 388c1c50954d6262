"""The table of derived settings that a run prints before it starts."""

import math

import numpy as np

from jaxrlhf.architecture import Head
from jaxrlhf.config import PPO, Config, Layout, PolicyGradient, Training
from jaxrlhf.data import Loaded
from jaxrlhf.models.parameters import param_dims, param_shapes
from jaxrlhf.parallel import (
    BATCH_AXES,
    TRAIN,
    activation_bytes,
    factored_mesh,
    logit_bytes,
    shard_bytes,
    shardings,
)
from jaxrlhf.workers import Builder
from jaxrlhf.workers.model import microbatch_shape

Row = tuple[str, str, str, str]
"""Section, name, value, and what the value follows from."""


def settings_rows(config: Config, builder: Builder, train: Loaded, evaluation: Loaded) -> list[Row]:
    """What the configuration comes down to on these devices.

    Raises:
      ValueError: A layout or a token budget that these devices cannot hold.
    """
    devices = builder.pool.devices
    model = builder.model
    rows: list[Row] = [
        ("run", "algorithm", type(config.algorithm).__name__, f"{config.steps} steps"),
        ("run", "devices", f"{len(devices)} x {devices[0].device_kind}", f"compute in {builder.dtype.name}"),
        ("run", "model", _count(model.num_parameters()), f"{model.family}, {model.num_layers} layers"),
        _split_row("training", train, len(train.problems)),
        _split_row("held out", evaluation, config.evaluation.problems),
        *_step_rows(config),
    ]
    trained: list[tuple[str, Training]] = [("actor", config.actor)]
    if isinstance(config.algorithm, PPO):
        trained.append(("critic", config.algorithm.critic))
    for role, training in trained:
        rows += _role_rows(role, training, config, builder)
    if "reference" in config.algorithm.roles:
        held = _bytes(shard_bytes(builder.hybrid.generation_shapes, builder.hybrid.train))
        rows.append(("reference", "weights", held, "per device, in the actor's train layout"))
    rows += _generation_rows(config, builder)
    return rows


def _split_row(name: str, split: Loaded, wanted: int) -> Row:
    used = min(wanted, len(split.problems))
    return ("data", name, f"{used} problems", f"{split.dropped_too_long} of {split.total} dropped as too long")


def _step_rows(config: Config) -> list[Row]:
    algorithm, rollout = config.algorithm, config.rollout
    updates = algorithm.updates_per_step(config)
    rows: list[Row] = [
        ("step", "problems", f"{algorithm.problems_per_step(config)}", "per step"),
        ("step", "updates", f"{updates}", f"per step, {updates * config.steps} in the run"),
        ("step", "longest sequence", f"{rollout.max_prompt_tokens + rollout.max_response_tokens}", "tokens"),
    ]
    if isinstance(algorithm, PolicyGradient):
        product = f"{rollout.prompts_per_step} prompts x {rollout.responses_per_prompt}"
        rows.insert(1, ("step", "responses", f"{rollout.responses_per_step}", product))
        rows.insert(2, ("step", "minibatch", f"{algorithm.responses_per_update} responses", "per update"))
    if config.cold_start is not None:
        rows.append(("step", "cold start", f"{config.cold_start.steps} updates", "supervised, before the first step"))
    return rows


def _role_rows(role: str, training: Training, config: Config, builder: Builder) -> list[Row]:
    mesh = factored_mesh(training.layout, builder.pool.devices, role=role)
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
    return [
        (role, "train layout", _layout(training.layout, mesh.shape["data"]), "data x fsdp x stage x tensor"),
        (role, "microbatch", f"{microbatch_rows} x {row_tokens} tokens", f"{per_device} tokens per device"),
        (role, "train state", _bytes(4 * weights), "per device: float32 weights, gradient, two Adam moments"),
        (role, "activations", _bytes(activations + logits), "per device while updating, about, logits included"),
    ]


def _generation_rows(config: Config, builder: Builder) -> list[Row]:
    model, engine, mesh = builder.model, builder.engine, builder.mesh
    copy = shard_bytes(builder.hybrid.generation_shapes, builder.hybrid.generate)
    per_token = 2 * model.num_layers * model.num_kv_heads * model.head_dim * builder.dtype.itemsize
    cache = engine.slots * builder.width * per_token // mesh.size
    layout = config.actor.layout
    split = f"stage {layout.generation_stage} x tensor {layout.generation_tensor}"
    replicas = mesh.size // (layout.generation_stage * layout.generation_tensor)
    refine = "refines" if builder.hybrid.refines else "does NOT refine"
    return [
        ("generation", "layout", f"{replicas} replicas x {split}", f"training {refine} it"),
        ("generation", "slots", f"{engine.slots}", f"responses at once, {engine.slots // replicas} per replica"),
        ("generation", "weights", _bytes(copy), "per device while generating"),
        ("generation", "cache", _bytes(cache), "per device at capacity, freed after generation"),
        ("generation", "switch", _bytes(builder.hybrid.bytes_per_device), "received per device per step"),
    ]


def _layout(layout: Layout, data: int) -> str:
    return f"{data} x {layout.fsdp} x {layout.stage} x {layout.tensor}"


def _count(number: int) -> str:
    for unit, size in (("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= size:
            return f"{number / size:.2f}{unit} parameters"
    return f"{number} parameters"


def _bytes(number: int) -> str:
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if number >= size:
            return f"{number / size:.1f} {unit}"
    return f"{number} B"

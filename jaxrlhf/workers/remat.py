"""Choice of rematerialization (activation checkpointing) for each role, before anything is compiled."""

import math
from collections.abc import Sequence
from typing import Literal, NamedTuple

import jax
import numpy as np

from jaxrlhf.config import ROLLOUT, ModelReward, Refusal, offloaded
from jaxrlhf.models import CausalLM, read_config
from jaxrlhf.models.config import ModelConfig
from jaxrlhf.models.lora.lora import declare_adapters
from jaxrlhf.models.memory import adapters_held, keeps_activations, training_activation_bytes, weights_held
from jaxrlhf.models.parameters import declare
from jaxrlhf.optimizers.groups import layers_of
from jaxrlhf.optimizers.state import state_bytes_per_weight
from jaxrlhf.sharding.mesh import BATCH_AXES, TOKEN_AXES
from jaxrlhf.workers.model import microbatch_shape, most_of_all_hosts
from jaxrlhf.workers.pool_roles import PoolRoles

_WEIGHT, _GRADIENTS = 4, 8
"""Bytes per trained weight, without optimizer moments: the weight itself; and during an update two gradients, of a
microbatch and their sum."""


class RematChoice(NamedTuple):
    """Rematerialization of one role.

    Attributes:
      kind: `none`, `full`, or `offload`, as in `Training.remat`.
      why: Reason, for the settings table at the start of a run.
    """

    kind: Literal["none", "full", "offload"]
    why: str

    @property
    def on(self) -> bool:
        """True if layers are recomputed in the backward pass."""
        return self.kind != "none"


def choose_remat(on: PoolRoles, role: str) -> RematChoice:
    """Resolve the `Training.remat` of a role on its pool."""
    setting, devices = on.training(role).remat, on.pool.devices
    if isinstance(on.model_of(role), CausalLM):
        if setting in ("full", "offload"):
            raise Refusal(
                f"{role}.remat={setting!r} requires the built-in decoder; a user-defined model rematerializes by "
                "itself (nnx.remat): set remat='auto'"
            )
        return RematChoice("none", "a user-defined model rematerializes by itself")
    if setting != "auto":
        stay = setting == "offload" and devices[0].platform == "cpu"
        return RematChoice(
            setting, "as configured" + (", but inputs of layers are already in host memory" if stay else "")
        )
    if devices[0].platform == "cpu":
        return RematChoice("full", "remat='auto' on CPU, where recomputing activations is faster")
    memory = device_memory(devices)
    if memory is None:
        return RematChoice("full", "remat='auto', and the devices do not report their memory")
    needed = update_bytes(on, role)
    keeps = keeps_activations(needed, memory)
    return RematChoice(
        "none" if keeps else "full",
        f"remat='auto': keeping all activations takes {needed / 2**30:.1f} of {memory / 2**30:.1f} GiB",
    )


def device_memory(devices: Sequence[jax.Device]) -> int | None:
    """Return the memory of the smallest device over all hosts, in bytes; None if unknown."""
    own = [device for device in devices if device.process_index == jax.process_index()]
    try:
        least = min((device.memory_stats() or {}).get("bytes_limit", 0) for device in own) >> 20
    except jax.errors.JaxRuntimeError:  # described devices have no memory statistics
        return None
    return int(-most_of_all_hosts(np.array(-least))) << 20 or None


def update_bytes(on: PoolRoles, role: str) -> float:
    """Estimate the bytes on a device of the pool while the role is updated without rematerialization."""
    held = sum(_held_bytes(on, other, updates=other == role) for other in on.roles)
    return activation_bytes(on, role, remat=False) + held


def activation_bytes(on: PoolRoles, role: str, *, remat: bool, offloads: bool = False) -> float:
    """Estimate the bytes of a microbatch's activations on a device, logits included.

    Args:
      remat: True if layers are recomputed in the backward pass.
      offloads: True if the inputs of layers are kept in host memory.
    """
    training, mesh, model = on.training(role), on.mesh(role), on.model_of(role)
    assert isinstance(model, ModelConfig), "the activations of a user-defined model are unknown"
    row_tokens, rows = microbatch_shape(training, mesh, width=on.widest_row(role), role=role)
    return training_activation_bytes(
        model,
        on.weights(role).head,
        training.layout,
        tokens=rows * row_tokens // math.prod(mesh.shape[axis] for axis in (*BATCH_AXES, *TOKEN_AXES)),
        row_tokens=row_tokens if on.execution(role).rows_kernel == "xla" else 0,  # other kernels keep no scores
        itemsize=on.dtype.itemsize,
        remat=remat,
        offloads=offloads,
    )


def _held_bytes(on: PoolRoles, role: str, *, updates: bool) -> float:
    """Return the bytes of a role on one device during an update.

    Args:
      updates: True if this role is updated, False if another role is.
    """
    config, compute = on.config, on.dtype.itemsize
    if role == "reward":
        if offloaded(config.offload, role, "parameters"):
            return 0.0
        judges = {(part.path, part.layout) for part in config.rewards.parts if isinstance(part, ModelReward)}
        return sum(weights_held(read_config(path), "score", layout) * compute for path, layout in judges)
    if role == ROLLOUT:
        return 0.0
    if role == "reference" and config.reference_is_frozen_actor:
        return 0.0
    training = config.trained.get(role)
    weights, layout = on.weights(role), on.training(role).layout
    model, frozen, learnt = weights.model, weights_held(weights.model, weights.head, layout), 0.0
    trains_all = role == "actor" and config.cold_start is not None  # the cold start has no adapters
    if training is not None and training.lora is not None and not trains_all:
        assert isinstance(model, ModelConfig), "only the decoder has adapters"
        learnt = adapters_held(model, training.lora, layout)
    elif training is not None:
        frozen, learnt = 0.0, frozen
    moments = 0 if training is None else optimizer_bytes(on, role)
    parts = {"parameters": frozen * compute + learnt * _WEIGHT, "optimizer": learnt * moments}
    kept = sum(size for part, size in parts.items() if updates or not offloaded(config.offload, role, part))
    return kept + (learnt * _GRADIENTS if updates else 0)


def optimizer_bytes(on: PoolRoles, role: str) -> float:
    """Return the average bytes of optimizer state per trained weight of a role."""
    weights = on.weights(role)
    model, head, lora = weights.model, weights.head, weights.lora
    declared = declare(model, head) if lora is None else declare_adapters(model, head, lora)
    return state_bytes_per_weight(on.training(role).optimizer, declared, layers_of(model))

"""Meshes, sharding rules, the switch between layouts, and pools of devices."""

from jaxrlhf.parallel.hybrid import HybridEngine, Switch, SwitchError
from jaxrlhf.parallel.islands import hand_over, island_of, local_island
from jaxrlhf.parallel.memory import activation_bytes, logit_bytes
from jaxrlhf.parallel.mesh import (
    AXES,
    BATCH_AXES,
    SLOT_AXES,
    STAGE_AXES,
    TENSOR_AXES,
    factored_mesh,
    generation_mesh,
    mesh_of,
    replica_mesh,
)
from jaxrlhf.parallel.offload import HostArray, Moved, device_bytes, to_device, to_host
from jaxrlhf.parallel.overlap import missing_bytes, refines
from jaxrlhf.parallel.pool import ResourcePool
from jaxrlhf.parallel.rules import GENERATE, TRAIN, cast_shapes, check_divisible, laid_out, shard_bytes, shardings
from jaxrlhf.parallel.transfer import Delivery, Exchange, Offer, Splits, splits_of
from jaxrlhf.parallel.wire import TransferError

__all__ = [
    "AXES",
    "BATCH_AXES",
    "GENERATE",
    "SLOT_AXES",
    "STAGE_AXES",
    "TENSOR_AXES",
    "TRAIN",
    "Delivery",
    "Exchange",
    "HostArray",
    "HybridEngine",
    "Moved",
    "Offer",
    "ResourcePool",
    "Splits",
    "Switch",
    "SwitchError",
    "TransferError",
    "activation_bytes",
    "cast_shapes",
    "check_divisible",
    "device_bytes",
    "factored_mesh",
    "generation_mesh",
    "hand_over",
    "island_of",
    "laid_out",
    "local_island",
    "logit_bytes",
    "mesh_of",
    "missing_bytes",
    "refines",
    "replica_mesh",
    "shard_bytes",
    "shardings",
    "splits_of",
    "to_device",
    "to_host",
]

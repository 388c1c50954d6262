"""Meshes, sharding rules, the switch between layouts, and pools of devices."""

from jaxrlhf.parallel.devices import KNOWN_HARDWARE, hardware, load_hardware, recognise, save_hardware
from jaxrlhf.parallel.hardware import Hardware
from jaxrlhf.parallel.hybrid import HybridEngine, Switch, SwitchError
from jaxrlhf.parallel.islands import hand_over, island_of, local_island
from jaxrlhf.parallel.memory import adapters_held, keeps_activations, training_activation_bytes, weights_held
from jaxrlhf.parallel.mesh import (
    AXES,
    BATCH_AXES,
    EXPERT_AXES,
    REPLICA_AXES,
    SLOT_AXES,
    STAGE_AXES,
    TENSOR_AXES,
    WEIGHT_AXES,
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
from jaxrlhf.parallel.workload import (
    cache_capacities,
    microbatch_shape_of,
    packed_row_tokens,
    pipeline_parts,
)

__all__ = [
    "AXES",
    "BATCH_AXES",
    "EXPERT_AXES",
    "GENERATE",
    "KNOWN_HARDWARE",
    "REPLICA_AXES",
    "SLOT_AXES",
    "STAGE_AXES",
    "TENSOR_AXES",
    "TRAIN",
    "WEIGHT_AXES",
    "Delivery",
    "Exchange",
    "Hardware",
    "HostArray",
    "HybridEngine",
    "Moved",
    "Offer",
    "ResourcePool",
    "Splits",
    "Switch",
    "SwitchError",
    "TransferError",
    "adapters_held",
    "cache_capacities",
    "cast_shapes",
    "check_divisible",
    "device_bytes",
    "factored_mesh",
    "generation_mesh",
    "hand_over",
    "hardware",
    "island_of",
    "keeps_activations",
    "laid_out",
    "load_hardware",
    "local_island",
    "mesh_of",
    "microbatch_shape_of",
    "missing_bytes",
    "packed_row_tokens",
    "pipeline_parts",
    "recognise",
    "refines",
    "replica_mesh",
    "save_hardware",
    "shard_bytes",
    "shardings",
    "splits_of",
    "to_device",
    "to_host",
    "training_activation_bytes",
    "weights_held",
]

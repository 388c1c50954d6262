"""One of two processes that share a mesh: switch layouts, hand weights to a submesh, go back; choose kernels.

python switching_process.py PORT RANK
"""

import sys
import warnings

import jax
import jax.numpy as jnp
import numpy as np

from jaxrlhf.config import Layout
from jaxrlhf.models import choose_execution
from jaxrlhf.models.attention import kernel_choice
from jaxrlhf.models.config import ModelConfig
from jaxrlhf.resharding.hybrid import HybridEngine
from jaxrlhf.sharding.mesh import factored_mesh, generation_mesh
from jaxrlhf.sharding.submesh import hand_over, local_submesh

DIMS = {"layers": ("layers", "mlp"), "table": ("vocab", "embed")}
SHAPES = {"layers": jax.ShapeDtypeStruct((8, 16), jnp.float32), "table": jax.ShapeDtypeStruct((64, 4), jnp.float32)}


def build() -> dict[str, jax.Array]:
    """Weights whose elements are all different."""
    return {name: jnp.arange(x.size, dtype=x.dtype).reshape(x.shape) for name, x in SHAPES.items()}


def check(tree: dict[str, jax.Array]) -> None:
    """Every shard of this process holds what it should."""
    for leaf in tree.values():
        whole = np.arange(leaf.size, dtype=np.float32).reshape(leaf.shape)
        for shard in leaf.addressable_shards:
            np.testing.assert_array_equal(shard.data, whole[shard.index])


def check_kernels(mesh: jax.sharding.Mesh, rank: int) -> None:
    """A kernel that one process refuses is used by none; one that all can use, by all."""
    config = ModelConfig("qwen2", 16, 16, 16, num_layers=1, num_heads=4, num_kv_heads=2, head_dim=4)
    kernel_choice.BEST["cpu"] = "flash", "xla", "pallas"
    for refused, expected in ((1, "xla"), (2, "flash")):
        kernel_choice._usable = lambda *_, refused=refused: rank != refused
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            chosen = choose_execution(config, jnp.float32, mesh, row_axes=("data", "fsdp"), head_axes=("tensor",))
        assert chosen.rows_kernel == expected, chosen
        told = [str(warning.message) for warning in caught]
        assert len(told) == (rank == 0 and refused == 1) and all("another process" in text for text in told), told


def main() -> None:
    """Raise if anything is not as it should be."""
    port, rank = map(int, sys.argv[1:])
    jax.distributed.initialize(f"localhost:{port}", num_processes=2, process_id=rank)
    layout, devices = Layout(fsdp=2, tensor=4, generation_tensor=2), jax.devices()
    meshes = factored_mesh(layout, devices), generation_mesh(layout, devices)
    hybrid = HybridEngine.by_rules(*meshes, DIMS, SHAPES, dtype=jnp.float32)
    params = jax.jit(build, out_shardings=hybrid.train)()
    weights, _ = hybrid.to_generation(params)
    check(weights)
    submesh = local_submesh(meshes[1])
    assert [device.process_index for device in submesh.devices.flat] == [rank] * 4
    views = hand_over(weights, submesh)
    check(views)
    for name, view in views.items():
        assert view.is_fully_addressable and not weights[name].is_fully_addressable
        mine, theirs = (
            {shard.data.unsafe_buffer_pointer() for shard in leaf.addressable_shards} for leaf in (view, weights[name])
        )
        assert mine == theirs
    # Another number of programs on each side: with a collective between them this would hang.
    for _ in range(1 + rank):
        total = jax.jit(lambda tree: sum(leaf.sum() for leaf in tree.values()))(views)
    assert float(total) == sum(sum(range(x.size)) for x in SHAPES.values())
    params, back = hybrid.to_training(weights, params)
    assert back.bytes_per_device == 0
    check(params)
    assert all(view.is_deleted() for view in views.values())
    check_kernels(meshes[0], rank)
    print(f"process {rank} is done")


if __name__ == "__main__":
    main()

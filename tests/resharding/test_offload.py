"""Host memory and back: the same bits in the same places, and free device memory in between."""

import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from jaxrlhf.config import Refusal
from jaxrlhf.resharding.offload import to_device, to_host
from jaxrlhf.resharding.parcels import copied_to
from jaxrlhf.tracking.device_memory import bytes_in_use
from jaxrlhf.tracking.timing import CompileCounter

MESH = Mesh(np.asarray(jax.devices()).reshape(2, 4), ("fsdp", "tensor"), axis_types=(AxisType.Auto,) * 2)


def placed(spec: PartitionSpec) -> NamedSharding:
    return NamedSharding(MESH, spec)


def a_tree() -> dict[str, Any]:
    """Splits of every sort, several dtypes, NaNs, a tied leaf, no leaf, and leaves that are no arrays."""
    key = jax.random.key(0)
    both = jax.device_put(jax.random.normal(key, (16, 32)), placed(PartitionSpec("fsdp", "tensor")))
    return {
        "both": both,
        "tied": [both],
        "fused": jax.device_put(jnp.arange(64, dtype=jnp.int32), placed(PartitionSpec(("fsdp", "tensor")))),
        "copies": jax.device_put(jnp.asarray([1.0, jnp.nan, -0.0], jnp.bfloat16), placed(PartitionSpec())),
        "scalar": jax.device_put(jnp.float32(3), placed(PartitionSpec())),
        "single": jax.device_put(jnp.ones((4, 4)), SingleDeviceSharding(jax.devices()[3])),
        "none": None,
        "steps": 7,
        "key": jax.device_put(key, placed(PartitionSpec())),
    }


def bits(tree: Any) -> list[bytes]:
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(tree) if not is_key(leaf)]


def is_key(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array) and jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def test_there_and_back_keeps_bits_and_shardings() -> None:
    tree = a_tree()
    expected, shardings = bits(tree), [getattr(leaf, "sharding", None) for leaf in jax.tree.leaves(tree)]
    host, _ = to_host(tree)
    back, _ = to_device(host)
    assert str(jax.tree.structure(back)) == str(jax.tree.structure(tree))
    assert bits(back) == expected
    assert [getattr(leaf, "sharding", None) for leaf in jax.tree.leaves(back)] == shardings
    assert {leaf.sharding.memory_kind for leaf in jax.tree.leaves(back) if isinstance(leaf, jax.Array)} == {"device"}
    assert (back["none"], back["steps"]) == (None, 7)
    assert back["key"] is tree["key"]


def test_tied_leaves_stay_tied_and_move_once() -> None:
    leaf = jax.device_put(jnp.ones((8, 8)), placed(PartitionSpec("fsdp", "tensor")))
    host, there = to_host({"embedding": leaf, "head": leaf})
    assert host["embedding"] is host["head"]
    back, here = to_device(host)
    assert back["embedding"] is back["head"]
    assert there.bytes_per_device == here.bytes_per_device == 8 * 8 * 4 // 8


def test_device_memory_is_free_in_between() -> None:
    empty = bytes_in_use(jax.local_devices())
    tree = {
        "split": jax.device_put(np.zeros((1024, 256), np.float32), placed(PartitionSpec("fsdp", "tensor"))),
        "copies": jax.device_put(np.zeros(1024, np.float32), placed(PartitionSpec())),
    }
    full = bytes_in_use(jax.local_devices())
    size = 1024 * 256 * 4 // 8 + 1024 * 4
    assert [after - before for before, after in zip(empty, full, strict=True)] == [size] * 8
    host, there = to_host(tree)
    assert bytes_in_use(jax.local_devices()) == empty
    assert all(leaf.is_deleted() for leaf in tree.values())
    back, here = to_device(host)
    assert bytes_in_use(jax.local_devices()) == full
    assert there.bytes_per_device == here.bytes_per_device == size
    assert there.seconds > 0
    del back


def test_pinned_leaves_are_arrays_and_their_copies_are_freed_on_the_way_back() -> None:
    tree = {"w": jax.device_put(jnp.ones((8, 8)), placed(PartitionSpec("fsdp")))}
    host, _ = to_host(tree)  # CPU devices have pinned host memory too
    assert host["w"].sharding == placed(PartitionSpec("fsdp")).with_memory_kind("pinned_host")
    to_device(host)
    assert host["w"].is_deleted()


def test_blocks_of_the_host_are_copied_even_where_jax_would_take_them_as_they_are() -> None:
    memory = np.zeros(1024 + 16, np.float32)
    aligned = memory[(-memory.ctypes.data % 64) // 4 :][:1024]
    devices = jax.devices()
    for copy, shared in ((lambda x, to: jax.device_put(x, to, may_alias=False), True), (copied_to, False)):
        arrays = copy([aligned] * 8, devices)
        pointers = {array.unsafe_buffer_pointer() for array in arrays}
        assert (aligned.ctypes.data in pointers, len(pointers) < 8) == (shared, shared)
        assert [array.device for array in arrays] == devices


def test_a_value_that_was_away_neither_recompiles_a_program_nor_stains_its_results() -> None:
    program = jax.jit(lambda w: (w * 2, w.sum()))
    tree = {"w": jax.device_put(jnp.ones((8, 8)), placed(PartitionSpec("fsdp", "tensor")))}
    program(tree["w"])
    host, _ = to_host(tree)
    back, _ = to_device(host)
    with CompileCounter() as compiled:
        results = program(back["w"])
    assert compiled.count == 0
    assert {result.sharding.memory_kind for result in results} == {"device"}


def test_moving_what_is_there_already_moves_nothing() -> None:
    tree = {"w": jax.device_put(jnp.ones((8, 8)), placed(PartitionSpec("fsdp")))}
    same, moved = to_device(tree)
    assert same["w"] is tree["w"] and moved.bytes_per_device == 0
    host, _ = to_host(tree)
    again, moved = to_host(host)
    assert again["w"] is host["w"] and moved.bytes_per_device == 0
    assert to_host({})[1].bytes_per_device == 0


def test_an_array_on_no_particular_device_is_refused() -> None:
    with pytest.raises(ValueError, match=r"shape \(3,\) is committed to no device"):
        to_host([jnp.ones(3)])


def test_devices_without_pinned_memory_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jaxrlhf.resharding.offload.PINNED", "memory of another backend")
    tree = {"w": jax.device_put(jnp.ones((8, 8)), placed(PartitionSpec("fsdp")))}
    with pytest.raises(Refusal):
        to_host(tree)
    assert not tree["w"].is_deleted()


TWO_PROCESSES = """
import sys
import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from jaxrlhf.resharding.offload import to_device, to_host

jax.config.update("jax_num_cpu_devices", 2)
jax.distributed.initialize(sys.argv[1], 2, int(sys.argv[2]))
mesh = Mesh(np.asarray(jax.devices()).reshape(2, 2), ("fsdp", "tensor"), axis_types=(AxisType.Auto,) * 2)
values = np.arange(32, dtype=np.float32).reshape(8, 4)
specs = [PartitionSpec("fsdp", "tensor"), PartitionSpec("tensor"), PartitionSpec()]
total = jax.jit(lambda arrays: sum((array * array).sum() for array in arrays))
arrays = [jax.make_array_from_callback((8, 4), NamedSharding(mesh, s), lambda i: values[i]) for s in specs]
before = total(arrays)
host, there = to_host(arrays)
assert all(array.is_deleted() for array in arrays)
assert {array.sharding.memory_kind for array in host} == {"pinned_host"}
back, here = to_device(host)
assert there.bytes_per_device == here.bytes_per_device == 128 // 4 + 128 // 2 + 128
assert [b.sharding for b in back] == [NamedSharding(mesh, s) for s in specs]
assert all((np.asarray(s.data) == values[s.index]).all() for b in back for s in b.addressable_shards)
assert total(back) == before
print("kept")
"""


@pytest.mark.slow
def test_arrays_that_span_processes(tmp_path: Path) -> None:
    script = tmp_path / "two_processes.py"
    script.write_text(TWO_PROCESSES)
    address = f"127.0.0.1:{free_port()}"
    processes = [
        subprocess.Popen(
            [sys.executable, script, address, str(rank)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        for rank in range(2)
    ]
    outputs = [process.communicate(timeout=120)[0] for process in processes]
    assert [output.splitlines()[-1] for output in outputs] == ["kept", "kept"], "\n".join(outputs)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])

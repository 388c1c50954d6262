"""Weights from pool to pool inside one process: the same bits, the fewest bytes, never the host."""

import pickle
import re
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compiled import host_reads
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding
from transfer_peer import GENERATED, TRAINED, in_place, mesh_of, placed, values

from jaxrlhf.resharding import blocks, offload, transfer
from jaxrlhf.resharding.parcels import Held
from jaxrlhf.resharding.transfer import Exchange, splits_of
from jaxrlhf.tracking.device_memory import bytes_in_use
from jaxrlhf.tracking.timing import CompileCounter

SOURCE, TARGET = jax.devices()[:4], jax.devices()[4:]
COLLECTIVES = r"\b(all-gather|all-reduce|reduce-scatter|collective-permute|all-to-all)(?:-start)?\("


def trained(*sizes: int, step: int = 1) -> dict[str, jax.Array]:
    return jax.device_put(values(step), placed(mesh_of(*sizes, devices=SOURCE[: np.prod(sizes)]), TRAINED))


def target_of(*sizes: int, specs: Any = None) -> dict[str, NamedSharding]:
    return placed(mesh_of(*sizes, devices=TARGET[: np.prod(sizes)]), GENERATED if specs is None else specs)


FROM = [(1, 1, 4), (1, 2, 2), (2, 1, 2), (1, 4, 1), (4, 1, 1), (1, 1, 1)]
TO = [(1, 1, 2), (2, 1, 1), (1, 1, 4), (2, 1, 2), (1, 2, 2), (1, 1, 1)]


@pytest.mark.parametrize(
    ("source", "target"),
    [
        # Every source and every target twice; the tier before a release has all pairs.
        pytest.param(source, target, marks=[] if (column - row) % 6 < 2 else pytest.mark.seeds)
        for row, source in enumerate(FROM)
        for column, target in enumerate(TO)
    ],
    ids=str,
)
def test_every_shard_arrives_where_the_target_wants_it(source: tuple[int, ...], target: tuple[int, ...]) -> None:
    tree, layout = trained(*source), target_of(*target)
    exchange = Exchange()
    offer = exchange.offer(tree, splits_of(layout, tree))
    assert {type(parcel) for parcel in offer.parcels.values()} == {Held}
    weights, delivery = exchange.take([offer], layout)
    assert {name: leaf.sharding for name, leaf in weights.items()} == layout
    assert in_place(weights, values(1)) and in_place(tree, values(1))
    lacked = sum(np.prod(layout[name].shard_shape(leaf.shape)) * leaf.dtype.itemsize for name, leaf in tree.items())
    assert delivery.bytes_per_device == lacked
    assert delivery.seconds > 0


def test_a_dtype_that_the_target_wants_is_cast_at_the_source() -> None:
    tree, layout = trained(1, 1, 4), target_of(1, 1, 2)
    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, jnp.bfloat16), tree)
    exchange = Exchange()
    weights, delivery = exchange.take([exchange.offer(tree, splits_of(layout, shapes))], layout)
    assert in_place(weights, {name: np.asarray(leaf).astype(jnp.bfloat16) for name, leaf in values(1).items()})
    assert delivery.bytes_per_device == 2 * (16 * 16 + 8 + 1 + 4 * 4)


def compiled(source: PartitionSpec, target: PartitionSpec, *sizes: int, dtype: Any = jnp.float32) -> str:
    """The source's program for one leaf, from (data, fsdp, tensor) = `sizes` to 4 target devices."""
    leaf = jax.device_put(jnp.zeros((16, 32)), NamedSharding(mesh_of(*sizes, devices=SOURCE), source))
    wanted = jax.ShapeDtypeStruct(leaf.shape, dtype)
    grid = blocks.grid_of("w", NamedSharding(mesh_of(1, 1, 4, devices=TARGET), target), wanted)
    return blocks._program((blocks._plan(leaf, grid),)).lower([leaf]).compile().as_text()


def test_four_ways_become_two_by_pairs() -> None:
    leaf = jax.device_put(jnp.zeros((16, 32)), NamedSharding(mesh_of(1, 1, 4, devices=SOURCE), PartitionSpec("tensor")))
    layout = NamedSharding(mesh_of(1, 1, 2, devices=TARGET[:2]), PartitionSpec("tensor"))
    plan = blocks._plan(leaf, blocks.grid_of("w", layout, leaf))
    program = blocks._program((plan,)).lower([leaf]).compile().as_text()
    assert re.findall(COLLECTIVES, program) == ["all-gather"]
    assert re.search(r"replica_groups=(\[2,2\]<=\[4\][^T]|\{\{0,1\},\{2,3\}\})", program)


def test_a_finer_split_is_cut_where_it_is() -> None:
    program = compiled(PartitionSpec(None, "tensor"), PartitionSpec(None, "tensor"), 2, 1, 2)
    assert re.findall(COLLECTIVES, program) == []


def test_a_split_of_another_dimension_takes_one_gather() -> None:
    program = compiled(PartitionSpec("tensor"), PartitionSpec(None, "tensor"), 1, 1, 4)
    assert re.findall(COLLECTIVES, program) == ["all-gather"]


def test_the_cast_comes_before_the_gather() -> None:
    program = compiled(PartitionSpec("tensor"), PartitionSpec(), 1, 1, 4, dtype=jnp.float16)
    assert re.findall(r"(\w+)\[[\d,]*\]\S* all-gather", program) == ["f16"]


@pytest.mark.parametrize("bucket_bytes", [1, 1 << 29], ids=["a leaf at a time", "at once"])
def test_what_is_fetched_waits_in_host_memory_and_takes_one_bucket_of_the_devices(
    bucket_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfer, "BUCKET_BYTES", bucket_bytes)
    monkeypatch.setattr(transfer, "to_host", watched := Watched(offload.to_host))
    tree, layout, exchange = trained(1, 2, 2), target_of(1, 1, 4), Exchange()
    before = bytes_in_use(TARGET)
    waiting, delivery = exchange.fetch([exchange.offer(tree, splits_of(layout, tree), keep=False)], layout)
    for leaf in tree.values():
        leaf.delete()
    assert bytes_in_use(TARGET) == before and delivery.bytes_per_device > 0
    parts = [np.prod(layout[name].shard_shape(leaf.shape)) * leaf.dtype.itemsize for name, leaf in values(1).items()]
    taken = [most - then for most, then in zip(watched.most, before, strict=True)]
    assert taken == [max(parts) if bucket_bytes == 1 else sum(parts)] * 4
    weights, _ = offload.to_device(waiting)
    assert {name: leaf.sharding for name, leaf in weights.items()} == layout and in_place(weights, values(1))


class Watched:
    """A function that sees how many bytes the target's devices hold as it is called.

    Attributes:
      most: The most of each device.
    """

    def __init__(self, function: Any) -> None:
        self.function, self.most = function, [0] * len(TARGET)

    def __call__(self, arrays: Any) -> Any:
        self.most = [max(pair) for pair in zip(self.most, bytes_in_use(TARGET), strict=True)]
        return self.function(arrays)


def test_leaves_that_fit_are_offered_as_they_are() -> None:
    specs = {"layers": (None, "tensor"), "bias": (), "scale": (), "table": ("tensor",)}
    tree = jax.device_put(values(1), placed(mesh_of(1, 2, 2, devices=SOURCE), specs))
    layout, exchange = target_of(1, 1, 2, specs=specs), Exchange()
    before = bytes_in_use(SOURCE)
    with CompileCounter() as programs:
        offer = exchange.offer(tree, splits_of(layout, tree))
    assert programs.count == 0 and bytes_in_use(SOURCE) == before
    weights, _ = exchange.take([offer], layout)
    assert in_place(weights, values(1)) and in_place(tree, values(1))
    alive = bytes_in_use(SOURCE)
    size = sum(leaf.addressable_shards[0].data.nbytes for leaf in tree.values())
    del tree  # nothing of the offer keeps them once they were taken
    assert [then - now for then, now in zip(alive, bytes_in_use(SOURCE), strict=True)] == [size] * 4


def test_leaves_that_do_not_stay_are_offered_as_copies_and_the_others_only_once() -> None:
    specs = {"layers": (None, "tensor"), "bias": (), "scale": (), "table": ("tensor",)}
    tree = jax.device_put(values(1), placed(mesh_of(1, 2, 2, devices=SOURCE), specs))
    layout, exchange = target_of(1, 1, 2, specs=specs | {"table": ()}), Exchange()  # a table that has to be gathered
    before = bytes_in_use(SOURCE)
    offer = exchange.offer(tree, splits_of(layout, tree), keep=False)
    copies = 4 * 16 * 16 + 2 * 8 + 4 + 4 * 4 * 8
    assert [now - then for now, then in zip(bytes_in_use(SOURCE), before, strict=True)] == [copies] * 4
    for leaf in tree.values():
        leaf.delete()
    weights, _ = exchange.take([offer], layout)
    assert in_place(weights, values(1))
    given = 4 * 16 * 16 + 2 * 8 + 4 + 4 * 4 * 8 // 2
    assert [then - now for now, then in zip(bytes_in_use(SOURCE), before, strict=True)] == [given] * 4


@contextmanager
def host_watched() -> Iterator[list[Any]]:
    """Arrays that were read into host memory; copies between devices alone are allowed."""
    guard = jax.transfer_guard("disallow_explicit"), jax.transfer_guard_device_to_device("allow")
    with host_reads() as reads, guard[0], guard[1]:
        yield reads


def test_nothing_goes_through_the_host() -> None:
    tree, layout, exchange = trained(1, 2, 2), target_of(1, 1, 4), Exchange()
    splits = splits_of(layout, tree)
    with host_watched() as reads:
        weights, _ = exchange.take([exchange.offer(tree, splits)], layout)
        assert reads == []
    assert in_place(weights, values(1))


def test_the_watch_over_the_host_sees_what_plain_device_put_does() -> None:
    tree, layout = trained(1, 2, 2), target_of(1, 1, 4)
    with host_watched() as reads:
        with pytest.raises(jax.errors.JaxRuntimeError, match=r"Disallowed (host-to-device|device-to-host) transfer"):
            jax.device_put(tree["layers"], layout["layers"])
        assert reads


def test_the_sources_share_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: Counter[jax.Device] = Counter()

    def recording(arrays: Any, *rest: Any, **options: Any) -> Any:
        for array in arrays:
            sent[array.device] += array.nbytes
        return original(arrays, *rest, **options)

    original = jax.device_put
    tree = jax.device_put(jnp.ones((16, 32)), NamedSharding(mesh_of(4, 1, 1, devices=SOURCE), PartitionSpec()))
    layout, exchange = NamedSharding(mesh_of(4, 1, 1, devices=TARGET), PartitionSpec()), Exchange()
    offer = exchange.offer([tree], splits_of([layout], [tree]))
    with monkeypatch.context() as patch:
        patch.setattr(jax, "device_put", recording)
        exchange.take([offer], [layout])
    assert sent == dict.fromkeys(SOURCE, 16 * 32 * 4)


def test_an_offer_is_freed_when_it_is_taken() -> None:
    tree, layout, exchange = trained(1, 2, 2), target_of(1, 1, 2), Exchange()
    before = bytes_in_use(jax.devices())
    offer = exchange.offer(tree, splits_of(layout, tree))
    assert max(bytes_in_use(SOURCE)) > max(before[:4])
    weights, delivery = exchange.take([offer], layout)
    after = bytes_in_use(jax.devices())
    assert after[:4] == before[:4]
    assert [now - then for now, then in zip(after[4:], before[4:], strict=True)] == [delivery.bytes_per_device] * 2 + [
        0
    ] * 2
    del weights


def test_an_offer_that_nobody_took_is_freed_by_the_next_one_or_at_the_end() -> None:
    tree, layout, exchange = trained(1, 2, 2), target_of(1, 1, 2), Exchange()
    splits, before = splits_of(layout, tree), bytes_in_use(SOURCE)
    first = exchange.offer(tree, splits)
    once = bytes_in_use(SOURCE)
    second = exchange.offer(tree, splits)
    assert bytes_in_use(SOURCE) == once != before
    with pytest.raises(ValueError, match="is in 0 offers, expected 1"):
        exchange.take([first], layout)
    exchange.close()
    assert bytes_in_use(SOURCE) == before
    with pytest.raises(ValueError, match="is in 0 offers"):
        exchange.take([second], layout)


def test_offers_that_wait_are_each_the_weights_of_then_though_the_source_goes_on() -> None:
    layout, exchange, offers = target_of(1, 1, 2), Exchange(), []
    for step in (1, 2, 3):
        tree = trained(1, 1, 2, step=step)
        offers.append(exchange.offer(tree, splits_of(layout, tree), keep=False, waiting=2))
        jax.tree.map(lambda leaf: leaf.delete(), tree)  # as an update does, to which it is donated
    with pytest.raises(ValueError, match="in 0 offers"):
        exchange.take(offers[:1], layout)
    for step, offer in zip((2, 3), offers[1:], strict=True):
        assert in_place(exchange.take([offer], layout)[0], values(step))
    exchange.close()


def test_a_step_compiles_nothing_that_the_one_before_did() -> None:
    layout, exchange = target_of(1, 1, 2), Exchange()
    for step in range(3):
        tree = trained(1, 2, 2, step=step)
        with CompileCounter() as programs:
            weights, _ = exchange.take([exchange.offer(tree, splits_of(layout, tree))], layout)
        assert in_place(weights, values(step))
        assert programs.count == 0 or step == 0


def test_lists_and_missing_leaves_keep_their_place() -> None:
    mesh, other = mesh_of(1, 1, 4, devices=SOURCE), mesh_of(1, 1, 2, devices=TARGET[:2])
    tree = [jax.device_put(jnp.arange(8.0), NamedSharding(mesh, PartitionSpec("tensor"))), None, {}]
    layout: list[Any] = [NamedSharding(other, PartitionSpec("tensor")), None, {}]
    exchange = Exchange()
    weights, _ = exchange.take([exchange.offer(tree, splits_of(layout, tree))], layout)
    assert weights[0].tolist() == list(range(8)) and weights[1:] == [None, {}]


def test_refusals() -> None:
    tree, layout, exchange = trained(1, 2, 2), target_of(1, 1, 2), Exchange()
    splits = splits_of(layout, tree)
    with pytest.raises(ValueError, match=r"different trees: \[\"\['bias'\]\"\] are in only one"):
        exchange.offer({name: leaf for name, leaf in tree.items() if name != "bias"}, splits)
    with pytest.raises(ValueError, match=r"\['bias'\] has shape \(4,\) at its source and \(8,\) at its target"):
        exchange.offer(tree | {"bias": tree["bias"][:4]}, splits)
    alone = jax.device_put(values(1)["bias"], SingleDeviceSharding(SOURCE[0]))
    with pytest.raises(ValueError, match=r"\['bias'\] has sharding SingleDeviceSharding"):
        exchange.offer(tree | {"bias": alone}, splits)
    with pytest.raises(ValueError, match="no offers"):
        exchange.take([], layout)
    offer = exchange.offer(tree, splits)
    with pytest.raises(ValueError, match=r"is in 2 offers"):
        exchange.take([offer, offer], layout)
    with pytest.raises(ValueError, match=r"\['layers'\] was offered in \(1, 2\) parts"):
        exchange.take([offer], target_of(1, 1, 4))
    with pytest.raises(TypeError, match="cannot be sent to another process"):
        pickle.dumps(offer)
    same = placed(mesh_of(1, 1, 2, devices=SOURCE[:2]), GENERATED)
    with pytest.raises(ValueError, match="source and target share devices"):
        exchange.take([exchange.offer(tree, splits_of(same, tree))], same)

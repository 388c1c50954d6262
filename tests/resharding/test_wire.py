"""Weights from pool to pool between processes that share nothing but a network."""

import os
import pickle
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import pytest
from transfer_peer import GENERATED, in_place, mesh_of, placed, values

from jaxrlhf.resharding import transfer
from jaxrlhf.resharding.offload import to_device
from jaxrlhf.resharding.parcels import Packed, Posted
from jaxrlhf.resharding.transfer import Exchange, Offer, splits_of
from jaxrlhf.resharding.wire import TransferError

LIMIT_S = 30.0
CARRIERS = {"direct": Posted, "host": Packed}
MIB = 2**20


class Remote:
    """A `transfer_peer` process."""

    def __init__(self, *arguments: object) -> None:
        script = str(Path(__file__).parents[1] / "support" / "transfer_peer.py")
        self.process = subprocess.Popen(
            [sys.executable, script, *map(str, arguments)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert self.process.stdin and self.process.stdout
        self.told, self.replies = self.process.stdin, self.process.stdout

    def send(self, verb: str, *arguments: Any) -> None:
        pickle.dump((verb, arguments), self.told)
        self.told.flush()

    def reply(self) -> Any:
        answer = pickle.load(self.replies)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def tell(self, verb: str, *arguments: Any) -> Any:
        self.send(verb, *arguments)
        return self.reply()

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()


def together(remotes: list[Remote], verb: str, *arguments: Any) -> list[Any]:
    """Make the same call in every process of a pool at once, as SPMD programs need it."""
    for remote in remotes:
        remote.send(verb, *arguments)
    return [remote.reply() for remote in remotes]


def pool_of_two(devices: int) -> list[Remote]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    return [Remote(devices, address, 2, rank) for rank in range(2)]


@pytest.fixture(scope="module")
def source() -> Iterator[Remote]:
    remote = Remote(4)
    yield remote
    remote.kill()


@pytest.fixture
def doomed() -> Iterator[Remote]:
    """A source that a test may kill or stop."""
    remote = Remote(4)
    remote.tell("make", (1, 2, 2), 1, 16)
    yield remote
    remote.kill()


def here(*sizes: int) -> dict[str, Any]:
    """A target in this process."""
    devices = 1
    for size in sizes:
        devices *= size
    return placed(mesh_of(*sizes, devices=jax.devices()[:devices]), GENERATED)


def bytes_lacked(layout: dict[str, Any]) -> int:
    """Return the bytes that one device lacks: all of its shards, since it has none of the new weights."""
    total = 0
    for name, array in values(0).items():
        size = array.dtype.itemsize
        for part in layout[name].shard_shape(array.shape):
            size *= part
        total += size
    return total


@pytest.mark.parametrize("carrier", ["direct", "host"])
@pytest.mark.parametrize("target", [(1, 1, 2), (2, 1, 2)], ids=str)
def test_every_shard_arrives_from_another_process(source: Remote, target: tuple[int, ...], carrier: str) -> None:
    layout, exchange = here(*target), Exchange(limit_s=LIMIT_S)
    splits = splits_of(layout, values(0))
    for step, sizes in enumerate([(1, 1, 4), (1, 2, 2)]):
        source.tell("make", sizes, step, 16)
        offer = source.tell("offer", splits, carrier)
        assert {type(parcel) for parcel in offer.parcels.values()} == {CARRIERS[carrier]}
        weights, delivery = exchange.take([offer], layout)
        assert {name: leaf.sharding for name, leaf in weights.items()} == layout
        assert in_place(weights, values(step))
        assert delivery.bytes_per_device == bytes_lacked(layout)


def test_what_is_fetched_comes_bucket_by_bucket(source: Remote, monkeypatch: pytest.MonkeyPatch) -> None:
    layout, exchange = here(1, 1, 4), Exchange(limit_s=LIMIT_S)
    source.tell("make", (1, 2, 2), 1, 16)
    for bucket_bytes, buckets in ((1, len(layout)), (1 << 29, 1)):
        monkeypatch.setattr(transfer, "BUCKET_BYTES", bucket_bytes)
        source.tell("bucket", bucket_bytes)
        offer = source.tell("offer", splits_of(layout, values(0)), "direct")
        assert len(offer.parcels[0].tickets) == buckets
        waiting, delivery = exchange.fetch([offer], layout)
        assert delivery.bytes_per_device == bytes_lacked(layout)
        assert in_place(to_device(waiting)[0], values(1))


def test_over_the_wire_no_block_comes_twice_to_a_process(source: Remote) -> None:
    source.tell("make", (1, 2, 2), 1, 16)
    offer = source.tell("offer", splits_of(here(4, 1, 1), values(0)), "host")
    assert {block.leaf: part.nbytes for block, part in offer.parcels[0].arrays.items()} == {
        leaf: array.nbytes for leaf, (_, array) in enumerate(sorted(values(0).items()))
    }


@pytest.mark.slow
def test_pools_of_several_processes_on_both_sides() -> None:
    sources, targets = pool_of_two(2), pool_of_two(2)
    try:
        for step, (trained, generated) in enumerate([((1, 2, 2), (1, 1, 4)), ((1, 1, 4), (2, 1, 2))]):
            together(sources, "make", trained, step, 16)
            splits = together(targets, "want", generated)[0]
            for carrier in ("direct", "host"):
                offers = together(sources, "offer", splits, carrier)
                arrived = together(targets, "take", offers, step)
                layout = here(*generated)
                assert {type(parcel) for offer in offers for parcel in offer.parcels.values()} == {CARRIERS[carrier]}
                assert arrived == [(True, bytes_lacked(layout))] * 2
    finally:
        for remote in sources + targets:
            remote.kill()


@pytest.mark.slow
def test_what_was_taken_or_replaced_is_freed_at_the_source(source: Remote) -> None:
    layout, exchange = here(1, 1, 2), Exchange(limit_s=LIMIT_S)
    rows = 64 * MIB // (32 * 4)
    expected = values(1, size=rows)
    splits = splits_of(layout, {name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for name, leaf in expected.items()})
    source.tell("make", (1, 2, 2), 1, rows)

    def rounds(count: int, *, taken: bool) -> int:
        """Bytes by which the source grows: each round offers 64 MiB, two devices half of it each."""
        before = source.tell("resident_bytes")
        for _ in range(count):
            offer = source.tell("offer", splits, "direct")
            if taken:
                weights, _ = exchange.take([offer], layout)
                assert in_place(weights, expected)
        return source.tell("resident_bytes") - before

    rounds(4, taken=True)  # the server's staging buffers fill up
    assert rounds(6, taken=True) < 64 * MIB
    assert rounds(1, taken=False) > 48 * MIB  # what nobody takes stays: the resident size shows it
    assert rounds(5, taken=False) < 64 * MIB  # each takes the place of the one before


def test_an_offer_that_a_newer_one_replaced_is_an_error(source: Remote) -> None:
    layout, exchange = here(1, 1, 2), Exchange(limit_s=LIMIT_S)
    splits = splits_of(layout, values(0))
    source.tell("make", (1, 2, 2), 1, 16)
    older, newer = [source.tell("offer", splits, "direct") for _ in range(2)]
    error, seconds = failure(exchange, older, layout)
    assert "withdrawn" in str(error) and seconds < LIMIT_S / 2
    weights, _ = exchange.take([newer], layout)
    assert in_place(weights, values(1))


def failure(exchange: Exchange, offer: Offer, layout: Any) -> tuple[TransferError, float]:
    start = time.monotonic()
    with pytest.raises(TransferError) as caught:
        exchange.take([offer], layout)
    return caught.value, time.monotonic() - start


@pytest.mark.slow
def test_a_source_that_hangs_or_died_is_named_in_time(doomed: Remote) -> None:
    layout, exchange = here(1, 1, 2), Exchange(limit_s=1.0)
    splits = splits_of(layout, values(0))
    offer = doomed.tell("offer", splits, "direct")
    os.kill(doomed.process.pid, signal.SIGSTOP)
    os.waitpid(doomed.process.pid, os.WUNTRACED)  # until it has stopped
    error, seconds = failure(exchange, offer, layout)
    assert "may hang" in str(error) and error.address in str(error)
    assert 1.0 <= seconds < 10.0
    os.kill(doomed.process.pid, signal.SIGCONT)
    weights, _ = exchange.take([doomed.tell("offer", splits, "direct")], layout)
    assert in_place(weights, values(1))

    known, stranger = Exchange(limit_s=LIMIT_S), Exchange(limit_s=1.0)
    known.take([doomed.tell("offer", splits, "direct")], layout)
    offer = doomed.tell("offer", splits, "direct")
    doomed.kill()
    error, seconds = failure(known, offer, layout)
    assert error.address == offer.parcels[0].address
    assert error.address in str(error) and "may have died" in str(error)
    assert seconds < LIMIT_S / 2, "who was connected hears of it at once"
    assert str(pickle.loads(pickle.dumps(error))) == str(error)
    error, seconds = failure(stranger, offer, layout)
    assert error.address in str(error) and seconds < 10.0, "and others within the limit"


def test_an_offer_is_taken_once(source: Remote) -> None:
    source.tell("make", (1, 2, 2), 1, 16)
    layout, exchange = here(1, 1, 2), Exchange(limit_s=0.5)
    offer = source.tell("offer", splits_of(layout, values(0)), "direct")
    exchange.take([offer], layout)
    error, _ = failure(exchange, offer, layout)
    assert "was already taken" in str(error)


def test_weights_that_the_source_deleted_before_they_were_taken_are_an_error(source: Remote) -> None:
    source.tell("make_as_wanted", 1)
    layout, exchange = here(1, 1, 4), Exchange(limit_s=LIMIT_S)
    offer = source.tell("offer", splits_of(layout, values(0)), "direct")
    source.tell("delete")
    error, _ = failure(exchange, offer, layout)
    assert "deleted or donated" in str(error)


def test_weights_that_go_before_they_are_taken_are_offered_as_copies(source: Remote) -> None:
    """The arrays are offloaded right after the offer."""
    layout, exchange = here(1, 1, 4), Exchange(limit_s=LIMIT_S)
    for carrier in ("direct", "host"):
        source.tell("make_as_wanted", 1)
        offer = source.tell("offer", splits_of(layout, values(0)), carrier, False)
        source.tell("delete")
        weights, _ = exchange.take([offer], layout)
        assert in_place(weights, values(1))


def test_a_backend_without_a_transfer_server_says_what_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    from jax.experimental import transfer

    monkeypatch.delattr(transfer, "start_transfer_server")
    with pytest.raises(TransferError, match=r"set cluster\.weights='host'"):
        Exchange("127.0.0.2")._wire.publish([])


@pytest.mark.parametrize(("host", "address"), [("localhost", "127.0.0.1:"), ("::1", "[::1]:")])
def test_others_are_given_an_address_in_numbers(source: Remote, host: str, address: str) -> None:
    source.tell("make", (1, 2, 2), 1, 16)
    source.tell("reach_at", host)
    layout, exchange = here(1, 1, 2), Exchange(host, limit_s=LIMIT_S)
    offer = source.tell("offer", splits_of(layout, values(0)), "direct")
    assert offer.parcels[0].address.startswith(address)
    weights, _ = exchange.take([offer], layout)
    assert in_place(weights, values(1))


@pytest.mark.parametrize(("host", "why"), [("0.0.0.0", "means every address"), ("no such host", "cannot be resolved")])
def test_a_host_that_others_cannot_reach_is_refused(host: str, why: str) -> None:
    with pytest.raises(ValueError, match=f"host='{host}' {why}"):
        Exchange(host)._wire.publish([])

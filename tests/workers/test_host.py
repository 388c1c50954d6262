"""Memory of a process of a pool: what is kept, and what is freed."""

import weakref
from collections.abc import Iterator
from contextlib import closing
from types import SimpleNamespace

import jax
import pytest
from tiny_runs import get_config

from jaxrlhf.batching.transfer_protocol import ONE_TO_ALL, RankCoordinates, worker_method
from jaxrlhf.data.tokenizer import embedded_tokenizer
from jaxrlhf.sharding.pool import ResourcePool
from jaxrlhf.single_controller import host as module
from jaxrlhf.single_controller.host import Host
from jaxrlhf.workers.build import Builder, Phase

pytestmark = pytest.mark.usefixtures("programs")


def made() -> Host:
    """With the reference alone."""
    pool = ResourcePool("all", tuple(jax.devices()[:1]))
    return Host(Builder(get_config(), embedded_tokenizer(), pool, ("reference",), progress=lambda *_: None))


@pytest.fixture
def host() -> Iterator[Host]:
    with closing(made()) as one:
        yield one


def stage() -> Phase:
    return Phase(get_config(), ("reference",), 1)


@pytest.mark.slow
def test_workers_of_the_stage_before_are_freed_with_their_arrays(host: Host) -> None:
    host.build(stage())
    worker = weakref.ref(host.workers["reference"])
    host.workers["reference"].itself = host.workers["reference"]  # only the collector frees a cycle
    arrays = sum(array.nbytes for array in jax.live_arrays())
    host.build(stage())
    assert worker() is None
    assert sum(array.nbytes for array in jax.live_arrays()) == arrays


class Counter:
    """A worker that counts its calls."""

    place, calls = RankCoordinates(0, {}, ()), 0

    @worker_method(ONE_TO_ALL)
    def count(self) -> int:
        self.calls += 1
        return self.calls


@pytest.mark.parametrize(("platform", "times"), [("cpu", 2), ("gpu", 0)])
def test_memory_is_given_back_after_calls_where_arrays_lie_in_it(
    host: Host, monkeypatch: pytest.MonkeyPatch, platform: str, times: int
) -> None:
    returned: list[bool] = []
    monkeypatch.setattr(module, "return_free_memory", lambda: returned.append(True))
    pool = SimpleNamespace(devices=(SimpleNamespace(platform=platform),))
    monkeypatch.setattr(host.builder, "on", SimpleNamespace(pool=pool))
    host.workers["reference"] = Counter()
    assert [host.call("reference", "count", (), {}) for _ in range(2)] == [1, 2]
    assert len(returned) == times

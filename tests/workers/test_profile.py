"""Traces of a step: the processes that write them, and where."""

from dataclasses import replace
from pathlib import Path

import pytest
from tiny_runs import get_config

from jaxrlhf.config import RayCluster
from jaxrlhf.single_controller.host import Built
from jaxrlhf.single_controller.pools import Ranks, Roles
from jaxrlhf.workers.build import Phase


class Told(Ranks):
    """Ranks that write down what they are told."""

    def __init__(self, name: str, told: list) -> None:
        super().__init__(name)
        self.built, self._told = [Built({}, ())], told

    def on_all(self, method, *args):
        self._told.append((self.name, method, *args))
        return []

    def call(self, role, worker_method, args, kwargs):
        raise NotImplementedError

    def close(self):
        raise NotImplementedError


def roles_and_told(*, hosts: bool) -> tuple[Roles, list]:
    config = replace(get_config(), devices=None, cluster=RayCluster() if hosts else None)
    told: list = []
    return Roles([Told("left", told), Told("right", told)], Phase(config, (), 1, None)), told


def test_pools_of_one_process_share_its_trace(tmp_path):
    roles, told = roles_and_told(hosts=False)
    with roles.profiled(tmp_path):
        assert told == [("left", "start_trace", tmp_path)]
    assert told[1:] == [("left", "stop_trace")]


def test_hosts_trace_into_the_folders_of_their_pools(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    roles, told = roles_and_told(hosts=True)
    with roles.profiled(Path("profile")):
        assert told == [(name, "start_trace", tmp_path / "profile" / name) for name in ("left", "right")]
    assert told[2:] == [("left", "stop_trace"), ("right", "stop_trace")]


@pytest.mark.parametrize("hosts", [False, True])
def test_an_error_in_a_traced_step_comes_out_as_it_is(tmp_path, hosts):
    roles, told = roles_and_told(hosts=hosts)
    with pytest.raises(ValueError, match="no answer"), roles.profiled(tmp_path):
        raise ValueError("no answer")
    # This process may trace again; hosts end with the call that failed.
    assert [method for _, method, *_ in told].count("stop_trace") == (0 if hosts else 1)

"""Unavailable clusters are refused before anything is started."""

import sys

import pytest

from jaxrlhf.config import RayCluster, Refusal
from jaxrlhf.single_controller.ray import cluster


def test_missing_ray_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(Refusal, match=r"pip install 'jaxrlhf\[ray\]'"):
        cluster.connect(RayCluster())


@pytest.mark.parametrize("address", ["127.0.0.1:1", "[::1]:1"])
def test_no_cluster_at_the_address(address):
    with pytest.raises(Refusal, match=r"no Ray cluster answers at RayCluster\.address="):
        cluster._check_reachable(address)

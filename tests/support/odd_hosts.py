"""Modified host objects, in place of `ray_backend.make_host`, and a failing reward function."""

import os
import time
from typing import Any

import ray_world

from jaxrlhf.single_controller import ray_backend

make_host = ray_backend.make_host


def counting(rank: int, hosts: int, **settings: Any) -> Any:
    """Host that also counts the bytes loaded from other processes."""
    host, seen = make_host(rank, hosts, **settings), ray_world.traffic()
    host.loaded_bytes = lambda: seen["get"]
    return host


def sleeping(rank: int, hosts: int, **settings: Any) -> Any:
    """Host that hangs in the actor's first update."""
    host = make_host(rank, hosts, **settings)
    call = host.call

    def call_or_sleep(role: str, method: str, *args: Any) -> Any:
        while method == "update_actor":
            time.sleep(1)
        return call(role, method, *args)

    host.call = call_or_sleep
    return host


def strange(prompt: str, response: str, answer: str | None, record: Any) -> float:
    """Reward that ends its process, hangs, raises or scores, depending on the answer."""
    what = int(answer or 0) % 4
    if what == 0:
        os._exit(3)
    while what == 1:
        time.sleep(1)
    if what == 2:
        raise KeyError("no such answer")
    return 1.0

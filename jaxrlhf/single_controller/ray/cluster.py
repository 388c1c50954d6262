"""Ray cluster on which a run's host processes are started: connection, resources, environment."""

import logging
import os
import signal
import socket
import sys
import threading
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from jaxrlhf.config import Refusal
from jaxrlhf.config.cluster import RayCluster
from jaxrlhf.single_controller.ray.failure import HostId, HostNotStarted

# Prefixes of environment variables that host processes inherit.
SETTINGS = ("JAX_", "XLA_", "NCCL_", "LIBTPU_", "HF_", "TRANSFORMERS_", "TOKENIZERS_")
SECRETS = ("HF_TOKEN",)  # inherited too, but kept out of Ray's records
DEVICE_COUNT = "xla_force_host_platform_device_count"
LOCAL_HOSTS = 256  # maximum host processes of a local cluster; they share its cores, which are not counted
CONNECT_S = 10.0
ACCELERATORS = {"cuda": "GPU", "tpu": "TPU"}  # Ray's names


@dataclass(frozen=True)
class Connection:
    """Connection of this process to a cluster.

    Attributes:
      dashboard: URL of the dashboard, or the reason why there is none.
      nodes: Number of machines that are up.
      owned: True if `disconnect` ends the connection, and with it a local cluster.
    """

    address: str
    dashboard: str
    nodes: int
    owned: bool


def connect(cluster: RayCluster) -> Connection:
    """Connect to a cluster, or start a cluster on this machine.

    An existing connection of this process is used, and left open when the run ends.

    Raises:
      Refusal: Ray is not installed, or no cluster answers at the address.
    """
    ray = _ray()
    owned = not ray.is_initialized()
    if owned:
        _check_reachable(cluster.address)
    with _quiet():
        context = _start(ray, cluster)
    return Connection(
        address=context.address_info["address"],
        dashboard=_dashboard(context.dashboard_url),
        nodes=sum(node["Alive"] for node in ray.nodes()),
        owned=owned,
    )


def disconnect(connection: Connection) -> None:
    """End the connection; a local cluster's processes end with it."""
    import ray

    if connection.owned:
        with _quiet():
            ray.shutdown()


def platform(cluster: RayCluster) -> str:
    """Return the platform that host processes compute on."""
    import ray

    if cluster.platform != "auto":
        return cluster.platform
    resources = ray.cluster_resources()
    return next((name for name in ("tpu", "cuda") if resources.get(ACCELERATORS[name])), "cpu")


_RESOURCE_ADVICE = "add machines with `ray start --address=...`, or lower the sizes of pools or cluster.cpus_per_host"


def needs(cluster: RayCluster) -> dict[str, float]:
    """Return the Ray resources of one host process."""
    accelerator = ACCELERATORS.get(platform(cluster))
    return {"CPU": cluster.cpus_per_host} | ({accelerator: float(cluster.devices_per_host)} if accelerator else {})


def place(name: str, hosts: int, cluster: RayCluster, *, timeout_s: float) -> Any:
    """Reserve a placement group for a pool's host processes, spread over machines as far as possible.

    Raises:
      HostNotStarted: The cluster lacks the resources, or they do not become free in time.
    """
    import ray

    wanted = needs(cluster)
    total = ray.cluster_resources()
    required = f"requires {hosts} host processes with {_text(wanted)} each; the cluster has {_text(total, wanted)}"
    may_grow = cluster.address is not None  # an autoscaler may add machines
    if not may_grow and any(total.get(kind, 0) < hosts * count for kind, count in wanted.items()):
        raise HostNotStarted(HostId(name), f"{name}.start", f"{required}; {_RESOURCE_ADVICE}")
    group = ray.util.placement_group([wanted] * hosts, strategy="SPREAD")
    if not group.wait(timeout_seconds=timeout_s):
        ray.util.remove_placement_group(group)
        free = _text(ray.available_resources(), wanted)
        waited = f"{required}, with {free} free, and no more became free within {timeout_s:g} s"
        raise HostNotStarted(HostId(name), f"{name}.start", f"{waited}; {_RESOURCE_ADVICE}")
    return group


def is_vacant(group: Any) -> bool:
    """Return True if Ray has seen the end of every process in a pool's placement group."""
    import ray

    cpus = f"CPU_group_{group.id.hex()}"  # Ray's name for the group's CPUs on all machines
    return ray.available_resources().get(cpus, 0) >= ray.cluster_resources().get(cpus, 0)


def environment(cluster: RayCluster) -> dict[str, str]:
    """Return the environment variables of host processes, which are set before Python starts."""
    kind = platform(cluster)
    settings = {name: value for name, value in os.environ.items() if name.startswith(SETTINGS) and name not in SECRETS}
    if "XLA_FLAGS" in settings:  # JAX refuses two settings of the number of CPU devices at once
        flags = settings["XLA_FLAGS"].split()
        settings["XLA_FLAGS"] = " ".join(flag for flag in flags if DEVICE_COUNT not in flag)
    settings["NPROC"] = os.environ.get("NPROC", "32")
    settings["JAX_PLATFORMS"] = "cpu" if kind == "cpu" else f"{kind},cpu"
    settings["JAX_NUM_CPU_DEVICES"] = str(cluster.devices_per_host if kind == "cpu" else 1)
    installed = (sys.prefix + os.sep, sys.base_prefix + os.sep)
    extra = [path for path in map(os.path.abspath, sys.path) if not path.startswith(installed)]
    return settings | {"PYTHONPATH": os.pathsep.join(extra)}


def _text(resources: dict[str, float], kinds: Iterable[str] | None = None) -> str:
    return ", ".join(f"{kind} {resources.get(kind, 0):g}" for kind in kinds or resources)


def _ray() -> Any:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # else each start prints a notice about usage reports
    # Without this, a Ray call of another thread after `disconnect` would start a new cluster.
    os.environ.setdefault("RAY_ENABLE_AUTO_CONNECT", "0")
    try:
        import ray
    except ModuleNotFoundError as error:
        if error.name != "ray":
            raise
        raise Refusal("RayCluster requires Ray, which is not installed: pip install 'jaxrlhf[ray]'") from error
    return ray


def _check_reachable(address: str | None) -> None:
    """Raise `Refusal` if nothing listens at the address; Ray itself would wait for minutes and end the process."""
    if address in (None, "auto"):
        return
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_S).close()
    except OSError as error:
        raise Refusal(
            f"no Ray cluster answers at RayCluster.address={address!r} ({error}); start one there with `ray start "
            f"--head --port={port}`, or set address=None to start one on this machine"
        ) from error


def _start(ray: Any, cluster: RayCluster) -> Any:
    options: dict[str, Any] = {"address": cluster.address or "local"}
    if cluster.address is None:
        # By default Ray's worker processes have niceness 15 and yield to everything else; host processes compute.
        os.environ.setdefault("RAY_worker_niceness", "0")
        options["num_cpus"] = round(LOCAL_HOSTS * max(1.0, cluster.cpus_per_host))
    ray._private.worker._worker_logs_enabled = False  # it prints deaths, which the errors here report
    try:
        return ray.init(**options, log_to_driver=False, logging_level=logging.ERROR, ignore_reinit_error=True)
    except (ConnectionError, ray.exceptions.AuthenticationError) as error:
        # Ray raises the class only in some versions; in others its traceback is the text of another error.
        if any("AuthenticationError" in f"{type(cause).__name__} {cause}" for cause in _causes(error)):
            raise Refusal(
                f"the Ray cluster at RayCluster.address={cluster.address!r} requires a token; set "
                "RAY_AUTH_MODE=token, and copy ~/.ray/auth_token from the machine that started the cluster"
            ) from error
        raise Refusal(f"cannot connect to a Ray cluster at RayCluster.address={cluster.address!r}: {error}") from error


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error, and the errors during whose handling it was raised."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _dashboard(url: str | None) -> str:
    return f"http://{url}" if url else "none; for a dashboard: pip install 'ray[default]'"


@contextmanager
def _quiet() -> Iterator[None]:
    """Suppress Ray's warnings about its own settings within the block, and restore the user's handler of SIGTERM.

    Without a handler of the user, Ray's handler stays: it exits the process, which ends a local cluster.
    """
    handler = signal.getsignal(signal.SIGTERM) if threading.current_thread() is threading.main_thread() else None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            yield
        finally:
            if callable(handler):
                signal.signal(signal.SIGTERM, handler)

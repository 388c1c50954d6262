"""Ray actor of a host process: holds one object whose methods the controller calls.

Ray starts the process with its environment variables (`cluster.environment`) set, so JAX may be imported at any time.
"""

import faulthandler
import os
import pickle
import socket
import sys
import threading
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from jaxrlhf.batching.transfer_protocol import rows_of
from jaxrlhf.single_controller.ray.failure import HostId, may_have_lost_peer
from jaxrlhf.single_controller.ray.stored import Stored, loaded

STDOUT, STDERR = 1, 2
STACK_FRAMES = 8


@dataclass(frozen=True)
class Setup:
    """Settings with which the processes of a pool start.

    Attributes:
      hosts: Hosts in the order of their numbers.
      coordinator: Address `ip:port` of JAX's coordination service.
      factory: Pickled function of rank and number of hosts that makes the object.
      directory: Working directory of the controller, used if it exists on this machine.
      secrets: Environment variables that are kept out of Ray's records.
    """

    hosts: tuple[HostId, ...]
    coordinator: str
    factory: bytes
    log_directory: Path
    directory: str
    import_path: tuple[str, ...]
    secrets: dict[str, str]
    timeout_s: float


@dataclass(frozen=True)
class ProcessLocation:
    """Machine and process id of a host. `worker` is the machine's number in a TPU slice; None outside of one."""

    node_ip: str
    pid: int
    worker: int | None


@dataclass(frozen=True)
class Raised:
    """Exception raised by a call on a host.

    Attributes:
      pickled: Pickled exception; None if the exception does not pickle.
      lost_peer: True if the exception may only be a consequence of the death of another host.
    """

    pickled: bytes | None
    kind: str
    text: str
    stack: str
    lost_peer: bool


@dataclass(frozen=True)
class Activity:
    """Call in progress on a host.

    Attributes:
      stack: Innermost lines of the call's stack.
      in_jax: True if the call waits in JAX, as all hosts do if one host misses a collective.
    """

    label: str
    running_s: float
    stack: str
    in_jax: bool


class HostProcess:
    """Ray actor of a host process. Calls run in threads, so that `status` answers while calls run."""

    def __init__(self) -> None:
        self._object: Any = None
        self._host: HostId
        self._setup: Setup
        self._calls: dict[int, tuple[str, float]] = {}

    def place(self) -> ProcessLocation:
        """Return the location of this process."""
        import ray

        worker = os.environ.get("TPU_WORKER_ID", "")
        return ProcessLocation(ray.util.get_node_ip_address(), os.getpid(), int(worker) if worker.isdigit() else None)

    def free_address(self) -> str:
        """Return an unused `ip:port` of this machine."""
        import ray

        with socket.socket() as probe:
            probe.bind(("", 0))
            return f"{ray.util.get_node_ip_address()}:{probe.getsockname()[1]}"

    def join(self, setup: Setup, number: int, label: str) -> Stored | Raised:
        """Join the pool's other processes under a number; return the rank that JAX assigns."""
        self._setup = setup
        self._host = setup.hosts[number]
        return self._run(label, lambda: self._join(setup, number))

    def start(self, host: HostId, label: str) -> Stored | Raised:
        """Build the object; the process is `host` from now on."""
        self._host = host
        return self._run(label, lambda: self._start(self._setup, host))

    def call(self, method: str, args: list[Any], label: str) -> Stored | Raised:
        """Run a method of the object. `args` is a list with one reference, because Ray would resolve a bare one."""
        import ray

        def run() -> Any:
            return getattr(self._object, method)(*loaded(ray.get(args[0])))

        return self._run(label, run)

    def peek(self, name: str) -> Any:
        """Return an attribute of the object, also while calls run."""
        return getattr(self._object, name)

    def status(self) -> tuple[Activity, ...]:
        """Return the calls in progress."""
        frames = sys._current_frames()
        now = time.time()
        return tuple(
            Activity(label, now - start_s, _stack(frames[thread]), _in_jax(frames[thread]))
            for thread, (label, start_s) in list(self._calls.items())
            if thread in frames
        )

    def _join(self, setup: Setup, number: int) -> int:
        _open_log(setup.log_directory, setup.hosts[number])
        os.environ.update(setup.secrets)
        sys.path[:] = [*setup.import_path, *(entry for entry in sys.path if entry not in setup.import_path)]
        if Path(setup.directory).is_dir():
            os.chdir(setup.directory)
        return _join_jax(setup, number) if len(setup.hosts) > 1 else number

    def _start(self, setup: Setup, host: HostId) -> None:
        if host not in setup.hosts:  # JAX assigned another rank
            _open_log(setup.log_directory, host)
        self._object = pickle.loads(setup.factory)(host.rank, len(setup.hosts))

    def _run(self, label: str, function: Any) -> Stored | Raised:
        import ray

        thread = threading.get_ident()
        self._calls[thread] = (label, time.time())
        try:
            value = function()
            reference = ray.put(value)
        except BaseException as error:  # also SystemExit, which would end this process without a reason
            return _raised(error)
        finally:
            del self._calls[thread]
        return Stored(reference, self._host, label, rows_of(value))


def log_path(directory: Path, host: HostId) -> Path:
    """Return the path of a host's log file."""
    return directory / f"{host.pool}-{host.rank}.log"


def log_header(host: HostId) -> str:
    """Return the first line of a host process in a log, which may also hold the output of earlier processes."""
    return f"== {host}"


def _open_log(directory: Path, host: HostId) -> None:
    """Redirect all printed output to the host's log, including output of C code and of crashes."""
    log = log_path(directory, host)
    log.parent.mkdir(parents=True, exist_ok=True)
    sys.stdout.flush()
    sys.stderr.flush()
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(file, STDOUT)
    os.dup2(file, STDERR)
    os.close(file)
    sys.stdout, sys.stderr = (os.fdopen(number, "w", buffering=1, closefd=False) for number in (STDOUT, STDERR))
    faulthandler.enable(sys.stderr, all_threads=False)
    print(log_header(host), time.strftime("%Y-%m-%d %H:%M:%S"))


def _join_jax(setup: Setup, number: int) -> int:
    """Join the pool's processes into one JAX distributed world; return the rank of this process."""
    import jax

    jax.distributed.initialize(
        setup.coordinator,
        num_processes=len(setup.hosts),
        process_id=number,
        cluster_detection_method="deactivate",
        initialization_timeout=max(1, int(setup.timeout_s)),
    )
    if jax.process_count() != len(setup.hosts):
        raise RuntimeError(f"JAX reports {jax.process_count()} processes, but the pool has {len(setup.hosts)} hosts")
    return jax.process_index()


def _stack(frame: FrameType) -> str:
    """Return the innermost lines of a stack, without lines of this file."""
    entries = traceback.extract_stack(frame)
    last = max((index for index, entry in enumerate(entries) if entry.filename == __file__), default=-1)
    return "".join(traceback.format_list(entries[last + 1 :][-STACK_FRAMES:]))


def _in_jax(frame: FrameType) -> bool:
    return frame.f_globals.get("__name__", "").partition(".")[0] in ("jax", "jaxlib")


def _raised(error: BaseException) -> Raised:
    from ray import cloudpickle  # unlike pickle, it sends classes of the main module

    trace = error.__traceback__
    while trace and trace.tb_next and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    stack = "".join(traceback.format_exception(type(error), error, trace))
    sys.stderr.write(stack)
    pickled = None
    if isinstance(error, Exception):
        try:
            pickled = cloudpickle.dumps(error)
            pickle.loads(pickled)
        except Exception:  # pickling hooks may raise anything; the text is sent nevertheless
            pickled = None
    return Raised(pickled, type(error).__qualname__, str(error), stack, may_have_lost_peer(error))

"""The Ray actor of a host process: holds one object whose methods the controller calls.

Ray starts it with its environment (`cluster.environment`) already in place, so nothing
here has to come before JAX.
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
    """Settings that the processes of a pool start with.

    Attributes:
      hosts: Hosts in the order of their numbers.
      coordinator: `ip:port` where JAX processes meet.
      factory: Pickled function of rank and number of hosts that makes the object.
      directory: The controller's working directory, taken where this machine has it.
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
    """Machine and process id of a host. `worker` is the machine's number in a TPU slice, if it is in one."""

    node_ip: str
    pid: int
    worker: int | None


@dataclass(frozen=True)
class Raised:
    """An exception that a call ended with.

    Attributes:
      pickled: The exception; None if it does not pickle.
      lost_peer: True if it may only follow from the death of another host.
    """

    pickled: bytes | None
    kind: str
    text: str
    stack: str
    lost_peer: bool


@dataclass(frozen=True)
class Activity:
    """A call in progress.

    Attributes:
      stack: Its innermost lines.
      in_jax: True if it waits for JAX, as all of a pool do when one keeps away from a collective.
    """

    label: str
    running_s: float
    stack: str
    in_jax: bool


class HostProcess:
    """The Ray actor. Calls run in threads, so that `status` answers while they do."""

    def __init__(self) -> None:
        self._object: Any = None
        self._host: HostId
        self._setup: Setup
        self._calls: dict[int, tuple[str, float]] = {}

    def place(self) -> ProcessLocation:
        """Location of this process."""
        import ray

        worker = os.environ.get("TPU_WORKER_ID", "")
        return ProcessLocation(ray.util.get_node_ip_address(), os.getpid(), int(worker) if worker.isdigit() else None)

    def free_address(self) -> str:
        """An `ip:port` of this machine that nobody listens on."""
        import ray

        with socket.socket() as probe:
            probe.bind(("", 0))
            return f"{ray.util.get_node_ip_address()}:{probe.getsockname()[1]}"

    def join(self, setup: Setup, number: int, label: str) -> Stored | Raised:
        """Join the pool's other processes under a number; the value is the rank that JAX gives."""
        self._setup = setup
        self._host = setup.hosts[number]
        return self._run(label, lambda: self._join(setup, number))

    def start(self, host: HostId, label: str) -> Stored | Raised:
        """Build the object; the process is `host` from now on."""
        self._host = host
        return self._run(label, lambda: self._start(self._setup, host))

    def call(self, method: str, args: list[Any], label: str) -> Stored | Raised:
        """Run a method of the object. `args` is a list of one reference, which Ray would otherwise resolve itself."""
        import ray

        def run() -> Any:
            return getattr(self._object, method)(*loaded(ray.get(args[0])))

        return self._run(label, run)

    def peek(self, name: str) -> Any:
        """Attribute of the object, while calls run."""
        return getattr(self._object, name)

    def status(self) -> tuple[Activity, ...]:
        """The calls in progress."""
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
        if host not in setup.hosts:  # its rank is another now
            _open_log(setup.log_directory, host)
        self._object = pickle.loads(setup.factory)(host.rank, len(setup.hosts))

    def _run(self, label: str, function: Any) -> Stored | Raised:
        import ray

        thread = threading.get_ident()
        self._calls[thread] = (label, time.time())
        try:
            value = function()
            reference = ray.put(value)
        except BaseException as error:  # SystemExit too: it would end this process without a reason
            return _raised(error)
        finally:
            del self._calls[thread]
        return Stored(reference, self._host, label, rows_of(value))


def log_path(directory: Path, host: HostId) -> Path:
    """Log file of a host."""
    return directory / f"{host.pool}-{host.rank}.log"


def log_header(host: HostId) -> str:
    """First line of this process in a log that earlier processes wrote to as well."""
    return f"== {host}"


def _open_log(directory: Path, host: HostId) -> None:
    """Send everything that is printed, by C code too and in a crash, to the log of a host."""
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
    """Make the pool's processes one JAX world; returns this one's rank in it."""
    import jax

    jax.distributed.initialize(
        setup.coordinator,
        num_processes=len(setup.hosts),
        process_id=number,
        cluster_detection_method="deactivate",
        initialization_timeout=max(1, int(setup.timeout_s)),
    )
    if jax.process_count() != len(setup.hosts):
        raise RuntimeError(f"JAX counts {jax.process_count()} processes in a pool of {len(setup.hosts)} hosts")
    return jax.process_index()


def _stack(frame: FrameType) -> str:
    """Innermost lines of a stack, without those of this file."""
    entries = traceback.extract_stack(frame)
    own = max((index for index, entry in enumerate(entries) if entry.filename == __file__), default=-1)
    return "".join(traceback.format_list(entries[own + 1 :][-STACK_FRAMES:]))


def _in_jax(frame: FrameType) -> bool:
    return frame.f_globals.get("__name__", "").partition(".")[0] in ("jax", "jaxlib")


def _raised(error: BaseException) -> Raised:
    from ray import cloudpickle  # unlike pickle it knows classes of the user's main module

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
        except Exception:  # hooks of the object may raise anything; its text is then what is left
            pickled = None
    return Raised(pickled, type(error).__qualname__, str(error), stack, may_have_lost_peer(error))

"""Objects of the host processes in Ray tests, and functions that find existing processes."""

import ctypes
import io
import os
import pickle
import signal
import sys
import threading
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import ray
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxrlhf.config import Layout
from jaxrlhf.single_controller.ray.actor import HostProcess, Setup


class ArrayBytes(pickle.Pickler):
    """Pickler that counts the bytes of all arrays in a value; a handle has none."""

    def __init__(self, value: object) -> None:
        self.nbytes = 0
        super().__init__(io.BytesIO(), protocol=5, buffer_callback=self._add)
        self.dump(value)

    def _add(self, buffer: pickle.PickleBuffer) -> None:
        self.nbytes += buffer.raw().nbytes

    def persistent_id(self, value: object) -> str | None:
        return "handle" if isinstance(value, ray.ObjectRef) else None


def traffic(patch=setattr) -> dict[str, int]:
    """Count the array bytes that this process receives from Ray and sends to Ray from now on."""
    seen = {"get": 0, "put": 0}

    def counted(name, function, of):
        def wrapped(*args, **kwargs):
            result = function(*args, **kwargs)
            seen[name] += ArrayBytes(of(args, result)).nbytes
            return result

        patch(ray, name, wrapped)

    counted("get", ray.get, lambda args, result: result)
    counted("put", ray.put, lambda args, result: args[0])
    return seen


def message_bytes(patch) -> dict[str, int]:
    """Count the bytes of values that Ray writes and reads in this process from now on, including texts."""
    seen = {"written": 0, "read": 0}
    context = ray._private.serialization.SerializationContext
    serialize, deserialize = context.serialize, context.deserialize_objects

    def written(self, value):
        made = serialize(self, value)
        seen["written"] += made.total_bytes
        return made

    def read(self, objects, *args):
        seen["read"] += sum(0 if one[0] is None else len(one[0]) for one in objects)
        return deserialize(self, objects, *args)

    patch(context, "serialize", written)
    patch(context, "deserialize_objects", read)
    return seen


class Unpicklable(Exception):
    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.generator = (n for n in ())


class Reversed(HostProcess):
    """Host process whose JAX rank is counted from the other end, as in some TPU slices."""

    def join(self, setup: Setup, number: int, label: str) -> object:
        jax.process_index = lambda: len(setup.hosts) - 1 - number
        return super().join(setup, number, label)


class World:
    """Object with calls that work or fail, on one rank or on all."""

    def __init__(self, rank: int, hosts: int) -> None:
        self.rank = rank
        self.hosts = hosts

    def facts(self) -> dict:
        return {
            "pid": os.getpid(),
            "rank": (self.rank, jax.process_index()),
            "hosts": (self.hosts, jax.process_count()),
            "devices": (jax.device_count(), jax.local_device_count(), jax.default_backend()),
            "rank_promotion": jax.config.jax_numpy_rank_promotion,
            "threads": os.environ["NPROC"],
            "directory": os.getcwd(),
            "niceness": os.nice(0),
        }

    def total(self) -> float:
        """Return a sum over every device of the world, a collective."""
        count = jax.device_count()
        mesh = Mesh(np.array(jax.devices()), ("all",))
        split, whole = (NamedSharding(mesh, PartitionSpec(*axes)) for axes in (["all"], []))
        parts = jax.make_array_from_callback((count,), split, lambda index: np.arange(1.0, count + 1)[index])
        return float(jax.jit(jnp.sum, out_shardings=whole)(parts))

    def write(self, text: str) -> None:
        print(f"printed {text}")
        print(f"complained {text}", file=sys.stderr)
        os.write(1, f"written {text}\n".encode())

    def ramp(self, count: int) -> np.ndarray:
        return np.arange(count, dtype=np.float32) + self.rank

    def sums(self, one: np.ndarray, many: list) -> dict:
        sums = {"one": float(one.sum()), "many": [float(array.sum()) for array in many]}
        return sums | {"writeable": one.flags.writeable}

    def echo(self, *args: object) -> tuple:
        return args

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    def strike(self, rank: int, what: str) -> float:
        """Fail on one host, while the others wait in a collective."""
        if self.rank == rank:
            getattr(self, what)()
        return self.total()

    def lose_peer(self, error_s: float, answer_s: float, death_s: float) -> None:
        """Report on host 0 that host 1 is lost; host 1 answers and dies at the given times."""
        if self.rank == 0:
            time.sleep(error_s)
            raise jax.errors.JaxRuntimeError("UNKNOWN: Gloo all-reduce failed: Connection closed by peer")
        threading.Timer(death_s, os.kill, (os.getpid(), signal.SIGKILL)).start()
        time.sleep(answer_s)

    def be_stopped(self) -> None:
        os.kill(os.getpid(), signal.SIGSTOP)

    def sleep_for_ever(self) -> None:
        while True:
            time.sleep(1)

    def crash(self) -> None:
        ctypes.string_at(0)

    def leave(self) -> None:
        sys.exit("goodbye")

    def miss(self) -> None:
        raise KeyError("no such prompt")

    def reshape_wrongly(self) -> None:
        np.zeros(3).reshape(2, 2)

    def refuse(self) -> None:
        Layout(tensor=-1)

    def miss_unpicklably(self) -> None:
        raise Unpicklable("holds a generator")


def marked(mark: str) -> list[int]:
    """Return the processes that were started with `mark` in their environment."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            environment = path.read_bytes()
            state = (path.parent / "stat").read_text().rpartition(")")[2].split()[0]
        except OSError:  # gone meanwhile
            continue
        if mark.encode() in environment and state != "Z":
            found.append(int(path.parent.name))
    return found


def exists(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def resident_bytes() -> int:
    """Return the memory of this process, including mapped shared memory."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")

"""Source of reward functions that misbehave in many ways."""

HOSTILE = """
import asyncio, ctypes, gc, json, os, pickle, resource, signal, struct, subprocess, sys, tempfile, time
from jaxrlhf.rewards import batched

CORE = resource.getrlimit(resource.RLIMIT_CORE)
MASK = os.umask(0o22)
os.umask(MASK)


class Executed:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (self.path,)


def misbehave(response):
    kind, _, detail = response.partition(" ")
    if response == "print much":
        kind = response
    if kind == "value":
        return float(detail)
    if kind == "hang":
        while True:
            time.sleep(1)
    if kind == "forge":  # an answer into every descriptor, before the score
        what, _, path = detail.partition(" ")
        number = struct.pack("!Q", next(one for one in gc.get_objects() if type(one).__name__ == "Calls")._number)
        answer = ["Answer", {"number": 77, "value": 1.0, "failure": None, "seconds": 0.0}]
        forged = {
            "pickle": lambda: pickle.dumps(Executed(path)),
            "answer": lambda: number + json.dumps(answer).encode(),
            "idle": lambda: number + json.dumps(["Idle", {"spoilt": ""}]).encode(),
            "split": lambda: number + json.dumps(["Split", {}]).encode(),
            "type": lambda: number + json.dumps(["Example", {}]).encode(),
        }[what]()
        for descriptor in range(3, 64):
            try:
                os.write(descriptor, struct.pack("!I", len(forged)) + forged)
            except OSError:
                pass
        return 1.0
    if kind == "spoil":
        if detail == "files":
            try:
                while True:
                    os.dup(0)
            except OSError:
                pass
        if detail == "streams":
            os.closerange(0, 3)
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        os.umask(0o777)
        os.chdir("/")
        os.environ["SPOILT"] = "1"
        tempfile.tempdir = "/nowhere"
        hard = resource.getrlimit(resource.RLIMIT_CORE)[1]
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0 if detail == "for good" else hard))
        resource.setrlimit(resource.RLIMIT_NOFILE, (77, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
        sys.setrecursionlimit(200)
        sys.stdout = None
        return 1.0
    if kind == "spoilt":  # number of changes that are visible
        return sum([
            os.getcwd() != detail,
            "SPOILT" in os.environ,
            not os.path.isdir(tempfile.gettempdir()),
            resource.getrlimit(resource.RLIMIT_NOFILE)[0] == 77,
            resource.getrlimit(resource.RLIMIT_CORE) != CORE,
            sys.getrecursionlimit() == 200,
            sys.stdout is None,
            signal.getitimer(signal.ITIMER_REAL)[0] > 0,
            os.umask(MASK) != MASK,
            open("/dev/null").fileno() > 100,
            print("printed") is not None,
        ])
    if kind == "pid":
        return os.getpid()
    if kind == "print much":
        for _ in range(10):
            print("x" * 1_000_000)
        return 1.0
    if kind == "program":
        subprocess.run(["head", "-c", "1000000", "/dev/zero"], check=True)
        return 1.0
    if kind == "fork":  # and the child returns too
        child = os.fork()
        if child:
            os.waitpid(child, 0)
        elif detail == "raise":
            raise RuntimeError("in the child")
        return 6.0
    if kind == "builtins":
        import builtins

        builtins.len = lambda text: 7
        return 1.0
    if kind == "length":
        return len(detail)
    if kind == "exit":
        os._exit(3)
    if kind == "segfault":
        ctypes.string_at(0)
    if kind == "sysexit":
        sys.exit("bye")
    if kind == "raise":
        raise KeyError("no such\\nkey")
    if kind == "array":
        import numpy as np

        return np.ones([1] * int(detail))
    if kind == "print":
        print("garbage " * 100)
        sys.stdout.buffer.write(bytes(range(256)))
        return 5.0
    return {"nan": float("nan"), "inf": float("inf"), "huge": 1e300, "none": None, "text": "1.0"}[kind]


def single(prompt, response, answer, record):
    return misbehave(response)


@batched
def many(prompts, responses, answers, records):
    return [misbehave(response) for response in responses]


@batched
def short(prompts, responses, answers, records):
    return [1.0] * (len(responses) - 1)


@batched
def one_for_all(prompts, responses, answers, records):
    return [1.0]


@batched
def a_set(prompts, responses, answers, records):
    return {0.5}


@batched
def a_number(prompts, responses, answers, records):
    return 1.0


async def waits(prompt, response, answer, record):
    await asyncio.sleep({"await": 1000, "value 9": 0.3}.get(response, 0))
    return misbehave(response)


@batched
async def waits_for_many(prompts, responses, answers, records):
    await asyncio.sleep(0.01)
    return [misbehave(response) for response in responses]


def all_arguments(prompt, response, answer, record):
    return len(prompt) + 10 * len(response) + 100 * len(answer) + 1000 * record["n"]


def heavy(prompt, response, answer, record):
    return float(any(name in sys.modules for name in ("jax", "numpy", "flax")))


def out_of_memory(prompt, response, answer, record):
    with open("/proc/self/oom_score_adj") as file:
        return float(file.read())


class Unloadable:
    def __reduce__(self):
        return (os._nothing, ())
"""

"""State of a process that a call changes, as the next call in the process sees it."""

import os
import textwrap
from collections.abc import Iterator

import pytest

from jaxrlhf.rewards.pool import RewardPool, pack
from jaxrlhf.rewards.protocol import Example, Function

CODE = """
    import asyncio, decimal, faulthandler, gc, locale, os, signal, socket, sys, time, warnings, zlib

    def number(look):
        return zlib.crc32(repr(eval(look)).encode())

    def calls(prompt, response, answer, record):
        if response != "change":
            return number(response)
        before = number(record["look"])
        exec(record["change"], globals())
        return before != number(record["look"])

    async def waits(prompt, response, answer, record):
        return calls(prompt, response, answer, record)
"""
CHANGES = {  # what a call does, and what another call may see of it
    "time zone": ("os.environ['TZ'] = 'Asia/Tokyo'; time.tzset()", "time.localtime(0).tm_hour"),
    "time zone alone": (
        "os.environ['TZ'] = 'Asia/Tokyo'; time.tzset(); del os.environ['TZ']",
        "time.localtime(0).tm_hour",
    ),
    "module path": ("sys.path.insert(0, '/nowhere')", "sys.path"),
    "another module path": ("sys.path = []", "sys.path"),
    "modules": ("sys.modules.clear()", "len(sys.modules) > 100"),
    "limit of sockets": ("socket.setdefaulttimeout(0.1)", "socket.getdefaulttimeout()"),
    "handler": ("signal.signal(signal.SIGALRM, lambda *_: None)", "signal.getsignal(signal.SIGALRM)"),
    "ignored signal": ("signal.signal(signal.SIGTERM, signal.SIG_IGN)", "signal.getsignal(signal.SIGTERM)"),
    "blocked signal": (
        "signal.pthread_sigmask(signal.SIG_BLOCK, [15])",
        "signal.pthread_sigmask(signal.SIG_BLOCK, [])",
    ),
    "warnings": ("warnings.simplefilter('error')", "warnings.filters[0]"),
    "input": ("sys.stdin = None", "sys.stdin is None"),
    "switch interval": ("sys.setswitchinterval(10)", "sys.getswitchinterval()"),
    "collection": ("gc.disable()", "gc.isenabled()"),
    "how much is collected": ("gc.set_threshold(1, 2, 3)", "gc.get_threshold()"),
    "tracer": ("sys.settrace(lambda *_: None)", "sys.gettrace()"),
    "profiler": ("sys.setprofile(lambda *_: None)", "sys.getprofile()"),
    "digits": ("sys.set_int_max_str_digits(0)", "sys.get_int_max_str_digits()"),
    "decimals": ("decimal.getcontext().prec = 3", "decimal.Decimal(1) / 3"),
    "numbers": ("import numpy; numpy.seterr(divide='raise')", "__import__('numpy').geterr()"),
    "environment": ("os.environ.clear()", "sorted(os.environ)"),
    "environment in C": ("os.environ['SPOILT'] = '1'", "os.popen('echo $SPOILT').read()"),
    "priority": ("os.nice(1)", "os.getpriority(os.PRIO_PROCESS, 0)"),
    "deleted": ("del sys.path", "hasattr(sys, 'path')"),
    "closed input": ("sys.stdin.close()", "sys.stdin.closed"),
}
REPLACED = {"deleted", "closed input", *(["priority"] if os.geteuid() else [])}
"""Changes that cannot be undone, so that another process makes the next call; root may raise a priority again."""


@pytest.fixture(scope="module")
def pool(tmp_path_factory) -> Iterator[RewardPool]:
    folder = tmp_path_factory.mktemp("guards")
    file = folder / "changes.py"
    file.write_text(textwrap.dedent(CODE))
    functions = [Function(name, f"{file}:{name}") for name in ("calls", "waits")]
    with RewardPool(functions, workers=1, timeout_s=1.0, output=folder / "output.txt") as pool:
        pool.output = folder / "output.txt"
        yield pool


def values(pool: RewardPool, function: int, change: str, look: str, responses: list[str]) -> list[float | None]:
    """One value after the other: calls of an async function in one request would run at the same time."""
    examples = [Example("p", response, None, {"change": change, "look": look}) for response in responses]
    return [next(pool.outcomes(pool.start([(pack(example), [function])]))).value for example in examples]


@pytest.mark.parametrize("function", [0, 1], ids=["plain", "async"])
@pytest.mark.parametrize("name", CHANGES)
def test_a_change_does_not_reach_the_next_call(pool, name, function):
    change, look = CHANGES[name]
    responses = ["os.getpid()", look, "change", look, "os.getpid()"]
    first, before, changed, after, last = values(pool, function, change, look, responses)
    assert changed == 1.0  # the change is visible in its own call
    assert after == before and (first == last) == (name not in REPLACED)


def test_the_stack_of_a_hanging_call_is_still_shown_after_another_handler(pool):
    change = "signal.signal(signal.SIGUSR2, lambda *_: None)"
    pool.output.write_text("")
    assert values(pool, 0, change, "0", ["change", "time.sleep(100)"]) == [0.0, None]
    assert "in number" in pool.output.read_text()

"""Worker process that runs reward functions; `crew.py` starts it and exchanges messages with it.

The worker receives the functions once, then chunks of work. A chunk is a list of groups. A group holds the examples of
one call of a batched function or of one gathering of async calls; plain functions have groups of one example. Every
outcome of an example is sent in one message.

A call that exceeds the limit ends the process; see `processes/guards.py`.
"""

import asyncio
import contextlib
import faulthandler
import functools
import inspect
import math
import os
import pickle
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from jaxrlhf.config import Refusal
from jaxrlhf.config.named_functions import load, one_line
from jaxrlhf.processes.descendants import adopt_orphans, ends_descendants
from jaxrlhf.processes.guards import Builtins, Watchdog, settle
from jaxrlhf.rewards.protocol import (
    Cause,
    Example,
    Function,
    asks_question,
    called,
    called_on_all,
    is_async,
    is_batched,
)

LARGEST_SCORE = 3.4028234663852886e38  # largest float32
ORPHAN_CHECK_S = 5.0


@dataclass(frozen=True)
class Ready:
    """Message: the functions are loaded; `groups[i]` is True if function i takes groups of several examples."""

    groups: tuple[bool, ...]


@dataclass(frozen=True)
class Refused:
    """Message: the functions could not be loaded."""

    reason: str


@dataclass(frozen=True)
class Answer:
    """Message: the result of a function on one example, a value or the cause of its failure."""

    index: int
    value: float | None = None
    cause: Cause | None = None
    detail: str = ""


@dataclass(frozen=True)
class Split:
    """Message: a batched call failed; its examples are to be retried one by one."""


@dataclass(frozen=True)
class Retiring:
    """Message: a function has spoilt the process for later calls; another process is to take unanswered examples."""


class Spoilt(Exception):
    """Error: a function changed the process in a way that would affect later calls."""


Message = Ready | Refused | Answer | Split | Retiring
Group = tuple[int, list[tuple[int, bytes]]]  # function, and its examples as (index, pickled Example)


def main(fd: int, parent: int) -> None:
    """Serve the pipe at `fd` until it closes or the process `parent` is gone."""
    settle()
    adopt_orphans()
    faulthandler.enable()
    connection = Connection(fd)
    # The pipe closes when the parent ends this process or dies.
    with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):
        functions, timeout_s = connection.recv()
        try:
            loaded = [resolve(function.reference, function.settings) for function in functions]
        except Refusal as error:
            connection.send(Refused(str(error)))
            return
        connection.send(Ready(tuple(is_batched(call) or is_async(call) for call in loaded)))
        own = os.getpid()

        def send(message: Message) -> None:
            if os.getpid() != own:  # a fork made by a function returned to here; only its parent may answer
                os._exit(0)
            connection.send(message)

        with (
            ends_descendants(),
            asyncio.Runner() as runner,
        ):  # one event loop for the whole process: async clients are bound to the loop that made them
            caller = _Caller(send, runner, timeout_s)
            while _wait_for_work(connection, parent):
                try:
                    for function, examples in connection.recv():
                        caller.run(loaded[function], examples)
                except Spoilt as spoilt:
                    print(f"this reward process ends, and another one goes on: {spoilt}", file=sys.stderr)
                    send(Retiring())
                    return
                finally:
                    caller.rest()


def resolve(reference: str, settings: Mapping[str, Any] | None = None) -> Callable[..., Any]:
    """Load the function that `module:function` or `path/to/file.py:function` names, and bind `settings` to it.

    A setting that is a `Function` is resolved too. The directory of a `file.py` is appended to `sys.path`, so the file
    may import its neighbors.

    Raises:
      Refusal: In one line: there is no such file, module or function, its import fails, or the function cannot be
        called with a prompt, a response, an answer and a record.
    """
    function = load(reference, "reward function")
    given = {
        name: resolve(value.reference, value.settings) if isinstance(value, Function) else value
        for name, value in (settings or {}).items()
    }
    bound = functools.partial(function, **given) if given else function
    _check_signature(reference, bound)
    return bound


def _check_signature(reference: str, function: Callable[..., Any]) -> None:
    try:
        signature = inspect.signature(function)
    except ValueError:  # some functions written in C have no signature
        return
    try:
        signature.bind("prompt", "response", "answer", {}, **({"question": ""} if asks_question(function) else {}))
    except TypeError as error:
        raise Refusal(
            f"reward function {reference!r} has the signature {signature}; "
            f"it is called as function(prompt, response, answer, record), and that fails with: {error}"
        ) from error


def _wait_for_work(connection: Connection, parent: int) -> bool:
    """Wait for a message; return True once there is one, and False if the parent is gone.

    A closed pipe counts as a message, but a fork of the parent may hold the pipe open.
    """
    while not connection.poll(ORPHAN_CHECK_S):
        if os.getppid() != parent:
            return False
    return True


class _Caller:
    """Caller of reward functions on groups of examples; sends the results."""

    def __init__(self, send: Callable[[Message], None], runner: asyncio.Runner, timeout_s: float) -> None:
        self._send = send
        self._runner = runner
        self._timeout_s = timeout_s
        self._watchdog = Watchdog(timeout_s)
        self._builtins = Builtins()
        self._spoilt: str | None = None

    def run(self, function: Callable[..., Any], examples: list[tuple[int, bytes]]) -> None:
        """Call a function on a group of examples.

        Raises:
          Spoilt: A call spoilt the process; raised after the call's answer is sent.
        """
        if is_batched(function):
            self._call_batch(function, examples)
        elif is_async(function):
            self.rest()  # rearm: calls are cancelled at the limit, and have the slack time to end
            self._watchdog.begin_call()
            self._runner.run(self._gather(function, examples))
        else:
            for index, pickled in examples:
                self._watchdog.begin_call()
                self._send(self._call(function, index, pickled))
                self._check()
            return
        self._check()

    def _call(self, function: Callable[..., Any], index: int, pickled: bytes) -> Answer:
        try:
            example: Example = pickle.loads(pickled)
            with self._builtins_kept():
                value = called(function, example)
            return to_answer(index, value)
        except BaseException as error:  # SystemExit too: any error of a user's function concerns only its example
            return self._raised(index, error)

    def _raised(self, index: int, error: BaseException) -> Answer:
        if not isinstance(error, Exception) and not isinstance(error, asyncio.CancelledError):
            self._spoilt = f"a function raised {type(error).__name__}, which ends programs"
        return _raised(index, error)

    def _builtins_kept(self) -> contextlib.AbstractContextManager[None]:
        return self._builtins.kept(self._changed)

    def _changed(self, names: str) -> None:
        self._spoilt = f"a function changed the builtin {names}"

    def _check(self) -> None:
        """Raise `Spoilt` if a call has changed a builtin or raised an error that ends programs."""
        if self._spoilt is not None:
            raise Spoilt(self._spoilt)

    def rest(self) -> None:
        """Disarm the watchdog; call this before waiting for work."""
        self._watchdog.disarm()

    def _call_batch(self, function: Callable[..., Any], examples: list[tuple[int, bytes]]) -> None:
        indices = [index for index, _ in examples]
        self._watchdog.begin_call()
        try:
            unpickled = [pickle.loads(pickled) for _, pickled in examples]
            with self._builtins_kept():
                values = called_on_all(function, unpickled)
                if inspect.iscoroutine(values):
                    values = self._runner.run(values)
            answers: Sequence[Message] = to_answers(indices, values)
        except BaseException as error:
            answers = [self._raised(indices[0], error)] if len(indices) == 1 else [Split()]
        for answer in answers:
            self._send(answer)

    async def _gather(self, function: Callable[..., Any], examples: list[tuple[int, bytes]]) -> None:
        async def call(index: int, pickled: bytes) -> None:
            limit = asyncio.timeout(self._timeout_s)
            try:
                example: Example = pickle.loads(pickled)
                async with limit:
                    with self._builtins_kept():
                        value = await called(function, example)
                answer = to_answer(index, value)
            except BaseException as error:
                answer = self._raised(index, error)
                if limit.expired():
                    answer = Answer(index, None, "timeout", f"cancelled after {self._timeout_s:g} s")
            self._send(answer)

        await asyncio.gather(*(call(index, pickled) for index, pickled in examples))


def to_answer(index: int, value: Any) -> Answer:
    """Convert the value of a function to an answer: a finite number, or the cause of failure."""
    if isinstance(value, BaseException):
        return _raised(index, value)
    if value is None:
        return Answer(index, None, "none", "returned None")
    if isinstance(value, str | bytes) or not hasattr(value, "__float__") or getattr(value, "shape", False):
        return Answer(index, None, "not-a-number", f"returned {one_line_repr(value)}, not a number")
    number = float(value)
    if not math.isfinite(number) or abs(number) > LARGEST_SCORE:
        return Answer(index, None, "not-finite", f"returned {number}")
    return Answer(index, number)


def to_answers(indices: list[int], values: Any) -> list[Answer]:
    """Convert the values of a batched function to answers; all answers fail if the number of values is wrong."""
    sized = hasattr(values, "__iter__") and not isinstance(values, str | bytes | Mapping | Set)  # no order there
    found = list(values) if sized and getattr(values, "shape", True) else None  # an array may be a number
    if found is not None and len(found) == len(indices):
        return [to_answer(index, value) for index, value in zip(indices, found, strict=True)]
    returned = one_line_repr(values) if found is None else f"{len(found)} scores"
    wrong = f"returned {returned} for {len(indices)} responses; a batched function gives a list, one score for each"
    return [Answer(index, None, "exception", wrong) for index in indices]


def one_line_repr(value: Any) -> str:
    text = " ".join(repr(value).split())
    return f"a {type(value).__name__}: {text if len(text) <= 120 else text[:117] + '...'}"


def _raised(index: int, error: BaseException) -> Answer:
    frames = traceback.extract_tb(error.__traceback__)
    where = f" at {os.path.basename(frames[-1].filename)}:{frames[-1].lineno}" if frames else ""
    return Answer(index, None, "exception", one_line(error) + where)

"""Calls of user code in a worker process, under limits, and the process's answers to requests."""

import asyncio
import inspect
import os
import pickle
import sys
import time
import traceback
from collections.abc import Awaitable, Callable, Iterable
from contextvars import copy_context
from typing import Any

from jaxrlhf.config.named_functions import one_line
from jaxrlhf.episode import EnvironmentFailure
from jaxrlhf.processes.channel import Channel
from jaxrlhf.processes.guards import ProcessState
from jaxrlhf.processes.jobs import NUMBER, Answer, CodeFailure, Idle
from jaxrlhf.processes.output import STDERR, STDOUT, CountedOutput
from jaxrlhf.processes.plain import dumps


class Calls:
    """Caller of user functions in this process.

    An async call is cancelled at the limit; the run ends a process whose call does not end. Builtins are restored after
    each call; `restore` restores the other state of the process.

    Args:
      limit_s: Wall-clock limit of one async call in seconds; None is no limit.

    Attributes:
      spoilt: Reason why the process must not run further requests; empty if it may.
    """

    def __init__(self, channel: Channel, *, limit_s: float | None) -> None:
        self._channel, self._own, self._limit_s = channel, os.getpid(), limit_s
        self._loop: asyncio.Runner | None = None
        self._outputs = CountedOutput(STDOUT), CountedOutput(STDERR)
        sys.stdout, sys.stderr = (output.text() for output in self._outputs)
        self._state, self._context = ProcessState(), copy_context()
        self._number = 0
        self.spoilt = ""

    def serve(self, answer: Callable[[Any], None]) -> None:
        """Receive requests until the channel closes; `answer` makes the calls of a request and answers each."""
        while True:
            for request in self._channel.receive():
                [self._number] = NUMBER.unpack_from(request)
                answer(pickle.loads(memoryview(request)[NUMBER.size :]))
                self.send(Idle(self.spoilt))

    def answer(self, number: int, function: Callable[[], Any]) -> None:
        """Answer a call with the value of a function or with its failure."""
        began = time.monotonic()
        try:
            message = self._message(number, function(), began)
        except BaseException as error:  # SystemExit too: any error of user code concerns only its call
            message = self._message(number, self.failure(error), began)
        self._send(message)

    def answer_in_turn(self, calls: Iterable[tuple[int, Callable[[], Any]]]) -> None:
        """Answer calls one after the other, until a call spoils the process; the others are left to another process."""
        for number, function in calls:
            self.answer(number, function)
            self.restore()
            if self.spoilt:
                return

    def answer_value(self, number: int, value: Any) -> None:
        """Answer a call with a value, or with a `CodeFailure`."""
        self._send(self._message(number, value, time.monotonic()))

    def _message(self, number: int, value: Any, began: float) -> bytes:
        failure = value if isinstance(value, CodeFailure) else None
        return dumps(Answer(number, None if failure else value, failure, time.monotonic() - began))

    def send(self, message: Any) -> None:
        """Send a message, a dataclass of plain values."""
        self._send(dumps(message))

    def _send(self, message: bytes) -> None:
        if os.getpid() != self._own:  # a fork made by user code returned to here; only its parent may answer
            os._exit(0)
        self._channel.send(NUMBER.pack(self._number) + message)

    @property
    def printed(self) -> int:
        """Number of bytes that the current call has printed."""
        return max(output.count for output in self._outputs)

    def call(self, function: Callable[..., Any], *args: Any, **fields: Any) -> Any:
        """Call a function, and await its result if it is awaitable."""
        self._begin()
        try:
            value = self._context.run(function, *args, **fields)
        finally:
            self._restore_builtins()  # before other code uses them
        if inspect.isawaitable(value):
            return self._runner().run(self.awaited(value), context=self._context)
        return value

    async def awaited(self, value: Awaitable[Any]) -> Any:
        """Await the call of an async function, and cancel it at the limit."""
        limit = asyncio.timeout(self._limit_s)
        try:
            async with limit:
                try:
                    return await value
                finally:
                    self._restore_builtins()
        except TimeoutError:
            if limit.expired():
                raise EnvironmentFailure("timeout", f"cancelled after {self._limit_s:g} s") from None
            raise

    def answer_together(self, calls: Iterable[tuple[int, Callable[[], Awaitable[Any]]]]) -> None:
        """Answer calls concurrently with the values that functions await, or with their failures."""

        async def answer(number: int, function: Callable[[], Awaitable[Any]]) -> None:
            began = time.monotonic()
            try:
                message = self._message(number, await function(), began)
            except BaseException as error:
                message = self._message(number, self.failure(error), began)
            self._send(message)

        async def gather() -> None:
            await asyncio.gather(*(answer(*one) for one in calls))

        self._begin()
        self._runner().run(gather(), context=self._context)

    def restore(self) -> None:
        """Restore the state of the process for the next call, also context variables, such as those of `decimal`."""
        self._context = copy_context()
        left = self._state.restore()
        if left:
            self.spoilt = f"{left} was changed in it"

    def failure(self, error: BaseException) -> CodeFailure:
        """Return the failure that an error of user code is."""
        if isinstance(error, EnvironmentFailure):
            return CodeFailure(error.cause, error.detail)
        if isinstance(error, MemoryError) or not isinstance(error, Exception | asyncio.CancelledError):
            self.spoilt = f"{type(error).__name__} was raised in it"
        frames = traceback.extract_tb(error.__traceback__)
        where = f" at {os.path.basename(frames[-1].filename)}:{frames[-1].lineno}" if frames else ""
        return CodeFailure("exception", one_line(error) + where)

    def _begin(self) -> None:
        for output in self._outputs:
            output.count = 0

    def _runner(self) -> asyncio.Runner:
        """Return the process's only event loop: async clients are bound to the loop that made them."""
        if self._loop is None:
            self._loop = asyncio.Runner()
        return self._loop

    def _restore_builtins(self) -> None:
        names = self._state.restore_builtins()
        if names:
            self.spoilt = f"the builtin {names} was changed in it"

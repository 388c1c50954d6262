"""Worker process that runs environments, tools or an agent program for a pool, one request at a time."""

import asyncio
import inspect
import io
import os
import pickle
import random
import resource
import sys
import tempfile
import threading
import time
import traceback
import zlib
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from jaxrlhf.config.environments import Agent
from jaxrlhf.config.named_functions import one_line
from jaxrlhf.environments import answers
from jaxrlhf.environments.protocol import (
    About,
    Answer,
    CallRequest,
    Choice,
    CloseRequest,
    CodeFailure,
    FinalReward,
    Idle,
    InstanceClosed,
    OpenRequest,
    Request,
    RunRequest,
    StepRequest,
    ToolAnswer,
)
from jaxrlhf.episode import Content, EnvironmentFailure, Opening, Session, ToolCall
from jaxrlhf.processes.channel import Channel
from jaxrlhf.processes.descendants import children
from jaxrlhf.processes.guards import Builtins, Watchdog

CLOSING_S = 0.5  # for instances to close once the run is gone


@dataclass(frozen=True)
class UserCode:
    """Loaded code of one environment setting: tools by name, an environment factory, or an agent program."""

    choice: Choice
    about: About
    functions: Mapping[str, Callable[..., Any]] = field(default_factory=dict)
    factory: Callable[[], Any] | None = None
    program: Callable[..., Any] | None = None

    def serve(self, channel: Channel) -> None:
        """Answer requests until the channel closes."""
        _Host(self, channel).serve()


class _Host:
    """Request handler that runs user code and sends an answer for every outcome."""

    def __init__(self, code: UserCode, channel: Channel) -> None:
        self._code, self._channel, self._own = code, channel, os.getpid()
        self._folder = tempfile.gettempdir()  # this process's own
        # No limit for agent programs here: their time limit pauses during weight updates, so the run enforces it.
        limit_s = None if isinstance(code.choice, Agent) else code.choice.call_s
        self._limit_s, self._output_bytes = limit_s, code.choice.output_bytes
        self._watchdog = Watchdog(limit_s) if limit_s is not None else None
        self._builtins = Builtins()
        self._loop: asyncio.Runner | None = None
        self._instances: dict[int, Any] = {}
        self._spoilt = ""
        self._out, self._err = _Printed(sys.stdout, self._output_bytes), _Printed(sys.stderr, self._output_bytes)

    def serve(self) -> None:
        with suppress(OSError), open("/proc/self/statm", "rb", buffering=0) as file:  # exists on Linux only
            most = int(file.read().split()[0]) * resource.getpagesize() + self._code.choice.memory_bytes
            resource.setrlimit(resource.RLIMIT_AS, (most, most))
        sys.stdout, sys.stderr = self._out, self._err
        try:
            while True:
                for message in self._channel.receive():
                    self._answer(pickle.loads(message))
        finally:
            self._watchdog = Watchdog(CLOSING_S)
            for episode in list(self._instances):
                self._close(episode)

    def _answer(self, request: Request) -> None:
        try:
            match request:
                case OpenRequest():
                    self._send(self._open(request))
                case StepRequest():
                    step = self._instances[request.episode].step
                    _seed(f"{request.seed}/{request.turn}")
                    self._send(answers.observation(self._call(step, request.reply), self._output_bytes))
                case CallRequest():
                    self._tools(request)
                case CloseRequest():
                    if request.rewarded:
                        self._send(self._reward(request.episode))
                    self._send(self._close(request.episode))
                case RunRequest():
                    self._send(self._run(request))
        except BaseException as error:  # SystemExit too: any error of user code concerns only its episode
            self._send(self._failed(error))
            if isinstance(request, OpenRequest | CloseRequest):
                self._send(self._close(request.episode))
        if self._watchdog is not None:
            self._watchdog.disarm()
        self._send(Idle(self._what_is_left()))

    def _send(self, answer: Answer) -> None:
        if os.getpid() != self._own:  # a fork made by user code returned to here; only its parent may answer
            os._exit(0)
        self._channel.send(pickle.dumps(answer))

    def _open(self, request: OpenRequest) -> Opening:
        assert self._code.factory is not None
        _seed(str(request.seed))
        instance = self._instances[request.episode] = self._call(self._code.factory)
        if not self._code.about.methods:
            args, seed = reset_arguments(instance.reset, request.record, request.seed)
            return answers.opening(self._call(instance.reset, *args, **seed), self._output_bytes)
        text = self._call(instance.reset, **_fields(instance.reset, request))
        if text is not None and not isinstance(text, str):
            raise answers.wrong("reset returned", text, "a text or None, as methods are tools here")
        return Opening(tools=self._code.about.schemas, appended=answers.Size(self._output_bytes).text(text or ""))

    def _reward(self, episode: int) -> FinalReward:
        scored = getattr(self._instances[episode], "get_reward", None)
        return FinalReward(None if scored is None else answers.reward(self._call(scored)))

    def _close(self, episode: int) -> InstanceClosed:
        close = getattr(self._instances.pop(episode, None), "close", None)
        try:
            if close is not None:
                self._call(close)
        except BaseException as error:
            return InstanceClosed(self._failed(error))
        return InstanceClosed(None)

    def _run(self, request: RunRequest) -> FinalReward:
        assert self._code.program is not None
        _seed(str(request.seed))
        os.environ.update(OPENAI_BASE_URL=request.base_url, OPENAI_API_KEY=request.api_key)
        session = Session(request.base_url, request.api_key, request.record, request.seed)
        self._spoilt = "an agent program has run in it"  # its environment holds an episode's address and key
        return FinalReward(answers.reward(self._call(self._code.program, session, request.record)))

    def _tools(self, request: CallRequest) -> None:
        """Run plain tools one after the other, then async tools together."""
        waiting = {}
        for number, call in request.calls.items():
            if call.name in self._code.about.waits:
                waiting[number] = call
            else:
                _seed(f"{request.seed}/{number}")
                began = time.monotonic()
                try:
                    value = self._call(self._tool(request.episode, call), **call.arguments)
                    self._told(number, began, answers.tool_content(value, self._output_bytes))
                except BaseException as error:
                    self._told(number, began, self._failed(error))
        if waiting:
            _seed(request.seed)
            self._begin()
            self._runner().run(self._gather(request.episode, waiting))

    async def _gather(self, episode: int, calls: Mapping[int, ToolCall]) -> None:
        async def answer(number: int, call: ToolCall) -> None:
            began = time.monotonic()
            try:
                with self._builtins.kept(self._changed):
                    value = await self._in_time(self._tool(episode, call)(**call.arguments))
                self._check_printed()
                self._told(number, began, answers.tool_content(value, self._output_bytes))
            except BaseException as error:
                self._told(number, began, self._failed(error))

        await asyncio.gather(*(answer(number, call) for number, call in calls.items()))

    def _tool(self, episode: int, call: ToolCall) -> Callable[..., Any]:
        if self._code.about.methods:
            return getattr(self._instances[episode], call.name)
        return self._code.functions[call.name]

    def _told(self, number: int, began: float, answer: Content | CodeFailure) -> None:
        seconds = time.monotonic() - began
        if isinstance(answer, CodeFailure):
            self._send(ToolAnswer(number, answers.told(answer.detail), seconds, answer.cause))
        else:
            self._send(ToolAnswer(number, answer, seconds))

    def _call(self, function: Callable[..., Any], *args: Any, **fields: Any) -> Any:
        """Call a user function, await its result if it is awaitable, and restore the builtins."""
        self._begin(anew=inspect.iscoroutinefunction(function))
        with self._builtins.kept(self._changed):
            value = function(*args, **fields)
        if inspect.isawaitable(value):
            with self._builtins.kept(self._changed):
                value = self._runner().run(self._in_time(value))
        self._check_printed()
        return value

    async def _in_time(self, value: Any) -> Any:
        limit = asyncio.timeout(self._limit_s)
        try:
            async with limit:
                return await value
        except TimeoutError:
            if limit.expired():
                raise EnvironmentFailure("timeout", f"cancelled after {self._limit_s:g} s") from None
            raise

    def _begin(self, *, anew: bool = True) -> None:
        """Reset the print counters and start the watchdog; `anew` rearms it, so cancelled calls have time to end."""
        self._out.count = self._err.count = 0
        if self._watchdog is not None:
            if anew:
                self._watchdog.disarm()
            self._watchdog.begin_call()

    def _check_printed(self) -> None:
        if max(self._out.count, self._err.count) > self._output_bytes:
            raise EnvironmentFailure("output", f"printed more than {self._output_bytes} characters")

    def _runner(self) -> asyncio.Runner:
        """Return the process's only event loop: async clients are bound to the loop that made them."""
        if self._loop is None:
            self._loop = asyncio.Runner()
        return self._loop

    def _changed(self, names: str) -> None:
        self._spoilt = f"the builtin {names} was changed in it"

    def _failed(self, error: BaseException) -> CodeFailure:
        if isinstance(error, EnvironmentFailure):
            return CodeFailure(error.cause, error.detail)
        if isinstance(error, MemoryError) or not isinstance(error, Exception | asyncio.CancelledError):
            self._spoilt = f"{type(error).__name__} was raised in it"
        frames = traceback.extract_tb(error.__traceback__)
        where = f" at {os.path.basename(frames[-1].filename)}:{frames[-1].lineno}" if frames else ""
        return CodeFailure("exception", (one_line(error) + where).encode(errors="replace").decode())

    def _what_is_left(self) -> str:
        """Return why the process must not run other episodes, such as leftovers of an ended one; empty if it may."""
        if not self._spoilt and not self._instances:
            if children(self._own):
                self._spoilt = "processes were left in it"
            elif threading.active_count() > 1:
                self._spoilt = "threads were left in it"
            elif os.path.isdir(self._folder) and os.listdir(self._folder):
                self._spoilt = "temporary files were left in it"
        return self._spoilt


class _Printed(io.TextIOBase):
    """Output stream that passes on at most `limit` characters of a call's text.

    Attributes:
      count: Number of characters that the current call has written.
    """

    def __init__(self, stream: Any, limit: int) -> None:
        self._stream, self._limit, self.count = stream, limit, 0

    def write(self, text: str) -> int:
        room = max(0, self._limit - self.count)
        self.count += len(text)
        if room:
            self._stream.write(text[:room])
            if len(text) > room:
                self._stream.write("\n... and more, which is left out\n")
        return len(text)

    def flush(self) -> None:
        self._stream.flush()

    def fileno(self) -> int:
        return self._stream.fileno()


def reset_arguments(reset: Callable[..., Any], record: Any, seed: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments for `reset(record)`, `reset(record, seed)` or `reset(record, *, seed)`, by signature."""
    parameters = inspect.signature(reset).parameters
    places = [one for one in parameters.values() if one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)]
    if len(places) > 1:
        return (record, seed), {}
    return (record,), {"seed": seed} if "seed" in parameters else {}


def _fields(reset: Callable[..., Any], request: OpenRequest) -> dict[str, Any]:
    """Return the record's fields that `reset` takes; add the group's seed if `reset` takes `seed` and none is there."""
    parameters = inspect.signature(reset).parameters
    every = any(one.kind is one.VAR_KEYWORD for one in parameters.values())
    fields = {str(name): value for name, value in request.record.items() if every or name in parameters}
    return ({"seed": request.seed} if "seed" in parameters else {}) | fields


def _seed(text: str) -> None:
    """Seed the global random generators, so that a call's random numbers do not depend on earlier calls."""
    random.seed(text)
    if (numpy := sys.modules.get("numpy")) is not None:
        with suppress(AttributeError):
            numpy.random.seed(zlib.crc32(text.encode()))

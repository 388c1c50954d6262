"""Worker process that runs environments, tools or an agent program for a pool, one request at a time."""

import inspect
import os
import random
import resource
import sys
import tempfile
import threading
import zlib
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from jaxrlhf.config.environments import Agent
from jaxrlhf.environments import answers
from jaxrlhf.environments.protocol import (
    CLOSE,
    REWARD,
    About,
    CallRequest,
    Choice,
    CloseRequest,
    OpenRequest,
    Request,
    RunRequest,
    StepRequest,
)
from jaxrlhf.episode import Content, EnvironmentFailure, Observation, Opening, Session
from jaxrlhf.processes.calls import Calls
from jaxrlhf.processes.channel import Channel
from jaxrlhf.processes.descendants import children


@dataclass(frozen=True)
class UserCode:
    """Loaded code of one environment setting: tools by name, an environment factory, or an agent program."""

    choice: Choice
    about: About
    functions: Mapping[str, Callable[..., Any]] = field(default_factory=dict)
    factory: Callable[[], Any] | None = None
    program: Callable[..., Any] | None = None
    forkable: bool = True  # a library's native threads rarely matter, and interpreters for all instances are too large

    def serve(self, channel: Channel) -> None:
        """Answer requests until the channel closes."""
        _Host(self, channel).serve()


class _Host:
    """Request handler that runs user code and sends an answer for every outcome."""

    def __init__(self, code: UserCode, channel: Channel) -> None:
        self._code, self._output_bytes = code, code.choice.output_bytes
        self._folder = tempfile.gettempdir()  # this process's own
        with suppress(OSError), open("/proc/self/statm", "rb", buffering=0) as file:  # exists on Linux only
            most = int(file.read().split()[0]) * resource.getpagesize() + code.choice.memory_bytes
            resource.setrlimit(resource.RLIMIT_AS, (most, most))
        # No limit for agent programs here: their time limit pauses during weight updates, so the run enforces it.
        limit_s = None if isinstance(code.choice, Agent) else code.choice.call_s
        self._calls = Calls(channel, limit_s=limit_s)
        self._instances: dict[int, Any] = {}

    def serve(self) -> None:
        try:
            self._calls.serve(self._answer)
        finally:  # the run is gone, and ends this process soon
            for episode in list(self._instances):
                with suppress(BaseException):
                    self._close(episode)

    def _answer(self, request: Request) -> None:
        answer = self._calls.answer
        match request:
            case OpenRequest():
                answer(0, lambda: self._open(request))
            case StepRequest():
                answer(0, lambda: self._step(request))
            case CallRequest():
                self._tools(request)
            case CloseRequest(episode, rewarded):
                if rewarded:
                    answer(REWARD, lambda: self._reward(episode))
                answer(CLOSE, lambda: self._close(episode))
            case RunRequest():
                answer(0, lambda: self._run(request))
        self._look_for_leftovers()

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

    def _step(self, request: StepRequest) -> Observation:
        _seed(f"{request.seed}/{request.turn}")
        return answers.observation(self._call(self._instances[request.episode].step, request.reply), self._output_bytes)

    def _reward(self, episode: int) -> float | None:
        scored = getattr(self._instances[episode], "get_reward", None)
        return None if scored is None else answers.reward(self._call(scored))

    def _close(self, episode: int) -> None:
        close = getattr(self._instances.pop(episode, None), "close", None)
        if close is not None:
            self._call(close)

    def _run(self, request: RunRequest) -> float | None:
        assert self._code.program is not None
        _seed(str(request.seed))
        os.environ.update(OPENAI_BASE_URL=request.base_url, OPENAI_API_KEY=request.api_key)
        session = Session(request.base_url, request.api_key, request.record, request.seed)
        return answers.reward(self._call(self._code.program, session, request.record))

    def _tools(self, request: CallRequest) -> None:
        """Run plain tools one after the other, then async tools together."""

        def make_call(number: int) -> Content:
            _seed(f"{request.seed}/{number}")
            tool, arguments = self._tool(request, number)
            return answers.tool_content(self._call(tool, **arguments), self._output_bytes)

        async def make_async(number: int) -> Content:
            tool, arguments = self._tool(request, number)
            value = await self._calls.awaited(tool(**arguments))
            self._check_printed()
            return answers.tool_content(value, self._output_bytes)

        together = [number for number, call in request.calls.items() if call.name in self._code.about.waits]
        in_turn = [(number, partial(make_call, number)) for number in request.calls if number not in together]
        if self._instances:
            for number, function in in_turn:
                self._calls.answer(number, function)
        else:
            self._calls.answer_in_turn(in_turn)
        if together and (self._instances or not self._calls.spoilt):
            _seed(request.seed)
            self._calls.answer_together((number, partial(make_async, number)) for number in together)

    def _tool(self, request: CallRequest, number: int) -> tuple[Callable[..., Any], Mapping[str, Any]]:
        """Return the function of a tool call, and its arguments."""
        call = request.calls[number]
        if self._code.about.methods:
            return getattr(self._instances[request.episode], call.name), call.arguments
        return self._code.functions[call.name], call.arguments

    def _call(self, function: Callable[..., Any], *args: Any, **fields: Any) -> Any:
        value = self._calls.call(function, *args, **fields)
        self._check_printed()
        return value

    def _check_printed(self) -> None:
        if self._calls.printed > self._output_bytes:
            raise EnvironmentFailure("output", f"printed more than {self._output_bytes} bytes")

    def _look_for_leftovers(self) -> None:
        """Restore the process for another episode; mark it as spoilt if an ended episode has left something behind."""
        if self._instances:
            return
        self._calls.restore()
        if children(os.getpid()):
            self._calls.spoilt = "processes were left in it"
        elif threading.active_count() > 1:
            self._calls.spoilt = "threads were left in it"
        elif os.listdir(self._folder):
            self._calls.spoilt = "temporary files were left in it"


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

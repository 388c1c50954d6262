"""Process pool for user-written environments, tools and agent programs, thousands at once and under limits.

Every instance of an environment has its own process, forked from a process that has loaded the user code. A hang, a
crash, a memory leak or leftover threads therefore fail only the instance's own episode, and random numbers from global
generators do not depend on other episodes. Tool functions have no state, so they share a few processes. A process that
dies is replaced, and its current tool call is answered with an error. One thread of the run serves all processes.
"""

import math
import pickle
import resource
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

from jaxrlhf.config.environments import Agent, Tools
from jaxrlhf.config.named_functions import one_line
from jaxrlhf.environments.live import LiveEpisodes
from jaxrlhf.environments.protocol import About, Choice, OpenRequest, Request, RunRequest
from jaxrlhf.episode import EnvironmentFailure, Observation, Opening, Reply
from jaxrlhf.processes.executor import Executor, ProcessPool
from jaxrlhf.processes.jobs import Code

LARGEST_ANSWER = 1 << 24  # in bytes, in addition to the text that its setting allows
LIFE = 1000  # requests per process
MOST_FILES = 1 << 16


class EnvironmentPool(ProcessPool):
    """Pool that runs the episodes of one or several environments; thread-safe, and its methods return at once.

    Futures fail with `EnvironmentFailure`, with `CancelledError` if the episode is dropped, and with `RuntimeError` if
    the pool is closed.

    Args:
      output: File that receives the output of the user code; None is the standard error stream.

    Raises:
      Refusal: User code cannot be loaded, or no schema can be made of a tool; the message says which and why.

    Attributes:
      closing_failures: Number of instances that failed to close, by cause; the results of their episodes stay valid.
    """

    def __init__(self, choices: Sequence[Choice], output: Path | None = None) -> None:
        _allow_files()
        super().__init__(Executor(list(map(_code, choices)), output, name="environments"))
        self._live = LiveEpisodes(choices, self._executor.groups)
        self.closing_failures = self._live.closing_failures
        self._executor.start(self._live)

    def start(self, episode: int, choice: int, record: Mapping[str, Any], seed: int) -> Future[Opening]:
        """Start an episode: make an instance and reset it. Episodes of `Tools` start with the record's prompt."""
        return self._send(partial(self._live.start, choice), OpenRequest(episode, record, seed))

    def step(self, episode: int, reply: Reply) -> Future[Observation]:
        """Pass a reply to the environment, or make the reply's tool calls."""
        return self._ask(partial(self._live.step, episode, reply))

    def finish(self, episode: int) -> Future[float | None]:
        """End an episode and return its final reward. The instance is closed after that."""
        return self._ask(partial(self._live.finish, episode))

    def drop(self, episode: int) -> None:
        """Drop an episode, if it is open; a process that works at its request is killed."""
        self._executor.ask(partial(self._live.drop, episode))

    def run_agent(
        self, episode: int, choice: int, record: Mapping[str, Any], seed: int, base_url: str, api_key: str
    ) -> Future[float | None]:
        """Run an agent program to its end."""
        return self._send(partial(self._live.run_agent, choice), RunRequest(episode, record, seed, base_url, api_key))

    def _ask(self, action: Callable[[Future], None]) -> Future:
        future: Future = Future()
        future.set_running_or_notify_cancel()  # makes `cancel` fail; callers use `drop` instead
        self._executor.ask(partial(action, future), future.set_exception)
        return future

    def _send(self, action: Callable[..., None], request: Request) -> Future:
        """Pickle a request on the caller's thread and queue an action with it."""
        try:
            return self._ask(partial(action, request, pickle.dumps(request)))
        except Exception as error:  # an object's pickling hooks may raise any error
            future: Future = Future()
            future.set_exception(EnvironmentFailure("unpicklable", f"the record cannot be sent: {one_line(error)}"))
            return future


def _code(choice: Choice) -> Code:
    """Return the code of an environment setting and its limits."""
    code = partial(
        Code,
        loader="jaxrlhf.environments.forms:load_choice",
        setup=choice,
        about=About,
        largest_answer=LARGEST_ANSWER + 6 * choice.output_bytes,  # control characters take six bytes
        # Threads do not help a thousand processes that handle a few calls each.
        environment={"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
    )
    if isinstance(choice, Agent):  # its time limit pauses during weight updates, so the run enforces it
        return code(name=choice.program, limit_s=math.inf, workers=math.inf, life=1)
    limited = partial(code, limit_s=choice.call_s, workers=choice.workers, life=LIFE)
    if isinstance(choice, Tools):
        return limited(name=", ".join(choice.functions))
    return limited(name=choice.factory, instances=choice.episodes_per_process)


def _allow_files() -> None:
    """Raise this process's limit of open files as far as the system allows: each worker process takes one file."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, MOST_FILES)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))

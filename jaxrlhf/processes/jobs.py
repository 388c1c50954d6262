"""User code with its limits, jobs for its processes, and what is known of a process."""

import math
import struct
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from jaxrlhf.processes.channel import Channel

NUMBER = struct.Struct("!Q")  # before a request and its answers: number of the request in its process


@dataclass(frozen=True)
class Code:
    """User code, and the limits of the processes that run it.

    Attributes:
      name: Name of the code in messages.
      loader: `module:function` that loads the code; see `forking.main`.
      setup: Argument of the loader.
      about: Dataclass of the description that the loaded code gives.
      limit_s: Wall-clock limit of one call in seconds.
      workers: Largest number of processes that work at the same time.
      largest_answer: Largest size of an answer in bytes.
      instances: Largest number of instances that share a process.
      life: Number of jobs after which a process is replaced, which frees leaked resources.
      environment: Environment variables of the processes.
    """

    name: str
    loader: str
    setup: Any
    about: type
    limit_s: float
    workers: float
    largest_answer: int
    instances: int = 1
    life: float = math.inf
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Idle:
    """Last answer to every request: the process is idle.

    Attributes:
      spoilt: Reason why the process must not run further jobs; empty if it may.
    """

    spoilt: str = ""


@dataclass(frozen=True)
class Lost:
    """Loss of the process that worked at a job.

    Attributes:
      detail: One line for users: how the process ended.
      seconds: Time since the request or the last answer.
    """

    cause: Literal["timeout", "crash"]
    detail: str
    seconds: float = 0.0


@dataclass(eq=False)
class Job:
    """Request, and the callbacks for its answers.

    Attributes:
      request: Pickled request.
      answers: Dataclasses that answer the request; any other answer ends the process.
      answered: Callback for each answer; `Idle` is the last answer. The callback raises `Garbled` for an answer that
        the request cannot have.
      lost: Callback if the process died or could not be started.
      over: Callback when the executor ends.
      opens: Number of the instance that the request makes.
      calls: Number of calls before the first answer; each has the time limit.
      process: Process that has the request's instance; None if any process may take the request.
    """

    request: bytes
    answers: tuple[type, ...]
    answered: Callable[[Any], None]
    lost: Callable[[Lost], None]
    over: Callable[[BaseException], None]
    opens: int | None = None
    calls: int = 1
    process: "Process | None" = None


@dataclass(eq=False)
class Process:
    """Worker process, its jobs, and the instances that it has.

    Attributes:
      job: Job that the process works at; None if it is idle.
      queue: Further jobs for its instances.
      began_s, end_s: Time of the last answer or of the request, and deadline of the next answer.
      served: Number of finished jobs.
      spoilt: The process must not get further instances.
      ending: The process has been told to end.
      late: The process has exceeded the deadline and is about to be killed.
      garbled: Description of bytes of the process that were no answer.
    """

    pid: int
    channel: Channel
    instances: set[int] = field(default_factory=set)
    job: Job | None = None
    queue: deque[Job] = field(default_factory=deque)
    began_s: float = 0.0
    end_s: float = math.inf
    served: int = 0
    spoilt: bool = False
    ending: bool = False
    late: bool = False
    garbled: str = ""

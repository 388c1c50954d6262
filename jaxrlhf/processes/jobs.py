"""User code with its limits, jobs for its processes, and the messages of a process."""

import math
import struct
from collections import deque
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from jaxrlhf.episode import FailureCause
from jaxrlhf.processes.channel import Channel, Garbled
from jaxrlhf.processes.plain import read

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
class CodeFailure:
    """Failure of user code to answer a call: a kind for counting, and one line for users.

    The process names both, so the line is cut to 1000 characters before it reaches a log.
    """

    cause: FailureCause
    detail: str

    def __post_init__(self) -> None:
        object.__setattr__(self, "detail", " ".join(self.detail.split())[:1000])


@dataclass(frozen=True)
class Answer:
    """Answer to a call: a value, or a failure.

    Attributes:
      number: Number of the call in its request.
      value: Plain value; its type is the job's.
      seconds: Duration of the call.
    """

    number: int
    value: Any = None
    failure: CodeFailure | None = None
    seconds: float = 0.0


@dataclass(frozen=True)
class Split:
    """Message of a process: calls that ran together failed together, and are to be made singly."""


@dataclass(frozen=True)
class Idle:
    """Last message about every request: the process is idle.

    Attributes:
      spoilt: Reason why the process must not run further jobs; empty if it may.
    """

    spoilt: str = ""


@dataclass(eq=False)
class Job:
    """Request with one or several calls, and the callbacks for its answers.

    If a process is lost, the call that it worked at gets the failure as its answer. If several calls ran together, none
    is blamed. The other calls are made again, unless they are calls of an instance, which is lost too.

    Attributes:
      request: Pickled request.
      left: Numbers of the calls without an answer, in the order of execution.
      returns: Type of the values.
      answered: Callback for the answer to each call.
      over: Callback when the executor ends.
      again: Callback for calls that are to be made again, in one request.
      together: Numbers of the calls that run together, after the others.
      opens: Number of the instance that the request makes.
      steps: Number of calls of user code before the first answer; each has the time limit.
      process: Process that has the request's instance; None if any process may take the request.
      answered_some: The process has answered a call.
      done: No further callback is made.
    """

    request: bytes
    left: list[int]
    returns: Any
    answered: Callable[[Answer], None]
    over: Callable[[BaseException], None]
    again: Callable[[list[int]], None] | None = None
    together: Collection[int] = ()
    opens: int | None = None
    steps: int = 1
    process: "Process | None" = None
    answered_some: bool = False
    done: bool = False

    def answer(self, answer: Answer) -> None:
        """Deliver the answer to a call.

        Raises:
          Garbled: The answer does not fit the request.
        """
        if answer.number not in self.left:
            raise Garbled("an answer to no call")
        value = read(answer.value, self.returns) if answer.failure is None else None
        self.left.remove(answer.number)
        self.answered_some = True
        if not self.done:
            self.answered(replace(answer, value=value))

    def split(self) -> None:
        """Make the calls that are left singly.

        Raises:
          Garbled: They do not run together.
        """
        if self.again is None or len(self.left) < 2 or not set(self.left) <= set(self.together):
            raise Garbled("no answer to a call")
        left, self.left, self.answered_some = self.left, [], True
        for number in left if not self.done else ():
            self.again([number])

    def end(self, *, spoilt: bool) -> None:
        """End the job after its last answer; a spoilt process may leave calls to another.

        Raises:
          Garbled: Answers are missing.
        """
        if self.left and not (spoilt and self.answered_some and self.again):
            raise Garbled("the end of a request without its answers")
        left, again, self.done = self.left, self.again if not self.done else None, True
        if left and again:
            again(left)

    def lose(self, failure: CodeFailure, seconds: float = 0.0) -> None:
        """End the job because its process is lost."""
        left, self.left = self.left, []
        again, done, self.done = self.again, self.done, True
        if done or not left:
            return
        if again and len(left) > 1:
            if set(left) <= set(self.together):
                for number in left:
                    again([number])
                return
            again(left[1:])
        self.answered(Answer(left[0], None, failure, seconds))


@dataclass(eq=False)
class Process:
    """Worker process, its jobs, and the instances that it has.

    Attributes:
      job: Job that the process works at; None if it is idle.
      queue: Further jobs for its instances.
      began_s, end_s: Time of the last answer or of the request, and deadline of the next answer.
      served: Number of finished jobs.
      spoilt: The process must not get further instances.
      ending: The process has been ordered to end.
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

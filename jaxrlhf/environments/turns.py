"""Tool calls of one reply, and the observation made from their answers."""

from collections.abc import Sequence

from jaxrlhf.environments import answers
from jaxrlhf.environments.protocol import ToolAnswer
from jaxrlhf.episode import CallRecord, Message, Observation, Reply, ToolCall
from jaxrlhf.processes.jobs import Lost


class ToolTurn:
    """Tool calls of a reply, and their answers so far.

    Args:
      tools: Names of all tools.
      waits: Names of the `async def` tools; their calls run together, after all other calls.
    """

    def __init__(self, reply: Reply, tools: Sequence[str], waits: frozenset[str]) -> None:
        self._reply, self._tools, self._waits = reply, tools, waits
        self._answers: dict[int, ToolAnswer] = {}
        for number, call in enumerate(reply.calls):
            if call.name not in tools:
                absent = f"there is no tool {call.name!r}; the tools are {', '.join(tools)}"
                self._answers[number] = ToolAnswer(number, f"error: {absent}", 0.0, "exception")

    @property
    def pending(self) -> dict[int, ToolCall]:
        """Calls without an answer, by number, in the order of execution."""
        found = [(n, call) for n, call in enumerate(self._reply.calls) if n not in self._answers]
        return dict(sorted(found, key=lambda one: (one[1].name in self._waits, one[0])))

    def answered(self, called: ToolAnswer) -> None:
        self._answers.setdefault(called.number, called)

    def blame(self, numbers: Sequence[int], lost: Lost) -> list[list[int]]:
        """Return groups of calls to make again after the process that had to make the calls `numbers` died.

        The call that was running gets the failure as its answer. If several async calls ran together, all are suspect,
        so each call is made again in a separate request.
        """
        left = [number for number in numbers if number not in self._answers]
        together = [number for number in left if self._reply.calls[number].name in self._waits]
        if left == together and len(left) > 1:
            return [[number] for number in left]
        if left:
            self.answered(ToolAnswer(left[0], answers.told(lost.detail), lost.seconds, lost.cause))
        return [left[1:]] if left[1:] else []

    def observation(self) -> Observation:
        """Build the observation: the answers to the calls in order, then error messages for malformed calls."""
        said: list[Message] = []
        for number, call in enumerate(self._reply.calls):
            message = {"role": "tool", "name": call.name, "content": self._answers[number].content}
            said.append(message | ({"tool_call_id": call.call_id} if call.call_id else {}))
        for malformed in self._reply.malformed:
            there = f"; the tools are {', '.join(self._tools)}" if self._tools else ""
            said.append({"role": "tool", "content": f"error: {malformed.detail}{there}"})
        records = [
            CallRecord(call.name, self._answers[number].seconds, self._answers[number].failure)
            for number, call in enumerate(self._reply.calls)
        ]
        return Observation(said, done=not said, calls=records)

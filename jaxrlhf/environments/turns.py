"""Tool calls of one reply, and the observation that their answers make."""

from collections.abc import Sequence

from jaxrlhf.environments import answers
from jaxrlhf.environments.protocol import CodeFailure, ToolAnswer
from jaxrlhf.episode import CallRecord, Message, Observation, Reply, ToolCall


class ToolTurn:
    """Calls of a reply, and their answers so far.

    Args:
      tools: Names of the tools that there are.
      waits: Names of those that are `async def`, which run together after the others.
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
        """Calls without an answer, by number, in the order in which they are made."""
        found = [(n, call) for n, call in enumerate(self._reply.calls) if n not in self._answers]
        return dict(sorted(found, key=lambda one: (one[1].name in self._waits, one[0])))

    def answered(self, called: ToolAnswer) -> None:
        self._answers.setdefault(called.number, called)

    def blame(self, numbers: Sequence[int], failed: CodeFailure, seconds: float) -> list[list[int]]:
        """Calls to make again, together or apart, after a process went down that had these to make.

        The call that it was at is to blame, and answered so. Calls that ran together are all suspect, so each is made
        again in a process of its own.
        """
        left = [number for number in numbers if number not in self._answers]
        together = [number for number in left if self._reply.calls[number].name in self._waits]
        if left == together and len(left) > 1:
            return [[number] for number in left]
        if left:
            self.answered(ToolAnswer(left[0], answers.told(failed.detail), seconds, failed.cause))
        return [left[1:]] if left[1:] else []

    def observation(self) -> Observation:
        """Answers of the calls in their order, then those to calls that could not be made."""
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

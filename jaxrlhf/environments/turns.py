"""Tool calls of one reply, and the observation made from their answers."""

from collections.abc import Sequence

from jaxrlhf.environments import answers
from jaxrlhf.episode import CallRecord, Message, Observation, Reply, ToolCall
from jaxrlhf.processes.jobs import Answer, CodeFailure


class ToolTurn:
    """Tool calls of a reply, and their answers so far.

    Args:
      tools: Names of all tools.
      waits: Names of the `async def` tools; their calls run together, after all other calls.
    """

    def __init__(self, reply: Reply, tools: Sequence[str], waits: frozenset[str]) -> None:
        self._reply, self._tools, self._waits = reply, tools, waits
        self._answers: dict[int, Answer] = {}
        for number, call in enumerate(reply.calls):
            if call.name not in tools:
                absent = f"there is no tool {call.name!r}; the tools are {', '.join(tools)}"
                self._answers[number] = Answer(number, None, CodeFailure("exception", absent))

    @property
    def pending(self) -> dict[int, ToolCall]:
        """Calls without an answer, by number, in the order of execution."""
        found = [(n, call) for n, call in enumerate(self._reply.calls) if n not in self._answers]
        return dict(sorted(found, key=lambda one: (self.waits(one[0]), one[0])))

    def waits(self, number: int) -> bool:
        """Return whether a call runs together with others."""
        return self._reply.calls[number].name in self._waits

    def answered(self, answer: Answer) -> None:
        self._answers[answer.number] = answer

    def observation(self) -> Observation:
        """Build the observation: the answers to the calls in order, then error messages for malformed calls."""
        messages, records = list[Message](), list[CallRecord]()
        for number, call in enumerate(self._reply.calls):
            answer = self._answers[number]
            failure = answer.failure
            content = answer.value if failure is None else answers.error_text(failure.detail)
            message = {"role": "tool", "name": call.name, "content": content}
            messages.append(message | ({"tool_call_id": call.call_id} if call.call_id else {}))
            records.append(CallRecord(call.name, answer.seconds, None if failure is None else failure.cause))
        for malformed in self._reply.malformed:
            there = f"; the tools are {', '.join(self._tools)}" if self._tools else ""
            messages.append({"role": "tool", "content": f"error: {malformed.detail}{there}"})
        return Observation(messages, done=not messages, calls=records)

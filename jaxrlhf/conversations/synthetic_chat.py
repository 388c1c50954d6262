"""Short made-up conversation, to find the text that a chat template writes around a reply.

The template renders three made-up messages and the new messages, instead of the episode's conversation. So the cost of
a turn does not grow with the episode, and no word of the policy is rendered.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

from jaxrlhf.config import Refusal
from jaxrlhf.conversations.rendering import ChatTemplate
from jaxrlhf.data.control_tokens import prefix_of_both
from jaxrlhf.episode import EnvironmentFailure, Message, ToolSchema

LAST_WORD, REASONING, SYSTEM, ANSWER = "wq7vend", "wq7vthought", "wq7vsystem", "wq7vanswer"
"""Made-up words at the end of the reply, in its reasoning, in the system message, and in a tool's answer."""

_TOOL: ToolSchema = {
    "type": "function",
    "function": {
        "name": "wq7vtool",
        "description": "A tool.",
        "parameters": {
            "type": "object",
            "properties": {"x": {"type": "string", "description": "A word."}},
            "required": ["x"],
        },
    },
}
_CALL_ID = "call00000"  # nine letters and digits, as Mistral's template requires
_SYSTEM: Message = {"role": "system", "content": SYSTEM}


class Closing(NamedTuple):
    """Text that a template writes after the last word of a reply.

    Attributes:
      text: Text up to its last special token, which ends the turn; the whole text without special tokens.
      token: Id of the token that ends the turn; None if the next message's header ends it.
      special: Number of special tokens in the text.
      occurrences: Number of times that the template writes the reply's last word.
    """

    text: str
    token: int | None
    special: int
    occurrences: int


class SyntheticChat:
    """Three made-up messages that precede the messages to be rendered.

    Attributes:
      with_system: True if the template takes a system message.
      with_calls: True if the template shows the calls of an assistant.
      several_calls: True if the template shows several calls in one reply.
      tool_role: Role in which the template takes a tool's answer.
      after_words: Closing of a reply without calls.
      after_calls: Closing of a reply with calls.
    """

    def __init__(self, template: ChatTemplate) -> None:
        self._template = template
        self.with_system = True
        self.with_system = SYSTEM in self._text([_SYSTEM, _user("?")])
        closing = self._closing(calls=0)
        if closing is None:
            raise Refusal(
                "the chat template does not show the assistant's words, so the end of a turn cannot be found; change "
                '"chat_template" in the tokenizer\'s configuration'
            )
        after_calls = self._closing(calls=1) if template.form.shows_calls else None
        self.with_calls = after_calls is not None
        self.several_calls = self.with_calls and self._closing(calls=2) is not None
        self.after_words, self.after_calls = closing, after_calls or closing
        self.tool_role = "tool" if template.form.shows_answers else "user"

    def before(self, messages: Sequence[Message], *, reasoning: str = "Hm.") -> list[Message]:
        """Return the messages before new ones: system, user, and assistant with calls for a tool's answers."""
        answers = [message for message in messages if message.get("role") == "tool"] if self.with_calls else []
        return self._three(answers if self.several_calls else answers[-1:], reasoning)

    def closing(self, messages: Sequence[Message]) -> Closing:
        """Return the closing of the reply before new messages."""
        return self.after_calls if any(message.get("role") == "tool" for message in messages) else self.after_words

    def following(self, messages: Sequence[Message], tools: Sequence[ToolSchema]) -> str:
        """Return the text from the end of the reply's turn to the opening of the next reply.

        Raises:
          EnvironmentFailure: The template rejects the messages, or leaves out the reply.
        """
        rendered = self._template.render([*self.before(messages), *messages], tools, open_reply=True)
        closing = self.closing(messages)
        parts = rendered.split(LAST_WORD, closing.occurrences)
        if len(parts) <= closing.occurrences:
            raise EnvironmentFailure("wrong-type", "the chat template leaves out the reply before these messages")
        after = parts[-1]
        if closing.token is not None and after.startswith(closing.text):
            return after[len(closing.text) :]
        found = list(self._template.special.found_in(after))
        if closing.token is None:  # as in GLM's template
            return after[found[0].start() :] if found else after
        # gpt-oss ends an earlier reply with another token than the last one.
        return after[found[closing.special - 1].end() :] if len(found) >= closing.special else ""

    def keeps(self, messages: Sequence[Message], *, reasoning: bool) -> bool:
        """Return True if the template renders the reply before these messages as it was when it was sampled.

        Args:
          reasoning: True if the reply has reasoning.
        """
        before = self.before(messages, reasoning=REASONING if reasoning else "")
        later = self._text([*before, *messages], [_TOOL])
        if reasoning:
            last = self._text(before, [_TOOL])
            reply = last[: last.rfind(LAST_WORD) + len(LAST_WORD)]
            return REASONING in reply and later.startswith(reply)
        opened = self._text(before[:-1], [_TOOL], open_reply=True)
        return later.startswith(opened + before[-1]["content"])

    def answers(self) -> list[Message]:
        """Return one message of a tool, in a list."""
        return [_answer("wq7vtool", _CALL_ID)]

    def shows(self, tools: Sequence[ToolSchema]) -> bool:
        """Return True if the template shows the tools to the policy."""
        with_tools, without = (self._text(self.before([])[:-1], shown) for shown in (tools, ()))
        names = [str(tool["function"]["name"]) for tool in tools]
        return all(with_tools.count(name) > without.count(name) for name in names)

    def opening(self) -> str:
        """Return the text that opens a reply; empty if the end of a user's turn does so."""
        opened, closed = (self._text([_user("?")], open_reply=value) for value in (True, False))
        return opened[len(prefix_of_both(opened, closed)) :]

    def _text(self, messages: Sequence[Message], tools: Sequence[ToolSchema] = (), *, open_reply: bool = False) -> str:
        """Render the messages as text; empty if the template rejects them."""
        try:
            return self._template.render(messages, tools, open_reply=open_reply)
        except EnvironmentFailure:
            return ""

    def _closing(self, *, calls: int) -> Closing | None:
        """Return the closing of a reply with this number of calls; None if the template does not show the reply."""
        answers = [_answer("wq7vtool", f"call{n:05d}") for n in range(calls)]
        tools = [_TOOL] * bool(calls)
        before = self._three(answers, "Hm.")
        *parts, after = self._text(before, tools).split(LAST_WORD)
        if not parts:
            return None
        later = self._text([*before, *(answers or [_user("?")])], tools).split(LAST_WORD, len(parts))[-1]
        found = self._template.special.closing(after, later)
        if not found:
            return Closing(after, None, 0, len(parts))
        end = found[-1]
        return Closing(after[: end.end()], self._template.special.ids[end[0]], len(found), len(parts))

    def _three(self, answered: Sequence[Message], reasoning: str) -> list[Message]:
        """Return a system, a user and an assistant message; the assistant makes the calls that are answered."""
        reply: dict[str, Any] = {"role": "assistant", "content": "" if answered else LAST_WORD}
        reply["reasoning_content"] = reasoning
        if answered:
            reply["tool_calls"] = [_call(answer, last=answer is answered[-1]) for answer in answered]
        return [*([_SYSTEM] if self.with_system else []), _user("?"), reply]


def _user(text: str) -> Message:
    return {"role": "user", "content": text}


def _answer(name: str, call_id: str) -> Message:
    return {"role": "tool", "name": name, "tool_call_id": call_id, "content": ANSWER}


def _call(answer: Message, *, last: bool) -> dict[str, Any]:
    function = {"name": answer.get("name") or "tool", "arguments": {"x": LAST_WORD if last else "?"}}
    return {"type": "function", "id": answer.get("tool_call_id") or _CALL_ID, "function": function}

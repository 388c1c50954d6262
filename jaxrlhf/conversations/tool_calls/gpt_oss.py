"""Messages in channels, as in gpt-oss (harmony): reasoning in `analysis`, tool calls in `commentary` to a function.

`<|channel|>commentary to=functions.add <|constrain|>json<|message|>{...}`; the receiver may precede the channel.
"""

import re
from collections.abc import Collection
from typing import Literal

from jaxrlhf.conversations.tool_calls.written import CallBlock, Tag, Written, json_arguments, may_begin

SIGNS = OPENINGS = ("<|channel|>",)
_RECEIVER = re.compile(r"to=(?:functions\.)?([\w.-]+)")
_STARTS, _MESSAGE, _ENDS = ("<|start|>", "<|channel|>"), "<|message|>", ("<|end|>", "<|call|>", "<|return|>")

Kind = Literal["between", "header", "reasoning", "content", "call"]


class Channels:
    """Incremental parser of the messages of a reply.

    A message is a header up to `<|message|>` and a body up to `<|end|>` or the next header. A header is no text of the
    reply, even if the reply is truncated in the header. Text without a header is content.

    Args:
      names: Names of the tools; without tools, a message to a tool is content.
    """

    def __init__(self, tag: Tag, names: Collection[str]) -> None:
        self._has_tools = bool(names)
        self._starts, self._message = {*map(tag, _STARTS)}, tag(_MESSAGE)
        self._tags = (*self._starts, self._message, *map(tag, _ENDS))
        self._tag = re.compile("|".join(map(re.escape, self._tags)))
        self._state: Kind = "between"
        self._held = self._header = self._receiver = ""
        self._call, self._space = list[str](), list[str]()
        self._written, self._reasoning = Written([]), list[str]()

    def add(self, text: str) -> list[tuple[Kind, str]]:
        """Return the pieces of reasoning, content and calls that are certain with this text."""
        if self._state == "between" and not self._held and not text.strip():
            self._space.append(text)  # set aside, so that no text is scanned twice
            return []
        text = "".join((*self._space, self._held, text))
        self._space = []
        pieces: list[tuple[Kind, str]] = []
        at = 0
        for found in self._tag.finditer(text):
            pieces += [self._words(text[at : found.start()]), self._tagged(found[0])]
            at = found.end()
        cut = may_begin(text, self._tags, at)
        words = text[at:cut].lstrip()
        if self._state == "between" and (not words or "to=".startswith(words)):
            cut = at
        pieces.append(self._words(text[at:cut]))
        self._held = text[cut:]
        return [(kind, words) for kind, words in pieces if words or kind == "call"]  # a call may have no text

    def end(self) -> Written:
        """Return the parsed reply."""
        self._words(self._held)
        self._close()
        self._written.reasoning = "".join(self._reasoning)
        return self._written

    def _words(self, text: str) -> tuple[Kind, str]:
        if self._state == "between":
            words = text.lstrip()
            if not words:
                return "between", ""
            self._state = "header" if words.startswith("to=") else "content"
        match self._state:
            case "header":
                self._header += text
            case "call":
                self._call.append(text)
            case "reasoning":
                self._reasoning.append(text)
            case "content":
                self._written.parts.append(text)
        return self._state, text

    def _tagged(self, tag: str) -> tuple[Kind, str]:
        if tag == self._message:
            if self._state == "call":  # part of a value
                return self._words(tag)
            if self._state in ("between", "header"):
                self._open()
        elif tag in self._starts:
            if self._state != "header":
                self._close()
                self._header = ""
            self._state, self._header = "header", self._header + " "
        else:
            self._close()
            self._state, self._header = "between", ""
        return self._state, ""

    def _open(self) -> None:
        """Start the body of a message; its kind follows from the header."""
        receiver = _RECEIVER.search(self._header)
        if receiver is not None and self._has_tools:
            self._state, self._receiver = "call", receiver[1]
        elif receiver is None and "analysis" in self._header:
            self._state = "reasoning"
        else:
            self._state = "content"

    def _close(self) -> None:
        """End a message; the text of a call, shown if the call is malformed, begins with the name of the tool."""
        if self._state == "call":
            body = "".join(self._call)
            block = CallBlock(f"to=functions.{self._receiver} {body}", [json_arguments(self._receiver, body)])
            self._written.parts.append(block)
            self._call = []


def find(text: str, tag: Tag, names: Collection[str]) -> Written:
    """Find the calls, the reasoning and the content of a reply."""
    channels = Channels(tag, names)
    channels.add(text)
    return channels.end()

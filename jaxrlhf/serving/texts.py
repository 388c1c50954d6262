"""Text of tokens as they come: nothing is said that later tokens would change."""

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from jaxrlhf.conversations import ChatFormat
from jaxrlhf.data.tokenizer import decoder
from jaxrlhf.episode import Reply, ToolSchema

_OPENINGS = "<[{`"
"""Characters that a tool call may begin with: where there are tools, what follows one is held back until the end."""

_CONTEXT_TOKENS = 8


def _before_stops(text: str, stops: Sequence[str]) -> int:
    """Characters before the first stop text, or before what may become one."""
    whole = [at for stop in stops if (at := text.find(stop)) >= 0]
    begun = [len(text) - n for stop in stops for n in range(1, len(stop)) if text.endswith(stop[:n])]
    return min(whole + begun, default=len(text))


class TextStream:
    """Text of a choice, piece by piece.

    What may be the beginning of a stop text is held back, and so are bytes that are no character yet.

    Args:
      prompt: Tokens that the choice goes on from.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, stops: Sequence[str], prompt: Sequence[int]) -> None:
        self._decode, self._stops = decoder(tokenizer), tuple(stops)
        # A tokenizer may write the first of a text in another way, such as without the space before it.
        before = list(prompt[-_CONTEXT_TOKENS:])
        self._tokens = [] if self._decode(before).endswith("\ufffd") else before
        self._first, self._read = 0, len(self._tokens)
        self._text = ""
        self._said = 0

    @property
    def text(self) -> str:
        """All of it, what is held back included."""
        return self._text

    def add(self, tokens: Sequence[int]) -> str:
        """The text that can be said once these tokens came."""
        self._tokens += tokens
        before = self._decode(self._tokens[self._first : self._read])
        text = self._decode(self._tokens[self._first :])
        if text.endswith("\ufffd"):
            return ""
        self._text += text[len(before) :]
        self._first, self._read = max(0, self._read - _CONTEXT_TOKENS), len(self._tokens)
        return self._say(_before_stops(self._text, self._stops))

    def end(self, stop: str | None) -> str:
        """The text that is left to be said: all before the stop text that ended the choice, if one did."""
        self._text += self._decode(self._tokens[self._first :])[
            len(self._decode(self._tokens[self._first : self._read])) :
        ]
        self._read = len(self._tokens)
        if stop is not None:
            self._text = self._text[: self._text.index(stop)]
        return self._say(len(self._text))

    def _say(self, end: int) -> str:
        new, self._said = self._text[self._said : end], max(self._said, end)
        return new


class ReplyStream:
    """Reply of a chat, piece by piece: content and reasoning as they come, tool calls at the end."""

    def __init__(self, form: ChatFormat, tools: Sequence[ToolSchema], opening: str, stops: Sequence[str]) -> None:
        self._form, self._tools, self._opening, self._stops = form, tools, opening, tuple(stops)
        self._tokens: list[int] = []
        self._said = {"reasoning": "", "content": ""}

    def add(self, tokens: Sequence[int]) -> dict[str, str]:
        """Content and reasoning that can be said once these tokens came."""
        self._tokens += tokens
        reply = self._form.parse(self._tokens, self._tools, opening=self._opening)
        if reply.calls or reply.malformed:
            return {}
        content = reply.content
        if self._tools:
            content = content[: min((at for sign in _OPENINGS if (at := content.find(sign)) >= 0), default=None)]
        return {
            name: new
            for name, text in (("reasoning", reply.reasoning), ("content", content))
            if (new := self._new(name, self._settled(text)))
        }

    def end(self, reply: Reply, content: str) -> dict[str, str]:
        """Content and reasoning that are left to be said."""
        texts = (("reasoning", reply.reasoning), ("content", content))
        return {name: new for name, text in texts if (new := self._new(name, text))}

    def _settled(self, text: str) -> str:
        """The text without what later tokens may change."""
        text = text[: _before_stops(text, self._stops)]
        # A tag of reasoning may have begun.
        cut = text.rfind("<")
        return text[: cut if cut >= 0 and len(text) - cut < 16 else None].rstrip("\ufffd").rstrip()

    def _new(self, name: str, text: str) -> str:
        said = self._said[name]
        if not text.startswith(said):  # calls take the line breaks around the content away
            said = said.lstrip("\n")
        if not text.startswith(said) or text == said:
            return ""
        self._said[name] = text
        return text[len(said) :]

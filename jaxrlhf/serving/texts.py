"""Incremental text of streamed tokens: text is returned only once later tokens cannot change it."""

from collections.abc import Sequence

from jaxrlhf.conversations import ChatFormat
from jaxrlhf.data.tokenizer import TextBytes, TokenBytes
from jaxrlhf.episode import Reply, ToolSchema


def before_stop(text: str, stop: str | None) -> str:
    """Return the text before the stop text; the whole text if `stop` is None."""
    return text if stop is None else text.partition(stop)[0]


class BeforeStops:
    """Stream filter that ends at the first stop text; a possible start of a stop text is held back."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops, self._held = tuple(stops), ""
        self._stopped = False

    def add(self, text: str) -> str:
        """Add a text; return the text that can be sent now."""
        if self._stopped:
            return ""
        self._held += text
        whole = [at for stop in self._stops if (at := self._held.find(stop)) >= 0]
        partial = [
            len(self._held) - n for stop in self._stops for n in range(1, len(stop)) if self._held.endswith(stop[:n])
        ]
        self._stopped = bool(whole)
        cut = min(whole + partial, default=len(self._held))
        sent, self._held = self._held[:cut], self._held[cut:]
        return sent


class TextStream:
    """Text stream of a choice.

    A possible start of a stop text is held back, and so are bytes of an incomplete character.

    Args:
      prompt: Tokens before the choice.

    Attributes:
      at_start: Whether only control tokens came before the next token. A tokenizer may decode the first token of a text
        in another way, such as without its leading space.
    """

    def __init__(self, tokens: TokenBytes, stops: Sequence[str], prompt: Sequence[int]) -> None:
        self._tokens, self._bytes, self._before = tokens, TextBytes(), BeforeStops(stops)
        self.at_start = all(map(tokens.is_special, prompt))
        self._parts: list[str] = []
        self._sent = 0

    def add(self, new: Sequence[int]) -> str:
        """Add tokens; return the text that can be sent now."""
        for token in new:
            self._parts.append(self._bytes.add(self._tokens.of(token, first=self.at_start)))
            self.at_start = self.at_start and self._tokens.is_special(token)
        sent = self._before.add("".join(self._parts[-len(new) :]) if new else "")
        self._sent += len(sent)
        return sent

    def end(self, stop: str | None) -> str:
        """Return the remaining text, up to the stop text that ended the choice, if any."""
        whole = before_stop("".join(self._parts) + self._bytes.end(), stop)
        return whole[self._sent :]


class ReplyStream:
    """Stream of a chat reply: reasoning and content incrementally; tool calls, and text after them, at the end."""

    def __init__(self, form: ChatFormat, tools: Sequence[ToolSchema], opening: str, stops: Sequence[str]) -> None:
        self._words = form.stream(tools, opening=opening)
        self._stop_tokens = form.stop_tokens
        self._before = {name: BeforeStops(stops) for name in ("reasoning", "content")}
        self._sent = {name: list[str]() for name in self._before}
        self._held: tuple[int, ...] = ()

    def add(self, tokens: Sequence[int]) -> dict[str, str]:
        """Add tokens; return the reasoning and content that can be sent now."""
        if self._words is None:
            return {}
        new = (*self._held, *tokens)
        # A stop token that ends the reply is not part of its text.
        self._held = new[-1:] if new and new[-1] in self._stop_tokens else ()
        certain = self._words.add(new[: len(new) - len(self._held)])
        sent = {name: self._before[name].add(text) for name, text in zip(self._before, certain, strict=True)}
        for name, text in sent.items():
            self._sent[name].append(text)
        return {name: text for name, text in sent.items() if text}

    def end(self, reply: Reply, stop: str | None) -> dict[str, str]:
        """Return the remaining reasoning and content."""
        rest = {}
        for name, whole in (("reasoning", reply.reasoning), ("content", reply.content)):
            text, sent = before_stop(whole, stop), "".join(self._sent[name])
            if not text.startswith(sent):
                raise AssertionError(f"the {name} was sent as {sent[-80:]!r}, and is {text[:80]!r}")
            rest[name] = text[len(sent) :]
        return {name: text for name, text in rest.items() if text}

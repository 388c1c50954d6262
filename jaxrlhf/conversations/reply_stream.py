"""Streaming of replies: the reasoning and content that no later token can change."""

from collections.abc import Callable, Collection, Sequence
from types import ModuleType

from jaxrlhf.conversations.reply_words import MarkedText, ReasoningSplit, ReplyTokens
from jaxrlhf.conversations.tool_calls import gpt_oss
from jaxrlhf.conversations.tool_calls.written import may_begin


class ReplyWords:
    """Incremental parser of a reply's reasoning and content, without its calls and the text after the first call.

    The pieces together are a prefix of the reasoning and the content that `ReplyParser.reply` finds in all tokens. The
    time to add tokens depends on these tokens alone.

    Args:
      names: Names of the tools.
    """

    def __init__(self, tokens: ReplyTokens, split: ReasoningSplit, family: ModuleType, names: Collection[str]) -> None:
        self._plain = tokens.plain
        self._text, self._split = MarkedText(tokens), split
        self._channels = gpt_oss.Channels(tokens.tag, names) if family is gpt_oss else None
        self._openings = tuple(map(tokens.tag, family.OPENINGS)) if names else ()
        self._beginnings = tuple(getattr(family, "BEGINNINGS", ())) if names else ()
        self._held, self._space = "", list[str]()
        self._called = False
        self._reasoning, self._content = _Ends(str.isspace, leading=True), _Ends("\n".__eq__, leading=bool(names))

    def add(self, tokens: Sequence[int]) -> tuple[str, str]:
        """Return the reasoning and content that are certain with these tokens."""
        reasoning, rest = self._split.add(self._text.add(tokens))
        content = ""
        if self._channels is None:
            content = self._before_calls(rest)
        else:
            for kind, words in self._channels.add(rest):
                self._called |= kind == "call"
                reasoning += words if kind == "reasoning" else ""
                content += words if kind == "content" and not self._called else ""
        return self._reasoning.add(self._plain(reasoning)), self._content.add(self._plain(content))

    def _before_calls(self, text: str) -> str:
        if self._called or not self._openings:
            return "" if self._called else text
        if self._beginnings:  # the whole reply may be a call
            self._space.append(text)
            if not text.strip():
                return ""
            text = "".join(self._space)
            self._called = text.lstrip().startswith(self._beginnings)
            self._beginnings = ()
        text, self._held = self._held + text, ""
        places = [place for opening in self._openings if (place := text.find(opening)) >= 0]
        self._called |= bool(places)
        if self._called:
            return text[: min(places)] if places else ""
        cut = may_begin(text, self._openings)
        self._held = text[cut:]
        return text[:cut]


class _Ends:
    """Incremental strip of a text: drops characters at its beginning, and holds them back at its end."""

    def __init__(self, outer: Callable[[str], bool], *, leading: bool) -> None:
        self._outer, self._leading = outer, leading
        self._held: list[str] = []

    def add(self, text: str) -> str:
        """Return the text that is certain to be between the stripped ends."""
        if self._leading:
            begin = next((place for place, letter in enumerate(text) if not self._outer(letter)), len(text))
            text = text[begin:]
            self._leading = not text
        end = len(text)
        while end and self._outer(text[end - 1]):
            end -= 1
        if not end:
            self._held.append(text)
            return ""
        certain, self._held = "".join(self._held) + text[:end], [text[end:]]
        return certain

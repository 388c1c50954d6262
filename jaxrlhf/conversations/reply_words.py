"""Text of a reply as its tokens arrive: marks before added tokens, and the split into reasoning and the rest."""

from collections.abc import Callable, Sequence
from typing import Literal

from transformers import PreTrainedTokenizerBase

from jaxrlhf.conversations.tool_calls.written import MARK, Tag, may_begin
from jaxrlhf.data.tokenizer import TextBytes, TokenBytes

REASONING = (("<think>", "</think>"), ("[THINK]", "[/THINK]"), ("<|channel>thought\n", "<channel|>"))
"""Opening and closing tags of reasoning."""


class ReplyTokens:
    """Conversion of reply tokens to text with a mark before each added token of the vocabulary.

    Attributes:
      bytes: Bytes of each token.
      added: Text of each added token, by token id.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.bytes = TokenBytes(tokenizer)
        self.added = {id: str(token) for id, token in tokenizer.added_tokens_decoder.items()}
        self._tags = set(self.added.values())
        self._special = [MARK + text for id, text in self.added.items() if self.bytes.is_special(id)]

    def tag(self, text: str) -> str:
        """Return a tag as it appears in the text: marked if the tag is one token."""
        return MARK + text if text in self._tags else text

    def plain(self, text: str) -> str:
        """Return marked text without its marks and special tokens."""
        if MARK not in text:
            return text
        for special in self._special:
            text = text.replace(special, "")
        return text.replace(MARK, "")


class MarkedText:
    """Incremental decoder of one reply's tokens to marked text."""

    def __init__(self, tokens: ReplyTokens) -> None:
        self._tokens = tokens
        self._text, self._first = TextBytes(), True

    def add(self, tokens: Sequence[int]) -> str:
        """Return the text that is complete with these tokens."""
        parts: list[str] = []
        for token in tokens:
            if token in self._tokens.added:
                parts += [self.end(), MARK + self._tokens.added[token]]
                self._first = True
            else:
                parts.append(self._text.add(self._tokens.bytes.of(token, first=self._first)).replace(MARK, "\ufffd"))
                self._first = False
        return "".join(parts)

    def end(self) -> str:
        """Return the remaining text."""
        return self._text.end()


class ReasoningSplit:
    """Incremental split of a reply's marked text into reasoning and the rest.

    Reasoning is at the beginning of the reply; the prompt or the reply opens it, and the first closing tag ends it.
    Later tags are ordinary text. If the prompt has closed the reasoning, the reply has none. A closing tag without an
    opening tag ends reasoning if the template opens reasoning in other turns (DeepSeek's does not after a tool's
    answer). Otherwise the closing tag is ordinary text.

    Attributes:
      reasons: True if the reply has a block of reasoning, even an empty one.

    Args:
      opening: End of the text before the reply.
      usual: Text that opens a reply to a user.
    """

    def __init__(self, tag: Tag, opening: str, usual: str) -> None:
        self._pairs = [(_marked(begin, tag), tag(end)) for begin, end in REASONING]
        self._state: Literal["begin", "again", "perhaps", "reasoning", "ended", "rest"] = "begin"
        self._start = self._stop = self._held = self._usual = ""
        self._perhaps, self._space = list[str](), list[str]()
        self.reasons = False
        opening = opening.rstrip()
        if any(opening.endswith(end) for _, end in REASONING):
            self._state = "rest"
        for (begin, _), pair in zip(REASONING, self._pairs, strict=True):
            if opening.endswith(begin.strip()):
                self._begin("again", pair)
            self._usual = pair[1] if usual.rstrip().endswith(begin.strip()) else self._usual

    def add(self, text: str) -> tuple[str, str]:
        """Return the reasoning and the rest that are certain with this text."""
        if self._state in ("begin", "again") and not self._held and not text.strip():
            self._space.append(text)  # set aside, so that no text is scanned twice
            return "", ""
        self._held += "".join(self._space) + text
        self._space = []
        reasoning, rest = "", ""
        if self._state == "begin":
            words = self._held.lstrip()
            found = next((pair for pair in self._pairs if words.startswith(pair[0])), None)
            if found is not None:
                self._begin("reasoning", found)
                self._held = words[len(found[0]) :]
            elif not any(start.startswith(words) for start, _ in self._pairs):
                self._state = "perhaps" if self._usual else "rest"
        if self._state == "perhaps":
            self._look_for_end()
        if self._state == "again":  # a model may repeat the tag with which the prompt ends
            words = self._held.lstrip()
            if words.startswith(self._start):
                self._held, self._state = words[len(self._start) :], "reasoning"
            elif not self._start.startswith(words):
                self._state = "reasoning"
        if self._state == "reasoning":
            reasoning, ended, after = self._held.partition(self._stop)
            if ended:
                self._held, self._state = after, "ended"
            else:
                cut = may_begin(self._held, (self._stop,))
                reasoning, self._held = self._held[:cut], self._held[cut:]
        if self._state == "ended":
            self._held = self._held.lstrip("\n")
            self._state = "rest" if self._held else "ended"
        if self._state == "rest":
            rest, self._held = self._held, ""
        return reasoning, rest

    def end(self) -> tuple[str, str]:
        """Return the remaining reasoning and rest; the token of an incomplete tag is dropped."""
        text, self._held = "".join((*self._perhaps, *self._space, self._held)), ""
        if self._state in ("again", "reasoning"):
            return text, ""
        return "", "" if text.lstrip().startswith(MARK) else text

    def _look_for_end(self) -> None:
        """Hold text back until a closing tag shows that all of it was reasoning; no text is scanned twice."""
        if self._usual in self._held:
            self._held, self._perhaps = "".join(self._perhaps) + self._held, []
            self.reasons, self._state, self._stop = True, "reasoning", self._usual
            return
        cut = may_begin(self._held, (self._usual,))
        self._perhaps.append(self._held[:cut])
        self._held = self._held[cut:]

    def _begin(self, state: Literal["again", "reasoning"], pair: tuple[str, str]) -> None:
        self._state, self.reasons = state, True
        self._start, self._stop = pair


def _marked(begin: str, tag: Callable[[str], str]) -> str:
    head, end, name = begin.partition(">")
    return tag(head + end) + name

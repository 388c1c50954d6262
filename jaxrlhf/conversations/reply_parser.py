"""Parser of a policy's replies, from tokens to reasoning, content, and tool calls in the model family's form."""

import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from jaxrlhf.conversations.rendering import mapped
from jaxrlhf.conversations.reply_stream import ReplyWords
from jaxrlhf.conversations.reply_words import MarkedText, ReasoningSplit, ReplyTokens
from jaxrlhf.conversations.tool_calls import gpt_oss
from jaxrlhf.conversations.tool_calls.families import family
from jaxrlhf.conversations.tool_calls.signatures import Signatures
from jaxrlhf.conversations.tool_calls.written import MARK, CallBlock, Written, WrittenCall, calls_of
from jaxrlhf.data.chats.message_form import as_object
from jaxrlhf.episode import MalformedCall, Reply, ToolCall, ToolSchema

_SHOWN_MARK = repr(MARK)[1:-1]

_KEPT = 256
"""Number of tool lists whose signatures are cached; clients of a server may send another list with every request."""


class ReplyParser:
    """Parser of replies in the form that a tokenizer's chat template shows.

    A tag that is a token of the vocabulary counts only where that token was sampled, not where letters spell it.

    Args:
      usual: Text with which the template opens a reply to a user.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, template: str, usual: str = "") -> None:
        self._tokenizer, self.tokens = tokenizer, ReplyTokens(tokenizer)
        self._family = family(template, {*self.tokens.added.values()})
        self._usual = usual
        self._by_template = getattr(tokenizer, "response_template", None)
        self._signatures: dict[str, Signatures] = {}

    @property
    def family(self) -> str:
        """Name of the form of tool calls."""
        return "response_template" if self._by_template else self._family.__name__.rpartition(".")[2]

    def reply(self, tokens: tuple[int, ...], tools: Sequence[ToolSchema], *, ended: bool, opening: str) -> Reply:
        """Parse the tokens of a reply.

        Args:
          ended: True if the last token ends the turn; it is then not part of the reply's text.
          opening: End of the text before the reply.
        """
        text_tokens = tokens[:-1] if ended else tokens
        signatures, reasons = self.signatures(tools), False
        written = self._template_form(text_tokens, tools, opening) if self._by_template else None
        if written is None:
            written, reasons = self._written(text_tokens, opening, signatures.names)
        plain = self.tokens.plain
        texts, checked = list[str](), list[ToolCall | MalformedCall]()
        for part in written.parts:
            if isinstance(part, str):
                texts.append(part)
                continue
            found = [_checked(call, signatures) for call in part.calls]
            checked += found
            texts += [part.text] if any(isinstance(call, MalformedCall) for call in found) else []
        content = plain("".join(texts))
        content = content.lstrip("\n") if signatures.names else content
        reasoning = plain(written.reasoning).strip()
        return Reply(
            text=self.tokens.bytes.text(text_tokens),
            content=content.rstrip("\n") if checked else content,
            reasoning=reasoning,
            calls=tuple(call for call in checked if isinstance(call, ToolCall)),
            malformed=tuple(call for call in checked if isinstance(call, MalformedCall)),
            tokens=tokens,
            ended=ended,
            reasoned=reasons or bool(reasoning),
        )

    def stream(self, tools: Sequence[ToolSchema], opening: str) -> "ReplyWords | None":
        """Return an incremental parser of a reply; None if the tokenizer's own response template needs all tokens."""
        if self._by_template:
            return None
        split = ReasoningSplit(self.tokens.tag, opening, self._usual)
        return ReplyWords(self.tokens, split, self._family, self.signatures(tools).names)

    @property
    def writes_calls(self) -> bool:
        """True if calls can be written as text in the family's form."""
        return hasattr(self._family, "write")

    def written(self, calls: Sequence[Mapping[str, Any]]) -> str | None:
        """Return calls of a message as the policy writes them; None if writing is not supported for the family."""
        if not self.writes_calls:
            return None
        functions = [call["function"] for call in calls]
        return str(self._family.write([(function["name"], as_object(function["arguments"])) for function in functions]))

    def signatures(self, tools: Sequence[ToolSchema]) -> Signatures:
        """Return the names and parameters of tools; raise `Refusal` as `Signatures` does."""
        key = json.dumps([dict(tool) for tool in tools], default=str)  # unsorted: the order of properties matters
        if (found := self._signatures.get(key)) is None:
            found = self._signatures[key] = Signatures(tools)
            if len(self._signatures) > _KEPT:
                self._signatures.pop(next(iter(self._signatures)), None)
        return found

    def _written(self, tokens: Sequence[int], opening: str, names: Collection[str]) -> tuple[Written, bool]:
        """Parse a reply in the form of the family; return its parts, and True if it has a block of reasoning."""
        marked, split = MarkedText(self.tokens), ReasoningSplit(self.tokens.tag, opening, self._usual)
        parts = split.add(marked.add(tokens) + marked.end()), split.end()
        reasoning, rest = ("".join(some) for some in zip(*parts, strict=True))
        if names or self._family is gpt_oss:
            written = self._family.find(rest, self.tokens.tag, names)
        else:
            written = Written([rest])  # without tools nothing is a call
        written.reasoning = reasoning + written.reasoning
        return written, split.reasons

    def _template_form(self, tokens: Sequence[int], tools: Sequence[ToolSchema], opening: str) -> Written | None:
        """Parse a reply with the tokenizer's own response template; return None if that fails."""
        text = str(self._tokenizer.decode(list(tokens), skip_special_tokens=False))
        try:
            message = self._tokenizer.parse_response(text, prefix=opening, tools=[dict(tool) for tool in tools])
            calls: list[WrittenCall | str] = []
            for call in message.get("tool_calls") or ():
                calls += calls_of(call.get("function", call) if isinstance(call, dict) else call, ("arguments",))
            reasoning = message.get("reasoning_content") or message.get("thinking") or message.get("reasoning") or ""
            content = str(message.get("content") or "")
            return Written([content, CallBlock(text, calls)] if calls else [content], str(reasoning))
        except Exception:  # a template's patterns and parsers may fail in any way on a policy's text
            return None


def _checked(call: WrittenCall | str, signatures: Signatures) -> ToolCall | MalformedCall:
    if isinstance(call, str):
        return MalformedCall("structure", call.replace(MARK, "").replace(_SHOWN_MARK, ""))
    try:
        return signatures.check(WrittenCall(*mapped(call, lambda text: text.replace(MARK, ""))))
    except (RecursionError, ArithmeticError):
        return MalformedCall("structure", "a call's values are nested too deep, or are too large")

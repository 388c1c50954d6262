"""Replies of a policy, from its tokens to words: reasoning, content, and tool calls in its family's form."""

import json
from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from jaxrlhf.conversations.rendering import mapped
from jaxrlhf.conversations.tool_calls.families import family
from jaxrlhf.conversations.tool_calls.signatures import Signatures
from jaxrlhf.conversations.tool_calls.written import MARK, Written, WrittenCall, calls_of
from jaxrlhf.data.tokenizer import decoder
from jaxrlhf.episode import MalformedCall, Reply, ToolCall, ToolSchema

_REASONING = (("<think>", "</think>"), ("[THINK]", "[/THINK]"), ("<|channel>thought\n", "<channel|>"))
_SHOWN_MARK = repr(MARK)[1:-1]

_KEPT = 256
"""Lists of tools whose signatures are kept; clients of a server may send another with every request."""


class ReplyParser:
    """Reader of replies in the form that a tokenizer's chat template shows.

    A tag that is a token of the vocabulary counts where that token was drawn, not where letters spell it.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, template: str) -> None:
        self._tokenizer, self._text = tokenizer, decoder(tokenizer)
        self._own = {id: str(token) for id, token in tokenizer.added_tokens_decoder.items()}
        self._tags = set(self._own.values())
        special = {id for id, token in tokenizer.added_tokens_decoder.items() if token.special}
        self._special = special | set(tokenizer.all_special_ids)
        self._family = family(template, self._tags)
        self._by_template = getattr(tokenizer, "response_template", None)
        self._signatures: dict[str, Signatures] = {}

    @property
    def family(self) -> str:
        """Name of the form of calls."""
        return "response_template" if self._by_template else self._family.__name__.rpartition(".")[2]

    def reply(self, tokens: tuple[int, ...], tools: Sequence[ToolSchema], *, ended: bool, opening: str) -> Reply:
        """Words of a reply.

        Args:
          ended: The last token ends the turn, and is no part of the words.
          opening: Last of the text before it.
        """
        drawn = tokens[:-1] if ended else tokens
        written = self._template_form(drawn, tools, opening) if self._by_template else None
        if written is None:
            reasoning, rest = self._split(self._marked(drawn), opening)
            written = self._family.find(rest, self._tag)
            written.reasoning = reasoning + written.reasoning
        signatures = self.signatures(tools)
        checked = [_checked(call, signatures) for call in written.calls]
        return Reply(
            text=self._text(drawn),
            content=self._plain(written.content).strip("\n") if checked else self._plain(written.content),
            reasoning=self._plain(written.reasoning).strip(),
            calls=tuple(call for call in checked if isinstance(call, ToolCall)),
            malformed=tuple(call for call in checked if isinstance(call, MalformedCall)),
            tokens=tokens,
            ended=ended,
        )

    def signatures(self, tools: Sequence[ToolSchema]) -> Signatures:
        """Names and parameters of tools; `Refusal` as of the class."""
        key = json.dumps([dict(tool) for tool in tools], default=str)  # properties have an order
        if (found := self._signatures.get(key)) is None:
            found = self._signatures[key] = Signatures(tools)
            if len(self._signatures) > _KEPT:
                self._signatures.pop(next(iter(self._signatures)), None)
        return found

    def _tag(self, tag: str) -> str:
        return MARK + tag if tag in self._tags else tag

    def _marked(self, tokens: Sequence[int]) -> str:
        """Text in which a mark stands before each token of the vocabulary's own."""
        parts: list[str] = []
        run: list[int] = []
        for token in (*tokens, None):
            if token is not None and token not in self._own:
                run.append(token)
                continue
            if run:
                parts.append(str(self._tokenizer.decode(run)).replace(MARK, "\ufffd"))
                run = []
            if token is not None:
                parts.append(MARK + self._own[token])
        return "".join(parts)

    def _plain(self, text: str) -> str:
        """Marked text as it is read, special tokens left out."""
        for id in self._special:
            if id in self._own:
                text = text.replace(MARK + self._own[id], "")
        return text.replace(MARK, "")

    def _split(self, text: str, opening: str) -> tuple[str, str]:
        """Reasoning of a reply, and what follows it."""
        for begin, end in _REASONING:
            head, tag, name = begin.partition(">")
            start, stop = self._tag(head + tag) + name, self._tag(end)
            before, closed, after = text.rpartition(stop)
            if closed:
                return before.replace(start, "", 1), after.lstrip("\n")
            content, opened, thought = text.partition(start)
            if opened:
                return thought, content
            if opening.rstrip().endswith(begin.strip()):
                return text, ""
        return "", text

    def _template_form(self, tokens: Sequence[int], tools: Sequence[ToolSchema], opening: str) -> Written | None:
        """Parts of a reply by the tokenizer's own response template; None if that cannot read it."""
        text = str(self._tokenizer.decode(list(tokens), skip_special_tokens=False))
        try:
            message = self._tokenizer.parse_response(text, prefix=opening, tools=[dict(tool) for tool in tools])
            calls: list[WrittenCall | str] = []
            for call in message.get("tool_calls") or ():
                calls += calls_of(call.get("function", call) if isinstance(call, dict) else call, ("arguments",))
            reasoning = message.get("reasoning_content") or message.get("thinking") or message.get("reasoning") or ""
            return Written(str(message.get("content") or ""), calls, str(reasoning))
        except Exception:  # whatever a template's patterns and parsers make of a policy's text
            return None


def _checked(call: WrittenCall | str, signatures: Signatures) -> ToolCall | MalformedCall:
    if isinstance(call, str):
        return MalformedCall("structure", call.replace(MARK, "").replace(_SHOWN_MARK, ""))
    try:
        return signatures.check(WrittenCall(*mapped(call, lambda text: text.replace(MARK, ""))))
    except (RecursionError, ArithmeticError):
        return MalformedCall("structure", "a call's values lie too deep in each other, or are too large")

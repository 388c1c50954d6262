"""Tree of an episode's calls, with the tokens of every prompt and response, so that no token is encoded twice."""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import Literal

from jaxrlhf.batch import Image, SeenPrompt
from jaxrlhf.conversations import ChatFormat, TokenSequence
from jaxrlhf.conversations.images import shifted, shown
from jaxrlhf.data.images import MARK
from jaxrlhf.episode import Message, Reply, ToolSchema

Fork = Literal["template", "edited", "retokenised"]
"""Cause of a sequence that looks like a continuation of a call but is not: the template renders earlier messages in
another way, earlier messages (or the tools) were changed, or the same text was sent as other tokens."""


@dataclass(eq=False)
class RecordedCall:
    """Sampled choice of an episode.

    Attributes:
      before: Earlier call that this call continues; None for the first call of a sequence.
      prompt: Token ids of the whole prompt, including the tokens of earlier calls.
      told: Messages of the request and the reply, in the form for comparison (`_words`); empty for a text completion.
      tools: Tools of the request, in the form for comparison.
      reply: Parsed reply; None for a text completion.
      after: Later calls that continue this call.
    """

    before: "RecordedCall | None"
    prompt: tuple[int, ...]
    told: tuple[str, ...]
    tools: str
    reply: Reply | None
    tokens: tuple[int, ...]
    logps: tuple[float, ...]
    version: int
    reasoning: tuple[str | None, ...] = ()
    ids: Mapping[str, str] = field(default_factory=dict)
    images: tuple[Image, ...] = ()
    reward: float | None = None
    after: list["RecordedCall"] = field(default_factory=list)

    @property
    def stream(self) -> tuple[int, ...]:
        """Token ids of prompt and response."""
        return self.prompt + self.tokens

    def path(self) -> list["RecordedCall"]:
        """Return the calls from the first call of the sequence to this call."""
        calls: list[RecordedCall] = []
        call: RecordedCall | None = self
        while call is not None:
            calls.append(call)
            call = call.before
        return calls[::-1]


@dataclass(frozen=True)
class Prompt:
    """Tokens of a request, and the call that they continue.

    Attributes:
      before: Call that the tokens continue; None if the prompt starts a sequence.
      fork: Cause why the prompt continues no call although it looks like a continuation; None otherwise.
    """

    tokens: tuple[int, ...]
    before: RecordedCall | None
    told: tuple[str, ...] = ()
    tools: str = ""
    reasoning: tuple[str | None, ...] = ()
    images: tuple[Image, ...] = ()
    fork: Fork | None = None

    @property
    def seen(self) -> tuple[int, ...]:
        """Prompt as a cache key: differs from prompts with other images."""
        return SeenPrompt.of(self.tokens, self.images)


class CallTree:
    """Tree of an episode's calls.

    A request that repeats all messages of a call and adds new messages continues the call: its prompt is the call's
    tokens, unchanged, and the template's delta. Reasoning that a client leaves out, as OpenAI's clients do, is no
    change.

    Args:
      history: `as_templated` starts a new sequence if the template would render earlier messages in another way.

    Attributes:
      calls: All calls, in the order in which they ended.
      forks: Number of sequences that look like a continuation of a call but are not, by cause.
      at_once: Whether a call was requested before another call was answered.
    """

    def __init__(self, form: ChatFormat, *, history: Literal["as_sampled", "as_templated"] = "as_sampled") -> None:
        self._form, self._history = form, history
        self.calls: list[RecordedCall] = []
        self.forks: Counter[Fork] = Counter()
        self.at_once = False

    def chat(self, messages: Sequence[Message], tools: Sequence[ToolSchema], images: Sequence[Image] = ()) -> Prompt:
        """Return the prompt of a chat request.

        Args:
          images: References to the images of the chat; each image has a `MARK` in a message.

        Raises:
          EnvironmentFailure: The chat template refuses the messages.
          Refusal: A text contains image placeholders.
        """
        own = _shared_out(messages, images)
        told = tuple(_words(message, some) for message, some in zip(messages, own, strict=True))
        reasoning = tuple(message.get("reasoning_content") for message in messages)
        tools_key = json.dumps([dict(tool) for tool in tools], sort_keys=True)
        found = self._call_before(told, tools_key, reasoning)
        rest = [] if found is None else list(messages[len(found.told) :])
        fork: Fork | None = None
        if found is not None and rest and all(message.get("role") != "assistant" for message in rest):
            reply, ended_by = found.reply, found.tokens[-1]
            assert reply is not None, "a call of a chat has a reply"
            reasoned = any(call.reply is not None and call.reply.reasoned for call in found.path())
            if self._history == "as_sampled" or self._form.keeps(rest, reasoning=reasoned):
                named = [_named(message, found.ids) for message in rest]
                write = partial(self._form.delta, named, tools, ended_by=ended_by if reply.ended else None)
                new = [image for some in own[len(found.told) :] for image in some]
                delta, placed = shown(new, self._form.reader, write, place="messages")
                seen = found.images + shifted(placed, len(found.stream))
                return Prompt(found.stream + delta, found, told, tools_key, reasoning, seen)
            fork = "template"
        elif self._edits(told):
            fork = "edited"
        tokens, placed = shown(images, self._form.reader, partial(self._form.prompt, messages, tools), place="messages")
        return Prompt(tokens, None, told, tools_key, reasoning, placed, fork)

    def plain(self, tokens: tuple[int, ...], text: str | None) -> Prompt:
        """Return the prompt of a text completion; the prompt continues a call if it starts with all the call's tokens.

        Args:
          text: Text of the request; None if the request had token ids.
        """
        begins = [
            call for call in self.calls if tokens[: len(call.stream)] == call.stream and len(tokens) > len(call.stream)
        ]
        if begins:
            before = max(begins, key=lambda call: len(call.stream))
            return Prompt(tokens, before, images=before.images)
        whole = self._text(tokens)  # including tokens that the tokenizer puts before a text
        for call in sorted(self.calls, key=lambda call: -len(call.stream)):
            said = self._text(call.stream)
            if len(whole) > len(said) and whole.startswith(said):
                if text is None:
                    return Prompt(tokens, None, fork="retokenised")
                # The text continues the call: keep the sampled tokens, and encode only the rest.
                rest = self._form.tokenizer.encode(whole[len(said) :], add_special_tokens=False)
                return Prompt((*call.stream, *rest), call, images=call.images)
        return Prompt(tokens, None)

    def _text(self, tokens: Sequence[int]) -> str:
        return str(self._form.tokenizer.decode(list(tokens), skip_special_tokens=False))

    def drew(
        self,
        prompt: Prompt,
        tokens: Sequence[int],
        logps: Sequence[float],
        version: int,
        *,
        reply: Reply | None = None,
        message: Message | None = None,
    ) -> RecordedCall:
        """Record a sampled choice.

        Args:
          message: Reply as it was sent to the client.
        """
        told, reasoning, ids = prompt.told, prompt.reasoning, {}
        if message is not None:
            told, reasoning = (*told, _words(message)), (*reasoning, message.get("reasoning_content"))
            ids = {call["id"]: call["function"]["name"] for call in message.get("tool_calls") or ()}
        drawn = reply, tuple(tokens), tuple(logps), version
        made = RecordedCall(prompt.before, prompt.tokens, told, prompt.tools, *drawn, reasoning, ids, prompt.images)
        self.calls.append(made)
        if prompt.fork is not None:
            self.forks[prompt.fork] += 1
        if prompt.before is not None:
            prompt.before.after.append(made)
        return made

    def sequences(self) -> tuple[tuple[TokenSequence, ...], tuple[tuple[RecordedCall, ...], ...]]:
        """Return a sequence for each call that no other call continues, and the calls of each sequence.

        Sequences are in the order in which these calls ended. If calls ran at the same time, sequences are sorted by
        their tokens, so that delays do not change the order. Tokens shared by several sequences are trained in the
        first of these sequences.
        """
        trained: set[RecordedCall] = set()
        made, paths = [], []
        ends = [call for call in self.calls if not call.after]
        for last in sorted(ends, key=_place) if self.at_once else ends:
            path = last.path()
            drawn = [
                (len(call.prompt), call.logps, turn, call.version)
                for turn, call in enumerate(path)
                if call not in trained
            ]
            trained.update(path)
            made.append(TokenSequence.of(last.stream, drawn, last.images))
            paths.append(tuple(path))
        return tuple(made), tuple(paths)

    def _call_before(self, told: tuple[str, ...], tools: str, reasoning: tuple[str | None, ...]) -> RecordedCall | None:
        """Return the call with the most messages that the request repeats in full; the first of equally long calls."""
        best: RecordedCall | None = None
        for call in self.calls:
            count = len(call.told)
            same = 0 < count <= len(told) and call.tools == tools and call.told == told[:count]
            same = same and all(given in (None, own) for given, own in zip(reasoning, call.reasoning, strict=False))
            if same and (best is None or count > len(best.told)):
                best = call
        return best

    def _edits(self, told: tuple[str, ...]) -> bool:
        """Return whether a chat contains a reply and starts with the same message as an earlier call."""
        if not any(json.loads(words)["role"] == "assistant" for words in told):
            return False
        return any(call.told[:1] == told[:1] for call in self.calls if call.told)


def _place(call: RecordedCall) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Return the sort key of a call: its tokens and images."""
    return call.stream, tuple(image.digest for image in call.images)


def _shared_out(messages: Sequence[Message], images: Sequence[Image]) -> list[list[Image]]:
    """Return the images of each message; a message has a `MARK` for each image."""
    left = iter(images)
    return [[*islice(left, str(message.get("content") or "").count(MARK))] for message in messages]


def _words(message: Message, images: Sequence[Image] = ()) -> str:
    """Return a message in the form for comparison: role, content, calls with parsed arguments, tool_call_id, images."""
    calls = []
    for call in message.get("tool_calls") or ():
        arguments = call["function"]["arguments"]
        arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
        calls.append([call.get("id"), call["function"]["name"], arguments])
    words = {"role": message.get("role"), "content": message.get("content") or "", "calls": calls}
    seen = {"images": [image.digest for image in images]} if images else {}
    return json.dumps({**words, **seen, "answers": message.get("tool_call_id")}, sort_keys=True)


def _named(message: Message, names: Mapping[str, str]) -> Message:
    """Add the name of the tool to a tool's answer, because some templates print the name."""
    name = names.get(str(message.get("tool_call_id")))
    names_it = message.get("role") == "tool" and name is not None and not message.get("name")
    return {**message, "name": name} if names_it else message

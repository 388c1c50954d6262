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
from jaxrlhf.conversations.images import shift_images, tokenize_with_images
from jaxrlhf.data.images import MARK
from jaxrlhf.engine import Completion
from jaxrlhf.episode import Message, Reply, ToolSchema

Fork = Literal["template", "edited", "retokenised"]
"""Cause of a sequence that looks like a continuation of a call but is not: the template renders earlier messages in
another way, earlier messages (or the tools) were changed, or the same text was sent as other tokens."""


@dataclass(frozen=True)
class Prompt:
    """Tokens of a request, and the call that they continue.

    Attributes:
      before: Call that the tokens continue; None if the prompt starts a sequence.
      messages: Messages of the request, in the form for comparison (`_canonical`); empty for a text completion.
      tools: Tools of the request, in the form for comparison.
      reasoning: Reasoning of each message.
      fork: Cause why the prompt continues no call although it looks like a continuation; None otherwise.
    """

    tokens: tuple[int, ...]
    before: "RecordedCall | None" = None
    messages: tuple[str, ...] = ()
    tools: str = ""
    reasoning: tuple[str | None, ...] = ()
    images: tuple[Image, ...] = ()
    fork: Fork | None = None

    @property
    def key(self) -> tuple[int, ...]:
        """Prompt as a cache key: differs from prompts with other images."""
        return SeenPrompt.of(self.tokens, self.images)


@dataclass(eq=False)
class RecordedCall:
    """Sampled choice of an episode.

    Attributes:
      tokens: Token ids of prompt and response.
      messages, reasoning: Messages and reasoning of the prompt and of the reply; empty for a text completion.
      reply: Parsed reply; None for a text completion.
      tool_names: Names of the called tools, by the id of the call.
      after: Later calls that continue this call.
    """

    prompt: Prompt
    tokens: tuple[int, ...]
    messages: tuple[str, ...]
    reasoning: tuple[str | None, ...]
    reply: Reply | None
    logps: tuple[float, ...]
    version: int
    tool_names: Mapping[str, str] = field(default_factory=dict)
    reward: float | None = None
    after: list["RecordedCall"] = field(default_factory=list)

    def path(self) -> list["RecordedCall"]:
        """Return the calls from the first call of the sequence to this call."""
        calls: list[RecordedCall] = []
        call: RecordedCall | None = self
        while call is not None:
            calls.append(call)
            call = call.prompt.before
        return calls[::-1]


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
      parallel: Whether a call was requested before another call was answered.
    """

    def __init__(self, form: ChatFormat, *, history: Literal["as_sampled", "as_templated"] = "as_sampled") -> None:
        self._form, self._history = form, history
        self.calls: list[RecordedCall] = []
        self.forks: Counter[Fork] = Counter()
        self.parallel = False

    def chat_prompt(
        self, messages: Sequence[Message], tools: Sequence[ToolSchema], images: Sequence[Image] = ()
    ) -> Prompt:
        """Return the prompt of a chat request.

        Args:
          images: References to the images of the chat; each image has a `MARK` in a message.

        Raises:
          EnvironmentFailure: The chat template refuses the messages.
          Refusal: A text contains image placeholders.
        """
        by_message = _images_by_message(messages, images)
        canonical = tuple(_canonical(message, own) for message, own in zip(messages, by_message, strict=True))
        reasoning = tuple(message.get("reasoning_content") for message in messages)
        tools_key = json.dumps([dict(tool) for tool in tools], sort_keys=True)
        found = self._continued_call(canonical, tools_key, reasoning)
        rest = [] if found is None else list(messages[len(found.messages) :])
        fork: Fork | None = None
        if found is not None and rest and all(message.get("role") != "assistant" for message in rest):
            assert found.reply is not None, "a call of a chat has a reply"
            reasoned = any(call.reply is not None and call.reply.reasoned for call in found.path())
            if self._history == "as_sampled" or self._form.keeps(rest, reasoning=reasoned):
                named = [_with_tool_name(message, found.tool_names) for message in rest]
                ended_by = found.tokens[-1] if found.reply.ended else None
                write = partial(self._form.delta, named, tools, ended_by=ended_by)
                new = [image for own in by_message[len(found.messages) :] for image in own]
                delta, placed = tokenize_with_images(new, self._form.reader, write, place="messages")
                placed = found.prompt.images + shift_images(placed, len(found.tokens))
                return Prompt(found.tokens + delta, found, canonical, tools_key, reasoning, placed)
            fork = "template"
        elif self._is_edited(canonical):
            fork = "edited"
        tokens, placed = tokenize_with_images(
            images, self._form.reader, partial(self._form.prompt, messages, tools), place="messages"
        )
        return Prompt(tokens, None, canonical, tools_key, reasoning, placed, fork)

    def completion_prompt(self, tokens: tuple[int, ...], text: str | None) -> Prompt:
        """Return the prompt of a text completion; the prompt continues a call if it starts with all the call's tokens.

        Args:
          text: Text of the request; None if the request had token ids.
        """
        longest_first = sorted(self.calls, key=lambda call: -len(call.tokens))
        for call in longest_first:
            if len(tokens) > len(call.tokens) and tokens[: len(call.tokens)] == call.tokens:
                return Prompt(tokens, call, images=call.prompt.images)
        whole = self._text(tokens)  # including tokens that the tokenizer puts before a text
        for call in longest_first:
            start = self._text(call.tokens)
            if len(whole) > len(start) and whole.startswith(start):
                if text is None:
                    return Prompt(tokens, fork="retokenised")
                # The text continues the call: keep the sampled tokens, and encode only the rest.
                rest = self._form.tokenizer.encode(whole[len(start) :], add_special_tokens=False)
                return Prompt((*call.tokens, *rest), call, images=call.prompt.images)
        return Prompt(tokens)

    def _text(self, tokens: Sequence[int]) -> str:
        return str(self._form.tokenizer.decode(list(tokens), skip_special_tokens=False))

    def record(
        self, prompt: Prompt, completion: Completion, *, reply: Reply | None = None, message: Message | None = None
    ) -> RecordedCall:
        """Record a sampled choice.

        Args:
          message: Reply as it was sent to the client.
        """
        messages, reasoning, names = prompt.messages, prompt.reasoning, {}
        if message is not None:
            messages, reasoning = (*messages, _canonical(message)), (*reasoning, message.get("reasoning_content"))
            names = {call["id"]: call["function"]["name"] for call in message.get("tool_calls") or ()}
        tokens, logps = prompt.tokens + tuple(completion.tokens), tuple(completion.logps)
        call = RecordedCall(prompt, tokens, messages, reasoning, reply, logps, completion.version, names)
        self.calls.append(call)
        if prompt.fork is not None:
            self.forks[prompt.fork] += 1
        if prompt.before is not None:
            prompt.before.after.append(call)
        return call

    def sequences(self) -> tuple[tuple[TokenSequence, ...], tuple[tuple[RecordedCall, ...], ...]]:
        """Return a sequence for each call that no other call continues, and the calls of each sequence.

        Sequences are in the order in which these calls ended. If calls ran at the same time, sequences are sorted by
        their tokens, so that delays do not change the order. Tokens shared by several sequences are trained in the
        first of these sequences.
        """
        trained: set[RecordedCall] = set()
        sequences, paths = [], []
        ends = [call for call in self.calls if not call.after]
        for last in sorted(ends, key=_sort_key) if self.parallel else ends:
            path = last.path()
            sampled = [
                (len(call.prompt.tokens), call.logps, turn, call.version)
                for turn, call in enumerate(path)
                if call not in trained
            ]
            trained.update(path)
            sequences.append(TokenSequence.of(last.tokens, sampled, last.prompt.images))
            paths.append(tuple(path))
        return tuple(sequences), tuple(paths)

    def _continued_call(
        self, messages: tuple[str, ...], tools: str, reasoning: tuple[str | None, ...]
    ) -> RecordedCall | None:
        """Return the call with the most messages that the request repeats in full; the first of equally long calls."""
        best: RecordedCall | None = None
        for call in self.calls:
            count = len(call.messages)
            same = 0 < count <= len(messages) and call.prompt.tools == tools and call.messages == messages[:count]
            same = same and all(given in (None, own) for given, own in zip(reasoning, call.reasoning, strict=False))
            if same and (best is None or count > len(best.messages)):
                best = call
        return best

    def _is_edited(self, messages: tuple[str, ...]) -> bool:
        """Return whether a chat contains a reply and starts with the same message as an earlier call."""
        if not any(json.loads(message)["role"] == "assistant" for message in messages):
            return False
        return any(call.messages[:1] == messages[:1] for call in self.calls if call.messages)


def _sort_key(call: RecordedCall) -> tuple[tuple[int, ...], tuple[str, ...]]:
    return call.tokens, tuple(image.digest for image in call.prompt.images)


def _images_by_message(messages: Sequence[Message], images: Sequence[Image]) -> list[list[Image]]:
    """Return the images of each message; a message has a `MARK` for each image."""
    left = iter(images)
    return [[*islice(left, str(message.get("content") or "").count(MARK))] for message in messages]


def _canonical(message: Message, images: Sequence[Image] = ()) -> str:
    """Return a message in the form for comparison: role, content, calls with parsed arguments, tool_call_id, images."""
    calls = []
    for call in message.get("tool_calls") or ():
        arguments = call["function"]["arguments"]
        arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
        calls.append([call.get("id"), call["function"]["name"], arguments])
    fields = {"role": message.get("role"), "content": message.get("content") or "", "calls": calls}
    digests = [image.digest for image in images]
    return json.dumps({**fields, "images": digests, "answers": message.get("tool_call_id")}, sort_keys=True)


def _with_tool_name(message: Message, names: Mapping[str, str]) -> Message:
    """Add the name of the tool to a tool's answer, because some templates print the name."""
    name = names.get(str(message.get("tool_call_id")))
    lacks_name = message.get("role") == "tool" and name is not None and not message.get("name")
    return {**message, "name": name} if lacks_name else message

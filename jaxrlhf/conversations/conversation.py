"""Tokens of an episode: sampled replies, and the tokens inserted between replies."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Literal

from jaxrlhf.batch import Image, SeenPrompt
from jaxrlhf.conversations.chat_format import ChatFormat
from jaxrlhf.conversations.cutting import cut_to
from jaxrlhf.conversations.images import (
    SeenTokens,
    escape_marks,
    mark_images,
    retokenize_with_images,
    shift_images,
    tokenize_marked,
)
from jaxrlhf.episode import Message, Reply, ToolSchema

SampledRun = tuple[int, Sequence[float], int, int]
"""Run of sampled tokens: index of its first token, log-probabilities, number of the turn, version of the weights."""


@dataclass(frozen=True)
class TokenSequence:
    """Training row of an episode; all fields except `images` have one entry per token.

    Attributes:
      mask: 1 on tokens that the policy sampled and that no earlier sequence of the episode trains.
      logps: Log-probabilities by the engine where the mask is 1, else 0.
      turn: Number of the reply, from 0, where the mask is 1; else -1.
      version: Version of the weights that sampled the token where the mask is 1; else -1.
      images: Images in the row, in order.
    """

    tokens: tuple[int, ...]
    mask: tuple[int, ...]
    logps: tuple[float, ...]
    turn: tuple[int, ...]
    version: tuple[int, ...]
    images: tuple[Image, ...] = ()

    @classmethod
    def of(cls, tokens: Sequence[int], sampled: Iterable[SampledRun], images: tuple[Image, ...]) -> "TokenSequence":
        """Build a row in which the sampled runs are trained."""
        count = len(tokens)
        mask, logps, turns, versions = [0] * count, [0.0] * count, [-1] * count, [-1] * count
        for start, run_logps, turn, version in sampled:
            length = len(run_logps)
            run = slice(start, start + length)
            mask[run], logps[run] = [1] * length, run_logps
            turns[run], versions[run] = [turn] * length, [version] * length
        return cls(tuple(tokens), tuple(mask), tuple(logps), tuple(turns), tuple(versions), images)


@dataclass
class _Stream:
    """Sequence of tokens that grows during an episode."""

    tokens: list[int]
    images: tuple[Image, ...] = ()
    sampled: list[SampledRun] = field(default_factory=list)

    def grow(self, tokens: tuple[int, ...], images: tuple[Image, ...]) -> None:
        """Append tokens, and the images among them."""
        self.images += shift_images(images, len(self.tokens))
        self.tokens += tokens


class Conversation:
    """Conversation of an episode.

    The policy's tokens stay as they were sampled. Each message is encoded once, when it arrives.

    Attributes:
      messages: All messages so far.
      replies: Replies of the policy.

    Args:
      history: `as_sampled` keeps every token; `as_templated` starts a further sequence when the template would render
        earlier messages differently.
      cut_turns: `close` ends a truncated reply with an end of turn that is not trained on; `end` ends the episode.
      prompt_tokens: Tokens of the messages, if they are already known.
      images: Images in `prompt_tokens`.

    Raises:
      EnvironmentFailure: The chat template rejects the messages, or an image is damaged.
    """

    def __init__(
        self,
        format: ChatFormat,
        messages: Sequence[Message],
        tools: Sequence[ToolSchema] = (),
        *,
        history: Literal["as_sampled", "as_templated"] = "as_sampled",
        cut_turns: Literal["end", "close"] = "end",
        prompt_tokens: Sequence[int] | None = None,
        images: tuple[Image, ...] = (),
    ) -> None:
        self.format, self.tools = format, tuple(tools)
        self.messages, sources = mark_images(messages)
        self.replies: list[Reply] = []
        self._history, self._cut_turns = history, cut_turns
        if prompt_tokens is None:
            write = partial(format.prompt, tools=self.tools)
            prompt_tokens, images = tokenize_marked(self.messages, sources, format.reader, write)
        if not sources:
            self.messages = escape_marks(self.messages)
        self._streams = [_Stream(list(prompt_tokens), images)]
        self._calls, self._reasoned = 0, False

    @property
    def prompt(self) -> tuple[int, ...]:
        """Token ids after which the engine samples the next reply."""
        return tuple(self._streams[-1].tokens)

    @property
    def images(self) -> tuple[Image, ...]:
        """Images of `prompt`."""
        return self._streams[-1].images

    def sampled(self, tokens: Sequence[int], logps: Sequence[float], version: int = 0, *, ended: bool = False) -> Reply:
        """Append a reply that the engine sampled after `prompt`, unchanged, and parse it.

        Args:
          logps: Log-probability of each token.
          version: Version of the weights that sampled the tokens.
          ended: True if a stop token or text ended the reply; without an end of turn it then still counts as complete.
        """
        if len(logps) != len(tokens):
            raise ValueError(f"{len(tokens)} tokens were sampled and {len(logps)} log-probabilities given")
        stream, turn = self._streams[-1], len(self.replies)
        opening = self.format.opening(stream.tokens)
        stream.sampled.append((len(stream.tokens), [*map(float, logps)], turn, version))
        ids = tuple(map(int, tokens))
        stream.tokens += ids
        reply = self.format.parse(ids, self.tools, opening=opening)
        numbered = tuple(
            replace(call, call_id=call.call_id or f"call{n:05d}") for n, call in enumerate(reply.calls, self._calls)
        )
        self._calls += len(numbered)
        reply = replace(reply, calls=numbered, ended=reply.ended or ended)
        self.replies.append(reply)
        self.messages += escape_marks([self.format.reply_message(reply)])
        self._reasoned |= reply.reasoned
        return reply

    def observe(self, messages: Sequence[Message], *, most_tokens: int | None = None) -> int:
        """Insert the messages after a reply, up to the opening of the next reply.

        Inserted tokens have mask 0. Texts with too many tokens are truncated, with a notice. Messages with images are
        not truncated.

        Args:
          most_tokens: Maximum tokens to insert; None is no limit.

        Returns:
          Number of inserted tokens. It is 0, and the conversation unchanged, if `most_tokens` is less than the
          template's own tokens or, with images, than all tokens.

        Raises:
          EnvironmentFailure: The chat template rejects the messages, or an image is damaged.
          ValueError: There is no reply before the messages, or a truncated reply must end the episode.
        """
        if not self.replies or self.messages[-1].get("role") != "assistant":
            raise ValueError("messages can only be observed after a reply")
        reply = self.replies[-1]
        if not reply.ended and self._cut_turns == "end":
            raise ValueError('the last reply was truncated, which ends the episode under cut_turns="end"')
        last = reply.tokens[-1:]
        ended_by = last[0] if last and last[0] in self.format.stop_tokens else None

        tokens_of = partial(self.format.delta, tools=self.tools, ended_by=ended_by)
        images: tuple[Image, ...] = ()
        new, sources = mark_images(self._with_call_ids(messages))
        if sources:
            inserted, images = tokenize_marked(new, sources, self.format.reader, tokens_of)
            inserted = inserted if most_tokens is None or len(inserted) <= most_tokens else ()
        else:
            new, inserted = cut_to(new, tokens_of, self.format.tokenizer, most_tokens)
        if not inserted:
            return 0
        self.messages += new if sources else escape_marks(new)
        if self._history == "as_templated" and not self.format.keeps(new, reasoning=self._reasoned):
            write = partial(self.format.prompt, self.messages, self.tools)
            self._follow(retokenize_with_images((*self.images, *images), self.format.reader, write))
        else:
            self._streams[-1].grow(inserted, images)
        return len(inserted)

    def sequences(self) -> tuple[TokenSequence, ...]:
        """Return the training rows of the episode; every sampled token has mask 1 in one row."""
        return tuple(TokenSequence.of(stream.tokens, stream.sampled, stream.images) for stream in self._streams)

    def _follow(self, templated: SeenTokens) -> None:
        """Continue with the template's tokens of the whole conversation.

        The last sequence is extended if it is a prefix of these tokens. Otherwise a further sequence starts. Images are
        compared by their pixels. A sampled token is trained in the sequence in which it was sampled, so the beginning
        of a further sequence is not trained.
        """
        stream, prompt = self._streams[-1], SeenPrompt.of(self.prompt, self.images)
        if SeenPrompt.of(*templated)[: len(prompt)] == prompt:
            stream.tokens, stream.images = list(templated.tokens), templated.images
        else:
            self._streams.append(_Stream(list(templated.tokens), templated.images))
            self._reasoned = False

    def _with_call_ids(self, messages: Sequence[Message]) -> list[Message]:
        """Add the name and id of its call to each tool's answer; answers without an id are in the order of calls."""
        calls = list(self.replies[-1].calls)
        by_id = {call.call_id: call for call in calls}
        found: list[Message] = []
        for message in messages:
            if message.get("role") != "tool":
                found.append(message)
                continue
            call = by_id.get(str(message.get("tool_call_id"))) or (calls[0] if calls else None)
            if call in calls:
                calls.remove(call)
            name, call_id = (call.name, call.call_id) if call else ("tool", "call00000")
            given = {"name": message.get("name") or name, "tool_call_id": message.get("tool_call_id") or call_id}
            found.append({**message, **given})
        return found

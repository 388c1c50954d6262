"""Tokens of an episode: as they were sampled, and as they were inserted between replies."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Literal

from jaxrlhf.batch import Image, SeenPrompt
from jaxrlhf.conversations.chat_format import ChatFormat
from jaxrlhf.conversations.cutting import cut_to
from jaxrlhf.conversations.images import SeenTokens, behind, marked, shown_again, spelled, written
from jaxrlhf.episode import Message, Reply, ToolSchema

DrawnRun = tuple[int, Sequence[float], int, int]
"""Place of the first of tokens that were drawn together, their log-probabilities, their turn, and their version."""


@dataclass(frozen=True)
class TokenSequence:
    """Row of training, of an episode: all fields have one entry a token.

    Attributes:
      mask: 1 on tokens that the policy drew and that no earlier sequence of the episode trains.
      logps: The engine's log-probabilities where the mask is 1, else 0.
      turn: Number of the reply where the mask is 1, from 0; else -1.
      version: Version of the weights that drew the token where the mask is 1, else -1.
      images: Images that it shows, in their order; they have no entries for tokens.
    """

    tokens: tuple[int, ...]
    mask: tuple[int, ...]
    logps: tuple[float, ...]
    turn: tuple[int, ...]
    version: tuple[int, ...]
    images: tuple[Image, ...] = ()

    @classmethod
    def of(cls, tokens: Sequence[int], drawn: Iterable[DrawnRun], images: tuple[Image, ...]) -> "TokenSequence":
        """Tokens of which some runs were drawn, and are trained."""
        count = len(tokens)
        mask, logps, turns, versions = [0] * count, [0.0] * count, [-1] * count, [-1] * count
        for start, own, turn, version in drawn:
            run = slice(start, start + len(own))
            mask[run], logps[run] = [1] * len(own), own
            turns[run], versions[run] = [turn] * len(own), [version] * len(own)
        return cls(tuple(tokens), tuple(mask), tuple(logps), tuple(turns), tuple(versions), images)


@dataclass
class _Stream:
    """A sequence that grows."""

    tokens: list[int]
    images: tuple[Image, ...] = ()
    drawn: list[DrawnRun] = field(default_factory=list)

    def grow(self, tokens: tuple[int, ...], images: tuple[Image, ...]) -> None:
        """Tokens, and the images among them, go behind all others."""
        self.images += behind(images, len(self.tokens))
        self.tokens += tokens


class Conversation:
    """Conversation of an episode.

    The policy's tokens stay as it drew them. A message is encoded once, when it comes.

    Attributes:
      messages: All that was said so far.
      replies: The policy's turns.

    Args:
      history: `as_sampled` keeps every token; `as_templated` begins a further sequence where the template would write
        what was said in another way.
      cut_turns: `close` ends a reply that was cut with an end of turn that is not trained on.
      prompt_tokens: The messages' tokens where they are known already.
      images: Images among those.

    Raises:
      EnvironmentFailure: The chat template refuses the messages, or an image is damaged.
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
        self.messages, sources = marked(messages)
        self.replies: list[Reply] = []
        self._history, self._cut_turns = history, cut_turns
        if prompt_tokens is None:
            write = partial(format.prompt, tools=self.tools)
            prompt_tokens, images = written(self.messages, sources, format.reader, write)
        if not sources:
            self.messages = spelled(self.messages)
        self._streams = [_Stream(list(prompt_tokens), images)]
        self._calls, self._reasoned = 0, False

    @property
    def prompt(self) -> tuple[int, ...]:
        """Token ids that the engine is given for the next reply."""
        return tuple(self._streams[-1].tokens)

    @property
    def images(self) -> tuple[Image, ...]:
        """Images of `prompt`."""
        return self._streams[-1].images

    def sampled(self, tokens: Sequence[int], logps: Sequence[float], version: int = 0, *, ended: bool = False) -> Reply:
        """Record what the engine drew after `prompt`, as it is.

        Args:
          logps: Log-probability of each token.
          version: Version of the weights that drew them.
          ended: A stop token or text ended the reply, which was not cut even where it has no end of turn.
        """
        if len(logps) != len(tokens):
            raise ValueError(f"{len(tokens)} tokens were drawn and {len(logps)} log-probabilities given")
        stream, turn = self._streams[-1], len(self.replies)
        opening = self.format.opening(stream.tokens)
        stream.drawn.append((len(stream.tokens), [*map(float, logps)], turn, version))
        drawn = tuple(map(int, tokens))
        stream.tokens += drawn
        reply = self.format.parse(drawn, self.tools, opening=opening)
        numbered = tuple(
            replace(call, call_id=call.call_id or f"call{n:05d}") for n, call in enumerate(reply.calls, self._calls)
        )
        self._calls += len(numbered)
        reply = replace(reply, calls=numbered, ended=reply.ended or ended)
        self.replies.append(reply)
        self.messages += spelled([self.format.said(reply)])
        self._reasoned |= reply.reasoned
        return reply

    def observe(self, messages: Sequence[Message], *, most_tokens: int | None = None) -> int:
        """Insert what is said after a reply, up to the opening of the next one.

        Inserted tokens have mask 0. Texts of too many tokens are cut, and say so; beside images nothing is.

        Args:
          most_tokens: Tokens to insert, at most; None is no limit.

        Returns:
          Tokens inserted; 0 if `most_tokens` is too few for the template's own, or for all beside images, and the
          conversation is as before.

        Raises:
          EnvironmentFailure: The chat template refuses the messages, or an image is damaged.
          ValueError: Nothing was said before them, or a reply that was cut must end the episode.
        """
        if not self.replies or self.messages[-1].get("role") != "assistant":
            raise ValueError("messages can be observed after a reply alone")
        reply = self.replies[-1]
        if not reply.ended and self._cut_turns == "end":
            raise ValueError('the last reply was cut, which ends an episode of cut_turns="end"')
        last = reply.tokens[-1:]
        ended_by = last[0] if last and last[0] in self.format.stop_tokens else None

        tokens_of = partial(self.format.delta, tools=self.tools, ended_by=ended_by)
        images: tuple[Image, ...] = ()
        told, sources = marked(self._addressed(messages))
        if sources:
            inserted, images = written(told, sources, self.format.reader, tokens_of)
            inserted = inserted if most_tokens is None or len(inserted) <= most_tokens else ()
        else:
            told, inserted = cut_to(told, tokens_of, self.format.tokenizer, most_tokens)
        if not inserted:
            return 0
        self.messages += told if sources else spelled(told)
        if self._history == "as_templated" and not self.format.keeps(told, reasoning=self._reasoned):
            write = partial(self.format.prompt, self.messages, self.tools)
            self._follow(shown_again((*self.images, *images), self.format.reader, write))
        else:
            self._streams[-1].grow(inserted, images)
        return len(inserted)

    def sequences(self) -> tuple[TokenSequence, ...]:
        """The episode's rows; every drawn token has mask 1 in one of them."""
        return tuple(TokenSequence.of(stream.tokens, stream.drawn, stream.images) for stream in self._streams)

    def _follow(self, templated: SeenTokens) -> None:
        """Go on with the template's tokens of all that was said, in a further sequence unless the last one leads there.

        An image is written again where its message stands, and leads where the last one does by its pixels.

        What the policy drew is trained where it was drawn, so none of a further sequence's beginning is.
        """
        stream, begun = self._streams[-1], SeenPrompt.of(self.prompt, self.images)
        if SeenPrompt.of(*templated)[: len(begun)] == begun:
            stream.tokens, stream.images = list(templated.tokens), templated.images
        else:
            self._streams.append(_Stream(list(templated.tokens), templated.images))
            self._reasoned = False

    def _addressed(self, messages: Sequence[Message]) -> list[Message]:
        """The messages, a tool's answers with the call's name and id, in the order of calls where they have none."""
        calls = list(self.replies[-1].calls)
        by_id = {call.call_id: call for call in calls}
        addressed: list[Message] = []
        for message in messages:
            if message.get("role") != "tool":
                addressed.append(message)
                continue
            call = by_id.get(str(message.get("tool_call_id"))) or (calls[0] if calls else None)
            if call in calls:
                calls.remove(call)
            name, call_id = (call.name, call.call_id) if call else ("tool", "call00000")
            given = {"name": message.get("name") or name, "tool_call_id": message.get("tool_call_id") or call_id}
            addressed.append({**message, **given})
        return addressed

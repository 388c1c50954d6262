"""Tokenization of the problems of a split: prompts in the chat template, solutions, and token limits."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from pathlib import Path
from typing import Any, NamedTuple, Protocol, cast, runtime_checkable

from transformers import PreTrainedTokenizerBase

from jaxrlhf.batch import Image
from jaxrlhf.config import Refusal
from jaxrlhf.config.refusal import reason_of
from jaxrlhf.data.arithmetic import Split
from jaxrlhf.data.chats.messages import tool_schemas
from jaxrlhf.data.chats.rendered import RenderedChats
from jaxrlhf.data.chats.shown import ShownMessages
from jaxrlhf.data.control_tokens import ControlTokens
from jaxrlhf.data.image_prompts import expanded, in_parts, referred, shown
from jaxrlhf.data.images import ImageReader, placed
from jaxrlhf.data.records import Messages, SourceRecord, restored, texts_of
from jaxrlhf.data.table.problem_table import ProblemTable
from jaxrlhf.data.tokenizer import TEMPLATE_ERRORS


@runtime_checkable
class EpisodeReader(Protocol):
    """Protocol for reading the records that episodes start from."""

    def tools(self, record: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
        """Return the schemas of the tools that the policy is shown with a record's prompt."""

    def demonstrated(
        self, prompt: Messages, solution: Messages, tools: Sequence[Mapping[str, Any]]
    ) -> tuple[Sequence[int], Sequence[bool]]:
        """Return the token ids of a solution of several turns, as they follow the prompt, and the mask to imitate."""


def with_system_prompt(example: SourceRecord, system_prompt: str | None, fields: Mapping[str, Any]) -> SourceRecord:
    """Return the record with some fields set, and with a system message before its prompt if the prompt has none."""
    if fields:
        example = example._replace(record={**restored(example.record), **fields})
    messages = _chat(example.prompt)
    if system_prompt is None or messages[0].get("role") == "system":
        return example
    return example._replace(prompt=[{"role": "system", "content": system_prompt}, *messages])


class TokenLimits(NamedTuple):
    """Maximum tokens of a prompt and of an answer; None is no limit."""

    prompt: int
    answer: int | None

    def allow(self, lengths: "RecordLengths") -> bool:
        return lengths.prompt <= self.prompt and (self.answer is None or lengths.answer <= self.answer)


class RecordLengths(NamedTuple):
    """Number of tokens of a record's prompt and of its longest answer; a lower bound for a text that was truncated."""

    prompt: int
    answer: int


@dataclass
class LengthRange:
    """Number of records so far, and the range of their prompt and answer lengths in tokens.

    Attributes:
      shortest, longest: Minimum and maximum, each of prompts and answers separately; None without records.
    """

    records: int = 0
    shortest: RecordLengths | None = None
    longest: RecordLengths | None = None

    def add(self, lengths: RecordLengths) -> None:
        """Count another record."""
        least, most = self.shortest or lengths, self.longest or lengths
        self.shortest = RecordLengths(min(least.prompt, lengths.prompt), min(least.answer, lengths.answer))
        self.longest = RecordLengths(max(most.prompt, lengths.prompt), max(most.answer, lengths.answer))
        self.records += 1


class Tokenized:
    """Tokenized problems of a split: a table of the problems within the limits, and statistics of all records.

    Args:
      folder: New folder in which the problems are kept; None keeps them in memory.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        limits: TokenLimits,
        *,
        reader: ImageReader | None,
        episodes: EpisodeReader | None,
        folder: Path | None = None,
    ) -> None:
        if tokenizer.chat_template is None and tokenizer.encode("a")[-1] == tokenizer.eos_token_id:
            raise Refusal(
                "the tokenizer ends each text with its end-of-sequence token, prompts too, behind which no response "
                'begins; set "add_eos_token" to false in its tokenizer_config.json, or mend the "post_processor" of '
                "its tokenizer.json"
            )
        self._reader, self._episodes = reader, episodes
        self.table = ProblemTable(folder)
        self.lengths = LengthRange()
        self.spelled: list[str] = []
        self._tokenizer, self.limits, self._as_text = tokenizer, limits, False
        self._control = ControlTokens(tokenizer)
        self._chats = RenderedChats(tokenizer, self._control)
        self._shown_messages = ShownMessages(tokenizer)
        self._token_letters = max(map(len, tokenizer.get_vocab()))

    def begin(self, source: str, *, as_text: bool) -> None:
        """Start a source; the following records belong to it.

        Args:
          as_text: True encodes control tokens that the records' texts spell out as text.
        """
        self.table.begin(source)
        self._as_text = as_text

    def add(self, examples: Sequence[SourceRecord]) -> None:
        """Tokenize some records, each kind of text in one call of the tokenizer."""
        spells = [self._spells(example) for example in examples]
        prompts = self._rendered(examples, spells)
        for example, prompt in zip(examples, prompts, strict=True):
            _check_encodes(example, prompt)
            if self._tokenizer.chat_template is not None:
                # Of an environment's tools, `EpisodePrompts` checks that the template supports them.
                tools = self._tools(example) or () if self._episodes is None else ()
                text = self._control.unmarked(prompt)
                self._shown_messages.check(_chat(example.prompt), tools, text, example.place)
        images = [referred(example.images, self._reader, place=example.place) for example in examples]
        for_people = [*prompts]
        for n, (example, own) in enumerate(zip(examples, images, strict=True)):
            for_people[n] = expanded(prompts[n], own, self._reader, place=example.place, named=True)
            prompts[n] = expanded(prompts[n], own, self._reader, place=example.place)
        prompt_ids = self._encode(prompts, self.limits.prompt, prompt=True)
        for n, spelled in enumerate(spells):
            if spelled and self._as_text and self._tokenizer.chat_template is not None:
                prompt_ids[n] = self._control.encode(prompts[n], place=examples[n].place)
                for_people[n] = self._control.unmarked(for_people[n])
        solutions = [one.solution if isinstance(one.solution, str) else None for one in examples]
        solution_ids = self._answers(solutions, examples)
        rejected = [one.pair.rejected if one.pair and isinstance(one.pair.rejected, str) else None for one in examples]
        rejected_ids = self._answers(rejected, examples)
        steps = self._encoded_steps(examples)
        several = [(text, one) for one in examples for text in one.further]
        further: Iterator[Any] = iter(self._answers([text for text, _ in several], [one for _, one in several]))
        for n, example in enumerate(examples):
            if not prompt_ids[n]:
                raise Refusal(
                    f"{example.place}: the tokenizer makes no tokens of the prompt {prompts[n]!r:.80}; leave it out"
                )
            others = [next(further) or [] for _ in example.further]  # each with its end of turn
            answers = solution_ids[n], rejected_ids[n], steps[n], others
            self._add(example, for_people[n], prompt_ids[n] or [], *answers, images[n])

    def _add(
        self,
        example: SourceRecord,
        prompt: str,
        prompt_ids: list[int],
        solution_ids: list[int] | None,
        rejected_ids: list[int] | None,
        steps: list[list[int]],
        others: list[list[int]],
        images: tuple[Image, ...],
    ) -> None:
        number = self.lengths.records
        solution, rejected = (tuple(ids or ()) for ids in (solution_ids, rejected_ids))
        mask: Sequence[bool] = ()
        if isinstance(example.solution, list):
            solution, mask = self._demonstrated(example)
        if example.pair is not None and isinstance(example.pair.rejected, list):
            rejected, _ = self._written(example, example.pair.rejected)
        if example.steps is not None:
            solution = tuple(chain.from_iterable(steps))
        lengths = RecordLengths(len(prompt_ids), max(map(len, (solution, rejected, *others))))
        self.lengths.add(lengths)
        if not self.limits.allow(lengths):
            return
        if self._reader is not None:
            images = placed(prompt_ids, images, self._reader.placeholders.token, place=example.place)
        messages = _chat(example.prompt)
        parts = number, prompt, prompt_ids, example.answer, solution, example.record
        self.table.append(*parts, images=images, solution_mask=mask, messages=messages, further=others)
        if example.pair is not None:
            self.table.make_pair(rejected, example.pair.margin, example.pair.safe)
        if example.steps is not None:
            self.table.make_steps(accumulate(map(len, steps)), example.steps.labels)

    def _answers(self, texts: Sequence[str | None], examples: Sequence[SourceRecord]) -> list[list[int] | None]:
        """Return the token ids of text answers as the chat template renders them, including the end of the turn."""
        given = [n for n, text in enumerate(texts) if text is not None]
        marked = [
            self._as_text and self._tokenizer.chat_template is not None and self._control.first_in([texts[n] or ""])
            for n in given
        ]
        answers = [
            (self._control.mark(texts[n] or "", place=examples[n].place) if spells else texts[n] or "", examples[n])
            for n, spells in zip(given, marked, strict=True)
        ]
        written, last = [text for text, _ in answers], [cast(int, self._tokenizer.eos_token_id)]
        if self._tokenizer.chat_template is not None:
            written = [self._chats.answer(_chat(one.prompt), text, place=one.place)[0].text for text, one in answers]
            last = []
        ids = self._encode(written, self.limits.answer, prompt=self._tokenizer.chat_template is not None)
        found: list[list[int] | None] = [None] * len(texts)
        for n, text, own, spells in zip(given, written, ids, marked, strict=True):
            own = self._control.encode(text, place=examples[n].place) if spells else own
            found[n] = [*(own or []), *last]
        return found

    def _encoded_steps(self, examples: Sequence[SourceRecord]) -> list[list[list[int]]]:
        """Return the token ids of each record's steps, each followed by its separator; both are encoded separately."""
        records = [example.steps for example in examples]
        texts = [text for one in records if one for step in one.steps for text in (step, one.separator)]
        ids = (encoded or [] for encoded in self._encode(texts, self.limits.answer))
        return [[[*next(ids), *next(ids)] for _ in one.steps] if one else [] for one in records]

    def _demonstrated(self, example: SourceRecord) -> tuple[tuple[int, ...], Sequence[bool]]:
        """Return the tokens of a solution of messages, and a mask of the imitated tokens; an empty mask is all."""
        solution = cast(Messages, example.solution)
        if self._episodes is None or example.pair is not None:
            return self._written(example, solution)
        tools = self._episodes.tools(restored(example.record))
        try:
            ids, mask = self._episodes.demonstrated(_chat(example.prompt), solution, tools)
        except Refusal as refusal:
            raise Refusal(f"{example.place}: {refusal}") from refusal
        return tuple(ids), mask

    def _written(self, example: SourceRecord, answer: Messages) -> tuple[tuple[int, ...], Sequence[bool]]:
        """Return the tokens of an answer of messages in the chat template, and a mask of the imitated tokens."""
        if self._tokenizer.chat_template is None:
            raise Refusal(
                f"{example.place}: the answer is messages, and the tokenizer has no chat template; give a text"
            )
        if self._as_text and self._control.first_in(texts_of(answer)) is not None:
            raise Refusal(
                f"{example.place}: the answer is messages and spells out a control token, which cannot be kept as "
                'text there; leave the record out, or set data.control_tokens="parse"'
            )
        segments = self._chats.answer(_chat(example.prompt), answer, place=example.place)
        texts = [segment.text for segment in segments]
        _check_utf8("".join(texts), example.place)
        parts = [ids or [] for ids in self._encode(texts, None, prompt=True)]
        mask = [segment.imitated for segment, ids in zip(segments, parts, strict=True) for _ in ids]
        return tuple(chain.from_iterable(parts)), () if all(mask) else mask

    def _spells(self, example: SourceRecord) -> bool:
        """Return True if a text of the record spells a control token, and note its place for the report at start."""
        found = self._control.first_in([*texts_of(example.prompt), *example.answer_texts])
        if found is not None:
            self.spelled.append(f"{example.place}: {found}")
        return found is not None

    def _rendered(self, examples: Sequence[SourceRecord], spells: Sequence[bool]) -> list[str]:
        """Render prompts with the tokenizer's chat template, with marks in control tokens that shall stay text."""
        if self._tokenizer.chat_template is None:
            return [_plain_text(example) for example in map(self._shown, examples)]
        if "image" not in self._tokenizer.chat_template:
            examples = [*map(self._shown, examples)]
        marking = [
            self._marked(one) if spelled and self._as_text else one.prompt
            for one, spelled in zip(examples, spells, strict=True)
        ]
        chats = [_chat(prompt) for prompt in marking]
        if "image" in self._tokenizer.chat_template:
            chats = [in_parts(chat) if one.images else chat for one, chat in zip(examples, chats, strict=True)]
        tools = [self._tools(example) for example in examples]
        try:
            return self._chats.prompts(chats, tools)
        except TEMPLATE_ERRORS as error:
            if len(examples) > 1:  # render them one by one, to name the failing prompt
                return [self._rendered([one], [spelled])[0] for one, spelled in zip(examples, spells, strict=True)]
            place = examples[0].place
            raise Refusal(f"{place}: the tokenizer's chat template refuses this prompt: {reason_of(error)}") from error

    def _tools(self, example: SourceRecord) -> Sequence[Mapping[str, Any]] | None:
        """Return the schemas of the tools that the policy is shown with a prompt."""
        last = _chat(example.prompt)[-1]
        if last.get("role") == "assistant" and last.get("tool_calls"):
            raise Refusal(
                f"{example.place}: the prompt ends with calls of tools; add the messages of the tools that answer them"
            )
        if self._episodes is None:
            written = not isinstance(example.record, bytes) or b'"tools"' in example.record
            return tool_schemas(restored(example.record).get("tools")) if written else None
        if last.get("role") == "assistant":
            raise Refusal(
                f"{example.place}: the prompt ends with words of the assistant, and an episode opens the assistant's "
                "turn itself; end the prompt with a message of the user"
            )
        return self._episodes.tools(restored(example.record))

    def _shown(self, example: SourceRecord) -> SourceRecord:
        """Return the record with placeholders of its images in the prompt, for templates that know no images."""
        return example._replace(prompt=shown(example.prompt, self._reader)) if example.images else example

    def _marked(self, example: SourceRecord) -> str | Messages:
        def mark(text: str) -> str:
            return self._control.mark(text, place=example.place)

        if isinstance(example.prompt, str):
            return mark(example.prompt)
        return [{**message, "content": mark(message["content"])} for message in example.prompt]

    def _encode(self, texts: Sequence[str | None], most: int | None, *, prompt: bool = False) -> list[list[int] | None]:
        """Return the token ids of each text, None for None; a text over the limit `most` may be truncated above it."""
        given = [(n, text) for n, text in enumerate(texts) if text is not None]
        # Upper bound on the letters of a text that fits; the factor 4 is for tokenizers that drop letters like spaces.
        letters = None if most is None else 4 * self._token_letters * (most + 1)
        # A chat template writes its special tokens itself; plain text gets the tokenizer's.
        settings = {
            "add_special_tokens": prompt and self._tokenizer.chat_template is None,
            "split_special_tokens": self._as_text and not (prompt and self._tokenizer.chat_template is not None),
            "return_attention_mask": False,
            "return_token_type_ids": False,
        }
        found: list[list[int] | None] = [None] * len(texts)
        if not given:
            return found
        cut = self._tokenizer([text[:letters] for _, text in given], **settings)["input_ids"]
        for (n, text), ids in zip(given, cut, strict=True):
            whole = letters is None or len(text) <= letters or len(ids) > cast(int, most)
            found[n] = ids if whole else self._tokenizer(text, **settings)["input_ids"]
        return found


def _chat(prompt: str | Messages) -> Messages:
    """Return a prompt as messages; a text becomes a user message."""
    return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt


def _check_encodes(example: SourceRecord, prompt: str) -> None:
    _check_utf8("".join((prompt, example.answer or "", *example.answer_texts)), example.place)


def _check_utf8(text: str, place: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = error.object[error.start]
        raise Refusal(
            f"{place}: a text holds {half!r}, half of a surrogate pair, which cannot be encoded; write the "
            "whole character or leave it out"
        ) from error


def _plain_text(example: SourceRecord) -> str:
    if isinstance(example.prompt, str):
        return example.prompt
    raise Refusal(
        f"{example.place}: the prompt is chat messages and the tokenizer has no chat template; "
        'give prompts as text, or set "chat_template" in its tokenizer_config.json, or take a GGUF file that has a '
        "template"
    )


def nothing_fits(lengths: LengthRange, split: Split, limits: TokenLimits) -> str:
    least, most = lengths.shortest, lengths.longest
    assert least is not None and most is not None
    message = f"all {lengths.records} {split} problems are over the token limits: "
    message += f"rollout.max_prompt_tokens={limits.prompt}, prompts have {least.prompt} to {most.prompt}"
    if limits.answer is not None:
        message += (
            f"; rollout.max_response_tokens leaves {limits.answer} to a solution, "
            f"solutions have {least.answer} to {most.answer}"
        )
    return f"{message}; raise the limit until the longest fits, to keep all"

"""Tokenization of the problems of a split: prompts in the chat template, solutions, and token limits."""

import sys
from collections.abc import Mapping, Sequence
from functools import partial
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
from jaxrlhf.data.control_tokens import ControlTokens
from jaxrlhf.data.image_prompts import expanded, in_parts, referred
from jaxrlhf.data.images import MARK, ImageReader, placed
from jaxrlhf.data.records import Messages, SourceRecord, restored, texts_of, with_texts
from jaxrlhf.data.table.problem_table import ProblemTable
from jaxrlhf.data.tokenizer import TEMPLATE_ERRORS


@runtime_checkable
class EpisodeReader(Protocol):
    """Protocol for reading the records that episodes start from."""

    def tools(self, record: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
        """Return the schemas of the tools in the prompt of a record."""

    def demonstrated(
        self, solution: Messages, tools: Sequence[Mapping[str, Any]], *, place: str
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


class Tokenized:
    """Tokenized problems of a split.

    Attributes:
      table: Problems within the limits.
      records: Number of records.
      spelled: Place of each record that spells out a control token, with the token.

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
                "the tokenizer ends each text with its end-of-sequence token, prompts too, so no response can follow; "
                'set "add_eos_token" to false in its tokenizer_config.json, or change the "post_processor" of '
                "its tokenizer.json"
            )
        self._reader, self._episodes = reader, episodes
        self.table = ProblemTable(folder)
        self.records = 0
        self._shortest, self._longest = [sys.maxsize] * 2, [0, 0]  # tokens of prompts, and of longest answers
        self.spelled: list[str] = []
        self._tokenizer, self._limits, self._as_text = tokenizer, limits, False
        self._control = ControlTokens(tokenizer)
        self._chats = None if tokenizer.chat_template is None else RenderedChats(tokenizer, self._control)
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
        spelled = [self._spells(example) for example in examples]
        marked = [spells and self._as_text and self._chats is not None for spells in spelled]
        prompts = self._rendered(examples, marked)
        images: list[tuple[Image, ...]] = []
        for_people: list[str] = []
        for n, example in enumerate(examples):
            _check_utf8("".join((prompts[n], example.answer or "", *example.answer_texts)), example.place)
            if self._chats is not None:
                tools = self._tools(example) if self._episodes is None else ()  # `EpisodePrompts` checks other tools
                text = self._control.unmarked(prompts[n]) if marked[n] else prompts[n]
                self._chats.check_shown(_chat(example.prompt), tools, text, example.place)
            images.append(referred(example.images, self._reader, place=example.place))
            named = expanded(prompts[n], images[n], self._reader, place=example.place, named=True)
            for_people.append(self._control.unmarked(named) if marked[n] else named)
            prompts[n] = expanded(prompts[n], images[n], self._reader, place=example.place)
        if self._chats is None:
            prompt_ids = self._encode(prompts, self._limits.prompt, add_special=True)
        else:
            prompt_ids = self._encode_rendered(prompts, examples, marked, self._limits.prompt)
        answers = iter(self._answers([(text, example) for example in examples for text in example.text_answers]))
        steps = self._encoded_steps(examples)
        for n, example in enumerate(examples):
            if not prompt_ids[n]:
                raise Refusal(
                    f"{example.place}: the tokenizer makes no tokens of the prompt {prompts[n]!r:.80}; leave it out"
                )
            texts = [next(answers) for _ in example.text_answers]
            self._add(example, for_people[n], prompt_ids[n], texts, steps[n], images[n])

    def _add(
        self,
        example: SourceRecord,
        prompt: str,
        prompt_ids: list[int],
        answers: list[list[int]],
        steps: list[list[int]],
        images: tuple[Image, ...],
    ) -> None:
        """Add a record to the table if it is within the limits.

        Args:
          answers: Token ids of the `text_answers`.
        """
        number, self.records = self.records, self.records + 1
        solution: Sequence[int] = ()
        rejected: Sequence[int] = ()
        mask: Sequence[bool] = ()
        if isinstance(example.solution, list):
            solution, mask = self._demonstrated(example, example.solution)
        elif example.solution is not None:
            solution = answers.pop(0)
        if example.pair is not None:
            messages = example.pair.rejected
            rejected = self._segments(example, messages)[0] if isinstance(messages, list) else answers.pop(0)
        if example.steps is not None:
            solution = [*chain.from_iterable(steps)]
        lengths = len(prompt_ids), max(map(len, (solution, rejected, *answers)))
        self._shortest, self._longest = [*map(min, self._shortest, lengths)], [*map(max, self._longest, lengths)]
        if any(most is not None and length > most for length, most in zip(lengths, self._limits, strict=True)):
            return
        if self._reader is not None:
            images = placed(prompt_ids, images, self._reader.placeholders.token, place=example.place)
        self.table.append(
            number,
            prompt,
            prompt_ids,
            example.answer,
            solution,
            example.record,
            images=images,
            solution_mask=mask,
            messages=_chat(example.prompt),
            further=answers,
            pair=example.pair and (rejected, example.pair.margin, example.pair.safe),
            steps=example.steps and (accumulate(map(len, steps)), example.steps.labels),
        )

    def nothing_fits(self, split: Split) -> Refusal:
        """Return the error of a split without a record within the limits."""
        prompts, answers = (f"{least} to {most}" for least, most in zip(self._shortest, self._longest, strict=True))
        message = f"all {self.records} {split} problems are over the token limits: "
        message += f"rollout.max_prompt_tokens={self._limits.prompt}, prompts have {prompts}"
        if self._limits.answer is not None:
            message += f"; rollout.max_response_tokens leaves {self._limits.answer} to a solution, "
            message += f"solutions have {answers}"
        return Refusal(f"{message}; raise the limit until the longest fits, to keep all")

    def _answers(self, answers: Sequence[tuple[str, SourceRecord]]) -> list[list[int]]:
        """Return the token ids of text answers as the chat template renders them, including the end of the turn."""
        texts = [text for text, _ in answers]
        if self._chats is None:
            eos = cast(int, self._tokenizer.eos_token_id)
            return [[*ids, eos] for ids in self._encode(texts, self._limits.answer)]
        marked = [self._as_text and self._control.first_in([text]) is not None for text in texts]
        for n, (text, example) in enumerate(answers):
            text = self._control.mark(text, place=example.place) if marked[n] else text
            texts[n] = self._chats.answer(_chat(example.prompt), text, place=example.place)[0].text
        return self._encode_rendered(texts, [example for _, example in answers], marked, self._limits.answer)

    def _encoded_steps(self, examples: Sequence[SourceRecord]) -> list[list[list[int]]]:
        """Return the token ids of each record's steps, each followed by its separator; both are encoded separately."""
        records = [example.steps for example in examples]
        texts = [text for one in records if one for step in one.steps for text in (step, one.separator)]
        ids = iter(self._encode(texts, self._limits.answer))
        return [[[*next(ids), *next(ids)] for _ in one.steps] if one else [] for one in records]

    def _demonstrated(self, example: SourceRecord, solution: Messages) -> tuple[Sequence[int], Sequence[bool]]:
        """Return the tokens of a solution of messages, and a mask of the imitated tokens; an empty mask is all."""
        if self._episodes is None or example.pair is not None:
            return self._segments(example, solution)
        tools = self._episodes.tools(restored(example.record))
        return self._episodes.demonstrated(solution, tools, place=example.place)

    def _segments(self, example: SourceRecord, answer: Messages) -> tuple[Sequence[int], Sequence[bool]]:
        """Return the tokens of an answer of messages in the chat template, and a mask of the imitated tokens."""
        if self._chats is None:
            raise Refusal(
                f"{example.place}: the answer is messages, and the tokenizer has no chat template; give a text"
            )
        if self._as_text and self._control.first_in(texts_of(answer)) is not None:
            raise Refusal(
                f"{example.place}: the answer is messages and spells out a control token, which cannot be kept as "
                'text; leave the record out, or set data.control_tokens="parse"'
            )
        segments = self._chats.answer(_chat(example.prompt), answer, place=example.place)
        texts = [segment.text for segment in segments]
        _check_utf8("".join(texts), example.place)
        parts = self._encode(texts, None, rendered=True)
        mask = [segment.imitated for segment, ids in zip(segments, parts, strict=True) for _ in ids]
        return [*chain.from_iterable(parts)], () if all(mask) else mask

    def _spells(self, example: SourceRecord) -> bool:
        """Return True if a text of the record spells a control token, and note its place for the report at start."""
        found = self._control.first_in([*texts_of(example.prompt), *example.answer_texts])
        if found is not None:
            self.spelled.append(f"{example.place}: {found}")
        return found is not None

    def _rendered(self, examples: Sequence[SourceRecord], marked: Sequence[bool]) -> list[str]:
        """Render prompts with the tokenizer's chat template.

        Args:
          marked: True for prompts whose control tokens get marks, to stay text.
        """
        if self._chats is None:
            return [_plain_text(self._with_placeholders(example)) for example in examples]
        takes_images = "image" in (self._tokenizer.chat_template or "")
        if not takes_images:
            examples = [self._with_placeholders(example) for example in examples]
        prompts = [
            with_texts(one.prompt, partial(self._control.mark, place=one.place)) if marks else one.prompt
            for one, marks in zip(examples, marked, strict=True)
        ]
        chats = [
            in_parts(_chat(prompt)) if takes_images and one.images else _chat(prompt)
            for one, prompt in zip(examples, prompts, strict=True)
        ]
        tools = [self._tools(example) for example in examples]
        try:
            return self._chats.prompts(chats, tools)
        except TEMPLATE_ERRORS as error:
            if len(examples) > 1:  # render them one by one, to name the failing prompt
                return [self._rendered([one], [marks])[0] for one, marks in zip(examples, marked, strict=True)]
            place = examples[0].place
            raise Refusal(f"{place}: the tokenizer's chat template refuses this prompt: {reason_of(error)}") from error

    def _tools(self, example: SourceRecord) -> Sequence[Mapping[str, Any]]:
        """Return the schemas of the tools in the prompt of a record, and check that the prompt's end allows a reply."""
        last = _chat(example.prompt)[-1]
        if last.get("role") == "assistant" and last.get("tool_calls"):
            raise Refusal(f"{example.place}: the prompt ends with calls of tools; add tool messages with their answers")
        if self._episodes is None:
            written = not isinstance(example.record, bytes) or b'"tools"' in example.record
            return tool_schemas(restored(example.record).get("tools")) if written else ()
        if last.get("role") == "assistant":
            raise Refusal(
                f"{example.place}: the prompt ends with an assistant message, and an episode opens the assistant's "
                "turn itself; end the prompt with a user message"
            )
        return self._episodes.tools(restored(example.record))

    def _with_placeholders(self, example: SourceRecord) -> SourceRecord:
        """Return the record with placeholders of its images in the prompt, for templates that know no images."""
        if not example.images or self._reader is None:
            return example
        placeholder = self._reader.placeholders.enclosed
        return example._replace(prompt=with_texts(example.prompt, lambda text: text.replace(MARK, placeholder)))

    def _encode_rendered(
        self, texts: Sequence[str], examples: Sequence[SourceRecord], marked: Sequence[bool], most: int | None
    ) -> list[list[int]]:
        """Return the token ids of texts that the chat template rendered; marked control tokens become text."""
        found = self._encode(texts, most, rendered=True)
        for n, marks in enumerate(marked):
            if marks:
                found[n] = self._control.encode(texts[n], place=examples[n].place)
        return found

    def _encode(
        self, texts: Sequence[str], most: int | None, *, rendered: bool = False, add_special: bool = False
    ) -> list[list[int]]:
        """Return the token ids of each text; the ids of a text with more than `most` tokens may be truncated.

        Args:
          rendered: True for texts of a chat template, whose special tokens are tokens.
          add_special: True adds the tokenizer's special tokens.
        """
        if not texts:
            return []
        # Upper bound on the letters of a text that fits; the factor 4 is for tokenizers that drop letters like spaces.
        letters = None if most is None else 4 * self._token_letters * (most + 1)
        settings = {
            "add_special_tokens": add_special,
            "split_special_tokens": self._as_text and not rendered,
            "return_attention_mask": False,
            "return_token_type_ids": False,
        }
        found: list[list[int]] = self._tokenizer([text[:letters] for text in texts], **settings)["input_ids"]
        for n, text in enumerate(texts):
            if most is not None and len(text) > cast(int, letters) and len(found[n]) <= most:
                found[n] = self._tokenizer(text, **settings)["input_ids"]
        return found


def _chat(prompt: str | Messages) -> Messages:
    """Return a prompt as messages; a text becomes a user message."""
    return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt


def _check_utf8(text: str, place: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = error.object[error.start]
        raise Refusal(
            f"{place}: a text contains {half!r}, half of a surrogate pair, which cannot be encoded; write the "
            "whole character, or remove the half"
        ) from error


def _plain_text(example: SourceRecord) -> str:
    if isinstance(example.prompt, str):
        return example.prompt
    raise Refusal(
        f"{example.place}: the prompt is chat messages and the tokenizer has no chat template; "
        'give prompts as text, or set "chat_template" in its tokenizer_config.json, or use a GGUF file that has a '
        "template"
    )

"""From a data setting to tokenised problems."""

import re
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, cast

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from jaxrlhf.batch import Image
from jaxrlhf.config import Arithmetic, ArithmeticPairs, Data, Gsm8k, PairFile, PromptFile, Refusal, Shapes
from jaxrlhf.data.arithmetic import Split, arithmetic_records
from jaxrlhf.data.control_tokens import ControlTokens
from jaxrlhf.data.image_prompts import Messages, as_text, expanded, in_parts, marked, referred, shown
from jaxrlhf.data.images import MARK, ImageReader, image_values, placed
from jaxrlhf.data.pairs import PairRecord, read_arithmetic_pairs, read_pair_file
from jaxrlhf.data.problem_table import PairColumns, ProblemTable
from jaxrlhf.data.records import Row, Stored, read_rows
from jaxrlhf.data.shapes import shape_records
from jaxrlhf.data.split_files import split_files

_CHUNK = 4096
"""Records that are tokenised in one call."""

_CALCULATOR_MARK = re.compile(r"<<.*?>>")


class SourceRecord(NamedTuple):
    """A record whose parts are known, not yet tokenised.

    Attributes:
      place: Where it comes from, for error messages.
      prompt: A user's text, or chat messages.
      answer: Reference answer for the rewards.
      solution: Worked solution for supervised training.
      record: The source record, as it is kept.
      pair: The pair whose chosen answer is `solution`; None if the record is none.
      images: References to images, of which each has a `MARK` in the prompt.
    """

    place: str
    prompt: str | Messages
    answer: str | None
    solution: str | None
    record: Stored
    pair: PairRecord | None = None
    images: tuple[str, ...] = ()


class Loaded(NamedTuple):
    """The problems of a split.

    Attributes:
      problems: Problems within the token limits.
      dropped_too_long: Number of problems left out for a token limit.
      total: Records in the split.
      malformed: What is wrong with pairs that could not be read, and where.
      spelled: Places of texts that spell out a control token, each with the first one.
    """

    problems: ProblemTable
    dropped_too_long: int
    total: int
    malformed: list[str]
    spelled: list[str]


class _Limits(NamedTuple):
    """Most tokens of a prompt and of an answer; None is no limit."""

    prompt: int
    answer: int | None

    def allow(self, lengths: "_Lengths") -> bool:
        return lengths.prompt <= self.prompt and (self.answer is None or lengths.answer <= self.answer)


def load_problems(
    data: Data,
    tokenizer: PreTrainedTokenizerBase,
    *,
    split: Split,
    max_prompt_tokens: int,
    max_solution_tokens: int | None = None,
    reader: ImageReader | None = None,
) -> Loaded:
    """Read a split and tokenise it, once.

    A prompt goes through the tokenizer's chat template as one user message (chat messages as
    they are), with the assistant's turn opened at the end; a tokenizer without a template gets
    the plain text. Solutions are tokenised on their own and end with EOS, so that prompt and
    solution tokens concatenate to what sampling would have produced.

    Args:
      max_prompt_tokens: Problems with longer prompts are dropped and counted.
      max_solution_tokens: Most tokens of a solution, EOS included, and of both answers of a pair; None is no limit.
      reader: Reads images; None refuses records that have some.

    Returns:
      The problems; none at all for the evaluation split of a file without one.

    Raises:
      Refusal: unreadable data, or no problem within the limits.
    """
    limits = _Limits(max_prompt_tokens, max_solution_tokens)
    as_text = getattr(data, "control_tokens", "parse") == "text"
    tokenized = _Tokenized(tokenizer, limits, as_text=as_text, reader=reader)
    malformed: list[str] = []
    examples = _read(data, split, malformed)
    while chunk := list(islice(examples, _CHUNK)):
        tokenized.add(chunk)
    total, kept = len(tokenized.lengths), len(tokenized.table)
    if total and not kept:
        raise Refusal(_nothing_fits(tokenized.lengths, split, limits))
    return Loaded(tokenized.table, total - kept, total + len(malformed), malformed, tokenized.spelled)


def _read(data: Data, split: Split, malformed: list[str]) -> Iterator[SourceRecord]:
    """The records; what is wrong with pairs that could not be read is added to a list."""
    match data:
        case Arithmetic():
            return _read_arithmetic(data, split)
        case Gsm8k():
            return _read_gsm8k(data, split)
        case PromptFile():
            return _read_prompt_file(data, split)
        case Shapes():
            return _read_shapes(data, split)
        case ArithmeticPairs():
            read = read_arithmetic_pairs(data, split)
        case PairFile():
            read = read_pair_file(data, split)
    malformed += read.malformed
    return (SourceRecord(pair.place, pair.prompt, pair.answer, pair.chosen, pair.record, pair) for pair in read.pairs)


def _read_arithmetic(data: Arithmetic, split: Split) -> Iterator[SourceRecord]:
    records = arithmetic_records(
        difficulty=data.difficulty,
        problems=data.train_problems if split == "train" else data.eval_problems,
        seed=data.seed,
        split=split,
        unfinished_share=data.unfinished_share if split == "train" else 0.0,
    )
    for n, record in enumerate(records):
        yield SourceRecord(f"arithmetic problem {n}", record["question"], record["answer"], record["solution"], record)


def _read_shapes(data: Shapes, split: Split) -> Iterator[SourceRecord]:
    records = shape_records(
        problems=data.train_problems if split == "train" else data.eval_problems,
        seed=data.seed,
        split=split,
        hasty_share=data.hasty_share if split == "train" else 0.0,
        shuffled=data.shuffled,
    )
    for n, record in enumerate(records):
        parts = f"{MARK}{record['question']}", record["answer"], record["solution"], record
        yield SourceRecord(f"shapes problem {n}", *parts, images=(record["picture"],))


def _read_gsm8k(data: Gsm8k, split: Split) -> Iterator[SourceRecord]:
    for file in split_files(data.path, "train" if split == "train" else "test"):
        for row in read_rows(file):
            yield _gsm8k_example(row, data.instruction)


def _gsm8k_example(row: Row, instruction: str) -> SourceRecord:
    solution = _CALCULATOR_MARK.sub("", row.text("answer"))
    _, mark, answer = solution.rpartition("####")
    if not mark:
        raise Refusal(f"{row.place}: no '#### <number>' in 'answer'")
    prompt = f"{row.text('question')} {instruction}".strip()
    return SourceRecord(row.place, prompt, answer.strip().replace(",", ""), solution, row.stored)


def _read_prompt_file(data: PromptFile, split: Split) -> Iterator[SourceRecord]:
    path = data.train if split == "train" else data.evaluation
    if path is not None:
        for row in read_rows(Path(path).expanduser()):
            yield _prompt_example(row, data)


def _prompt_example(row: Row, data: PromptFile) -> SourceRecord:
    prompt = row.value(data.prompt_key)
    if isinstance(prompt, list) and prompt:
        prompt = [as_text(message) for message in prompt]
        for message in prompt:
            _check_message(message, f"{row.place}: a message in {data.prompt_key!r}")
    elif not isinstance(prompt, str) or not prompt:
        raise Refusal(f"{row.place}: {data.prompt_key!r} must be a text or a list of messages, got {prompt!r:.80}")
    example = SourceRecord(
        place=row.place,
        prompt=prompt,
        answer=None if data.answer_key is None else row.text(data.answer_key),
        solution=None if data.solution_key is None else row.text(data.solution_key),
        record=row.stored,
    )
    if data.image_key is None:
        return example
    count = len(image_values(row.value(data.image_key)))
    kept = {key: value for key, value in row.record.items() if key != data.image_key}
    sources = tuple(f"record:{row.source}/{data.image_key}/{index}" for index in range(count))
    return example._replace(prompt=marked(example.prompt, count, place=row.place), record=kept, images=sources)


def _check_message(message: object, where: str) -> None:
    valid = isinstance(message, dict) and all(isinstance(message.get(key), str) for key in ("role", "content"))
    if not valid:
        raise Refusal(f"{where} must have the texts 'role' and 'content', got {message!r:.80}")


class _Lengths(NamedTuple):
    """Tokens of a record's prompt, and of the longest answer to it; at least so many where a text was cut."""

    prompt: int
    answer: int


class _Tokenized:
    """Problems of a split as they are tokenised: those that fit, and what to say of the others."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, limits: _Limits, *, as_text: bool, reader: ImageReader | None
    ) -> None:
        self._reader = reader
        self.table = ProblemTable()
        self.lengths: list[_Lengths] = []
        self.spelled: list[str] = []
        self._tokenizer, self._limits, self._as_text = tokenizer, limits, as_text
        self._control = ControlTokens(tokenizer)
        self._token_letters = max(map(len, tokenizer.get_vocab()))

    def add(self, examples: Sequence[SourceRecord]) -> None:
        """Tokenise some records: each kind of text in one call, and none that no record has."""
        spells = [self._spells(example) for example in examples]
        prompts = self._rendered(examples, spells)
        for example, prompt in zip(examples, prompts, strict=True):
            _check_encodes(example, prompt)
        images = [referred(example.images, self._reader, place=example.place) for example in examples]
        for n, (example, own) in enumerate(zip(examples, images, strict=True)):
            prompts[n] = expanded(prompts[n], own, self._reader, place=example.place)
        most, most_answer = self._limits
        prompt_ids = self._encode(prompts, most, prompt=True)
        for n, spelled in enumerate(spells):
            if spelled and self._as_text and self._tokenizer.chat_template is not None:
                prompt_ids[n] = self._control.encode(prompts[n], place=examples[n].place)
                prompts[n] = self._control.unmarked(prompts[n])
        solution_ids = self._encode([example.solution for example in examples], most_answer)
        rejected_ids = self._encode([example.pair and example.pair.rejected for example in examples], most_answer)
        for n, example in enumerate(examples):
            if not prompt_ids[n]:
                raise Refusal(
                    f"{example.place}: the tokenizer makes no tokens of the prompt {prompts[n]!r:.80}; leave it out"
                )
            self._add(example, prompts[n], prompt_ids[n] or [], solution_ids[n], rejected_ids[n], images[n])

    def _add(
        self,
        example: SourceRecord,
        prompt: str,
        prompt_ids: list[int],
        solution_ids: list[int] | None,
        rejected_ids: list[int] | None,
        images: tuple[Image, ...],
    ) -> None:
        number, eos = len(self.lengths), self._tokenizer.eos_token_id
        solution, rejected = ((*ids, eos) if ids is not None else () for ids in (solution_ids, rejected_ids))
        self.lengths.append(_Lengths(len(prompt_ids), max(len(solution), len(rejected))))
        if not self._limits.allow(self.lengths[-1]):
            return
        if self._reader is not None:
            images = placed(prompt_ids, images, self._reader.placeholders.token, place=example.place)
        self.table.append(number, prompt, prompt_ids, example.answer, solution, example.record, images)
        if example.pair is not None:
            self.table.make_pair(rejected, PairColumns(example.pair.margin, example.pair.safe))

    def _spells(self, example: SourceRecord) -> bool:
        """True if a text of the record spells a control token; what is said of it at start is noted."""
        texts = [*_texts(example.prompt), example.solution or "", example.pair.rejected if example.pair else ""]
        found = self._control.first_in(texts)
        if found is not None:
            self.spelled.append(f"{example.place}: {found}")
        return found is not None

    def _rendered(self, examples: Sequence[SourceRecord], spells: Sequence[bool]) -> list[str]:
        """Prompts as the tokenizer's chat template has them, marked where control tokens shall stay text."""
        if self._tokenizer.chat_template is None:
            return [_plain_text(example) for example in map(self._shown, examples)]
        if "image" not in self._tokenizer.chat_template:
            examples = [*map(self._shown, examples)]
        marking = [
            self._marked(one) if spelled and self._as_text else one.prompt
            for one, spelled in zip(examples, spells, strict=True)
        ]
        chats: list[Any]
        chats = [[{"role": "user", "content": one}] if isinstance(one, str) else one for one in marking]
        if "image" in self._tokenizer.chat_template:
            chats = [in_parts(chat) if one.images else chat for one, chat in zip(examples, chats, strict=True)]
        try:
            return cast(
                list[str], self._tokenizer.apply_chat_template(chats, add_generation_prompt=True, tokenize=False)
            )
        except TemplateError as error:
            if len(examples) > 1:  # once more, to say which
                return [self._rendered([one], [spelled])[0] for one, spelled in zip(examples, spells, strict=True)]
            place = examples[0].place
            raise Refusal(f"{place}: the tokenizer's chat template refuses this prompt: {error}") from error

    def _shown(self, example: SourceRecord) -> SourceRecord:
        """A record whose prompt has the placeholders of its images, for templates that know of none."""
        return example._replace(prompt=shown(example.prompt, self._reader)) if example.images else example

    def _marked(self, example: SourceRecord) -> str | Messages:
        def mark(text: str) -> str:
            return self._control.mark(text, place=example.place)

        if isinstance(example.prompt, str):
            return mark(example.prompt)
        return [{**message, "content": mark(message["content"])} for message in example.prompt]

    def _encode(self, texts: Sequence[str | None], most: int | None, *, prompt: bool = False) -> list[list[int] | None]:
        """Token ids of each text, None for None; of a text that cannot fit at least those that show it."""
        given = [(n, text) for n, text in enumerate(texts) if text is not None]
        # A token has so many letters at most; the factor leaves room for tokenizers that drop some, such as spaces.
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


def _texts(prompt: str | Messages) -> list[str]:
    return [prompt] if isinstance(prompt, str) else [message["content"] for message in prompt]


def _check_encodes(example: SourceRecord, prompt: str) -> None:
    rejected = example.pair.rejected if example.pair else ""
    try:
        "".join((prompt, example.answer or "", example.solution or "", rejected)).encode()
    except UnicodeEncodeError as error:
        half = error.object[error.start]
        raise Refusal(
            f"{example.place}: a text holds {half!r}, half of a surrogate pair, which cannot be encoded; write the "
            "whole character or leave it out"
        ) from error


def _plain_text(example: SourceRecord) -> str:
    if isinstance(example.prompt, str):
        return example.prompt
    raise Refusal(
        f"{example.place}: the prompt is chat messages and the tokenizer has no chat template; "
        'give prompts as text, or set "chat_template" in its tokenizer_config.json'
    )


def _nothing_fits(lengths: Sequence[_Lengths], split: Split, limits: _Limits) -> str:
    message = f"all {len(lengths)} {split} problems are over the token limits: "
    prompts = [length.prompt for length in lengths]
    message += f"rollout.max_prompt_tokens={limits.prompt}, prompts have {min(prompts)} to {max(prompts)}"
    if limits.answer is not None:
        answers = [length.answer for length in lengths]
        message += (
            f"; rollout.max_response_tokens leaves {limits.answer} to a solution, "
            f"solutions have {min(answers)} to {max(answers)}"
        )
    return f"{message}; raise the limit until the longest fits, to keep all"

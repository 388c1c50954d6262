"""From a data setting to tokenised problems."""

import re
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from transformers import PreTrainedTokenizerBase

from jaxrlhf.config import (
    Arithmetic,
    ArithmeticPairs,
    Data,
    Generated,
    Gsm8k,
    PairFile,
    PromptFile,
    Refusal,
    Shapes,
)
from jaxrlhf.data.arithmetic import Split, arithmetic_records
from jaxrlhf.data.generated import generated_records
from jaxrlhf.data.image_prompts import as_text, marked
from jaxrlhf.data.images import MARK, ImageReader, image_values
from jaxrlhf.data.pairs import read_arithmetic_pairs, read_pair_file
from jaxrlhf.data.problem_table import ProblemTable
from jaxrlhf.data.records import Row, read_rows
from jaxrlhf.data.shapes import shape_records
from jaxrlhf.data.split_files import split_files
from jaxrlhf.data.tokenized import EpisodeReader, SourceRecord, Tokenized, TokenLimits, nothing_fits

_CHUNK = 4096
"""Records that are tokenised in one call."""

_CALCULATOR_MARK = re.compile(r"<<.*?>>")


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


def load_problems(
    data: Data,
    tokenizer: PreTrainedTokenizerBase,
    *,
    split: Split,
    max_prompt_tokens: int,
    max_solution_tokens: int | None = None,
    reader: ImageReader | None = None,
    episodes: EpisodeReader | None = None,
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
      episodes: Shows tools beside prompts, and reads solutions of several turns; None where there is no environment.

    Returns:
      The problems; none at all for the evaluation split of a file without one.

    Raises:
      Refusal: unreadable data, or no problem within the limits.
    """
    limits = TokenLimits(max_prompt_tokens, max_solution_tokens)
    as_text = getattr(data, "control_tokens", "parse") == "text"
    tokenized = Tokenized(tokenizer, limits, as_text=as_text, reader=reader, episodes=episodes)
    malformed: list[str] = []
    examples = _read(data, split, malformed)
    while chunk := list(islice(examples, _CHUNK)):
        tokenized.add(chunk)
    total, kept = len(tokenized.lengths), len(tokenized.table)
    if total and not kept:
        raise Refusal(nothing_fits(tokenized.lengths, split, limits))
    return Loaded(tokenized.table, total - kept, total + len(malformed), malformed, tokenized.spelled)


def _read(data: Data, split: Split, malformed: list[str]) -> Iterator[SourceRecord]:
    """The records; what is wrong with pairs that could not be read is added to a list."""
    match data:
        case Arithmetic():
            return _read_arithmetic(data, split)
        case Generated():
            return _read_generated(data, split)
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


def _read_generated(data: Generated, split: Split) -> Iterator[SourceRecord]:
    count = data.train_problems if split == "train" else data.eval_problems
    for row in generated_records(data.function, split, count, data.seed):
        prompt, solution = row.value("prompt"), row.record.get("solution")
        if isinstance(prompt, list):
            for message in prompt:
                _check_message(message, f"{row.place}: a message in 'prompt'")
        answer = None if row.record.get("answer") is None else row.text("answer")
        yield SourceRecord(row.place, prompt, answer, solution, row.stored)


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

"""Loading of a data setting: from its records to tokenized problems."""

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice, takewhile
from pathlib import Path
from typing import Any, NamedTuple

from transformers import PreTrainedTokenizerBase

from jaxrlhf.config import (
    Arithmetic,
    ArithmeticPairs,
    Data,
    DataSet,
    EvaluationSet,
    Generated,
    Gsm8k,
    HubData,
    HubPairs,
    HubSteps,
    Mixture,
    PairFile,
    PromptFile,
    Refusal,
    Shapes,
    Source,
    StepFile,
)
from jaxrlhf.config.sources import PromptFields
from jaxrlhf.data.arithmetic import Split, arithmetic_records
from jaxrlhf.data.chats.messages import SHAREGPT, read_answer, read_prompt, read_turns, without_prompt
from jaxrlhf.data.chats.parts import contents, is_image, named_images
from jaxrlhf.data.generated import generated_records
from jaxrlhf.data.hub import split_rows
from jaxrlhf.data.image_prompts import marked
from jaxrlhf.data.images import MARK, ImageReader, image_values, record_place, source_of
from jaxrlhf.data.labelled.pairs import read_pairs, wrong_solution
from jaxrlhf.data.labelled.steps import read_steps
from jaxrlhf.data.records import Messages, PairPart, Row, SourceRecord, Stored, without_field
from jaxrlhf.data.shapes import shape_records
from jaxrlhf.data.table.cache import cache_folder_of, is_cached, new_folder
from jaxrlhf.data.table.problem_table import ProblemTable
from jaxrlhf.data.tokenized import EpisodeReader, Tokenized, TokenLimits, with_system_prompt

_FACTS = "split.json"
_CHUNK = 4096
"""Number of records that are tokenized in one call."""

_VERL_ANSWER = "reward_model.ground_truth"
_CONVERSATIONS = ("messages", "conversations")
"""Fields of TRL and of ShareGPT that hold prompt and solution in one list of messages."""
_CALCULATOR_MARK = re.compile(r"<<.*?>>")


class Loaded(NamedTuple):
    """Problems of a split, with counts and errors from reading them.

    Attributes:
      problems: Problems within the token limits.
      dropped_too_long: Number of problems left out because of a token limit.
      total: Number of records in the split.
      malformed: Errors of pairs that could not be read, with their places.
      spelled: Places of texts that spell out a control token, each with the first such token.
      kept: Folder from which the problems are memory-mapped; None if they are in memory.
    """

    problems: ProblemTable
    dropped_too_long: int
    total: int
    malformed: list[str]
    spelled: list[str]
    kept: Path | None = None

    @classmethod
    def mapped(cls, folder: Path) -> "Loaded":
        """Map a split that `keep` wrote to a folder."""
        dropped, total, malformed, spelled = json.loads((folder / _FACTS).read_text())
        return cls(ProblemTable.mapped(folder), dropped, total, malformed, spelled, folder)

    def keep(self, folder: Path) -> None:
        """Complete the problems' files in a folder, and write counts and errors next to them."""
        self.problems.keep()
        (folder / _FACTS).write_text(json.dumps([self.dropped_too_long, self.total, self.malformed, self.spelled]))


def load_problems(
    data: Data | EvaluationSet,
    tokenizer: PreTrainedTokenizerBase,
    *,
    split: Split,
    max_prompt_tokens: int,
    max_solution_tokens: int | None = None,
    system_prompt: str | None = None,
    reader: ImageReader | None = None,
    episodes: EpisodeReader | None = None,
    environment_key: str | None = None,
) -> Loaded:
    """Read and tokenize a split once; sources of a mixture are read one after another. Large splits are cached on disk.

    A prompt goes through the tokenizer's chat template as one user message (chat messages unchanged), with the
    assistant's turn opened at the end. A tokenizer without a template gets the plain text. Solutions are tokenized
    separately and end with the end of turn (EOS without a template), so that the tokens of prompt and solution
    concatenate to what sampling would have produced.

    Args:
      max_prompt_tokens: Problems with longer prompts are dropped and counted.
      max_solution_tokens: Maximum tokens of a solution, EOS included, and of each answer of a pair; None is no limit.
      system_prompt: System message before every prompt that has none; None adds none.
      reader: Reader of images; None refuses records with images.
      episodes: Source of the tools of a prompt, and reader of solutions of several turns; None without an environment.
      environment_key: Record field that names the record's environment; a source of a mixture may set it.

    Returns:
      The problems; empty for the evaluation split of data without one.

    Raises:
      Refusal: The data cannot be read, or no problem is within the limits.
    """
    limits = TokenLimits(max_prompt_tokens, max_solution_tokens)
    read = [_SourceReading.of(source, system_prompt, environment_key) for source in _sources(data)]
    folder = None
    if reader is None and episodes is None:
        folder = cache_folder_of([(one.data, one[1:]) for one in read], split, tokenizer, limits)
    if folder is None:
        return _tokenized(read, split, Tokenized(tokenizer, limits, reader=reader, episodes=episodes))
    if not is_cached(folder):
        with new_folder(folder) as new:
            loaded = _tokenized(read, split, Tokenized(tokenizer, limits, reader=None, episodes=None, folder=new))
            if new is None:
                return loaded
            loaded.keep(new)
    return Loaded.mapped(folder)


class _SourceReading(NamedTuple):
    """Data set to be read, with the settings that apply to all of its records.

    Attributes:
      fields: Fields that are set in each record.
    """

    data: DataSet
    name: str
    system_prompt: str | None
    fields: dict[str, str]

    @classmethod
    def of(
        cls, source: Source | EvaluationSet, system_prompt: str | None, environment_key: str | None
    ) -> "_SourceReading":
        prompt = system_prompt if source.system_prompt is None else source.system_prompt
        name = source.environment if isinstance(source, Source) else None
        fields = {} if name is None or environment_key is None else {environment_key: name}
        return cls(source.data, source.name, prompt, fields)


def _tokenized(sources: Sequence[_SourceReading], split: Split, tokenized: Tokenized) -> Loaded:
    """Read data sets, one after another, and tokenize them."""
    malformed: list[str] = []
    for source in sources:
        examples = (
            with_system_prompt(example, source.system_prompt, source.fields)
            for example in _read(source.data, split, malformed)
        )
        tokenized.begin(source.name, as_text=getattr(source.data, "control_tokens", "parse") == "text")
        while chunk := list(islice(examples, _CHUNK)):
            tokenized.add(chunk)
    total, kept = tokenized.records, len(tokenized.table)
    if total and not kept:
        raise tokenized.nothing_fits(split)
    return Loaded(tokenized.table, total - kept, total + len(malformed), malformed, tokenized.spelled)


def _sources(data: Data | EvaluationSet) -> Sequence[Source | EvaluationSet]:
    """Return the data sets to read, in order."""
    if isinstance(data, Mixture):
        return data.sources
    return (data,) if isinstance(data, EvaluationSet) else (Source(name="", data=data),)


def _read(data: DataSet, split: Split, malformed: list[str]) -> Iterator[SourceRecord]:
    """Return an iterator over the records; errors of unreadable pairs are appended to `malformed`."""
    match data:
        case Arithmetic() | ArithmeticPairs():
            return _read_arithmetic(data, split)
        case Generated():
            return _read_generated(data, split)
        case Gsm8k():
            return _read_gsm8k(data, split)
        case HubData() | PromptFile():
            return (_prompt_example(row, data) for row in split_rows(data, split))
        case Shapes():
            return _read_shapes(data, split)
        case StepFile() | HubSteps():
            return read_steps(data, split)
        case HubPairs() | PairFile():
            return read_pairs(split_rows(data, split), data, split, malformed)


def _read_arithmetic(data: Arithmetic | ArithmeticPairs, split: Split) -> Iterator[SourceRecord]:
    """Yield problems, or pairs of a right and a wrong solution; the right one counts as harmless, the wrong one not."""
    records = arithmetic_records(
        difficulty=data.difficulty,
        problems=data.train_problems if split == "train" else data.eval_problems,
        seed=data.seed,
        split=split,
        unfinished_share=data.unfinished_share if isinstance(data, Arithmetic) and split == "train" else 0.0,
    )
    for n, record in enumerate(records):
        question, solution = record["question"], record["solution"]
        paired = isinstance(data, ArithmeticPairs)
        pair = PairPart(wrong_solution(question, solution), 0.0, (True, False)) if paired else None
        yield SourceRecord(f"arithmetic problem {n}", question, record["answer"], solution, record, pair)


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
    for row in generated_records(data.function, split, count, data.seed, data.keywords):
        prompt = "" if row.value("prompt") == "" else read_prompt(row.value("prompt"), row.place, "prompt")
        answer = None if row.record.get("answer") is None else row.text("answer")
        solution, further = _several(row.record.get("solution"))
        if isinstance(solution, list) and solution and all(isinstance(message, dict) for message in solution):
            solution = read_turns(solution, row.place, "solution")
        elif not isinstance(solution, str | None):
            raise Refusal(
                f"{row.place}: 'solution' must be a text or a list of texts or messages, got {solution!r:.80}"
            )
        yield SourceRecord(row.place, prompt, answer, solution, row.stored, further=further)


def _read_gsm8k(data: Gsm8k, split: Split) -> Iterator[SourceRecord]:
    """Yield the problems of the subset `main`, or of a directory without subsets."""
    folder = Path(data.path).expanduser()
    subset = None if folder.is_dir() and not any(folder.glob("main/*")) else "main"
    for row in split_rows(HubData(data.path, subset=subset), split):
        solution = _CALCULATOR_MARK.sub("", row.text("answer"))
        _, mark, answer = solution.rpartition("####")
        if not mark:
            raise Refusal(f"{row.place}: no '#### <number>' in 'answer'")
        prompt = f"{row.text('question')} {data.instruction}".strip()
        yield SourceRecord(row.place, prompt, answer.strip().replace(",", ""), solution, row.stored)


def _prompt_example(row: Row, data: PromptFields) -> SourceRecord:
    key, value = _prompt(row, data)
    prompt = read_prompt(value, row.place, key, images=True)
    solution, further = _solutions(row, data, prompt)
    example = SourceRecord(row.place, prompt, _answer(row, data), solution, row.stored, further=further)
    values, record = _images(row, data, value)
    if not values and data.image_key is None:
        return example
    key, path = data.image_key or key, Path(row.source.rpartition("#")[0])
    sources = tuple(source_of(one, record_place(row.source, key, n), path) for n, one in enumerate(values))
    return example._replace(prompt=marked(prompt, len(values), place=row.place), record=record, images=sources)


def _images(row: Row, data: PromptFields, messages: Any) -> tuple[list[Any], Stored]:
    """Return a record's images, from the image field or the prompt's parts, and the record without the image field."""
    if data.image_key is not None:
        return image_values(row.value(data.image_key, "image_key")), without_field(row.record, data.image_key)
    if not isinstance(messages, list):
        return [], row.stored
    parts = [part for message in messages for part in contents(message) if is_image(part)]
    named = named_images(messages)
    if len(named) < len(parts):
        raise Refusal(
            f"{row.place}: a part of type {parts[0]['type']!r} has no image; name the field with the images by "
            f"image_key, there are {sorted(row.record)}"
        )
    return named, row.stored


def _prompt(row: Row, data: PromptFields) -> tuple[str, Any]:
    """Return the prompt's field and the prompt.

    TRL's `messages`, ShareGPT's `conversations`, or a field named as both prompt and solution, holds the whole
    conversation. Its prompt is all messages before the last messages of the assistant, after the system message that a
    field `system` of the record gives.
    """
    key = _conversation(row, data)
    if key is None:
        return data.prompt_key, row.value(data.prompt_key, "prompt_key")
    messages = row.value(key)
    prompt, system = messages[: len(messages) - _answering(messages)], row.record.get("system")
    if prompt and isinstance(system, str) and system.strip() and next(_roles(prompt), None) != "system":
        prompt = [{"role": "system", "content": system}, *prompt]
    return key, prompt


def _answering(messages: Sequence[Any]) -> int:
    """Return the number of assistant messages at the end."""
    return sum(1 for _ in takewhile(lambda role: role == "assistant", _roles(reversed(messages))))


def _roles(messages: Iterable[Any]) -> Iterator[str]:
    speakers = (str(one.get("role") or one.get("from")) for one in messages if isinstance(one, Mapping))
    return (SHAREGPT.get(speaker, speaker) for speaker in speakers)


def _conversation(row: Row, data: PromptFields) -> str | None:
    """Return the field with prompt and solution in one list of messages; None if the prompt has its own field."""
    if data.prompt_key == data.solution_key and isinstance(row.value(data.prompt_key, "prompt_key"), list):
        return data.prompt_key
    if data.prompt_key != "prompt" or row.has("prompt"):
        return None
    return next((key for key in _CONVERSATIONS if isinstance(row.record.get(key), list)), None)


def _answer(row: Row, data: PromptFields) -> str | None:
    """Return the reference answer; if the field of the default name is missing, verl's field is read."""
    if data.answer_key is None:
        return None
    verl = data.answer_key == "answer" and not row.has("answer") and row.has(_VERL_ANSWER)
    key = _VERL_ANSWER if verl else data.answer_key
    value = row.value(key, "answer_key (None if there are no answers)")
    if isinstance(value, bool | list | Mapping):
        raise Refusal(
            f"{row.place}: {key!r} is {value!r:.60}, and an answer is one text or number; write one, or set "
            "answer_key=None and have a reward function read the record's field"
        )
    return row.text(key, "answer_key (None if there are no answers)", "; if there are no answers, set answer_key=None")


def _solutions(row: Row, data: PromptFields, prompt: str | Messages) -> tuple[Any, tuple[str, ...]]:
    """Return the worked solution, a text or messages after the prompt; a list of texts gives further solutions."""
    key = data.solution_key
    if key is None:
        return None, ()
    value = row.value(key, "solution_key")
    if not isinstance(value, list):
        return row.text(key), ()
    first, further = _several(value)
    if first is not value:
        return first, further
    if key == _conversation(row, data):
        return read_answer(value[len(value) - max(1, _answering(value)) :], row.place, key), ()
    return read_answer(without_prompt(value, prompt, row.place, key), row.place, key), ()


def _several(solution: Any) -> tuple[Any, tuple[str, ...]]:
    """Return the first of a list of texts, and the others; any other value is one solution."""
    if isinstance(solution, list) and solution and all(isinstance(one, str) for one in solution):
        return solution[0], tuple(solution[1:])
    return solution, ()

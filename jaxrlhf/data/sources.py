"""From a data setting to tokenised problems."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, cast

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from jaxrlhf.batch import Pair, Problem
from jaxrlhf.config import Arithmetic, ArithmeticPairs, Data, Gsm8k, PairFile, PromptFile, Refusal
from jaxrlhf.data.arithmetic import Split, arithmetic_records
from jaxrlhf.data.pairs import PairRecord, read_arithmetic_pairs, read_pair_file
from jaxrlhf.data.records import Row, read_rows

Messages = list[dict[str, str]]

_CALCULATOR_MARK = re.compile(r"<<.*?>>")


class Example(NamedTuple):
    """A record whose parts are known, not yet tokenised.

    Attributes:
      place: Where it comes from, for error messages.
      prompt: A user's text, or chat messages.
      answer: Reference answer for the rewards.
      solution: Worked solution for supervised training.
      record: As it was read.
      pair: Of which `solution` is the chosen answer; None if the record is none.
    """

    place: str
    prompt: str | Messages
    answer: str | None
    solution: str | None
    record: Mapping[str, Any]
    pair: PairRecord | None = None


class Loaded(NamedTuple):
    """The problems of a split.

    Attributes:
      problems: Those that fit.
      dropped_too_long: Those left out for a token limit.
      total: Records in the split.
      malformed: What is wrong with pairs that could not be read, and where.
    """

    problems: list[Problem]
    dropped_too_long: int
    total: int
    malformed: list[str]


def load_problems(
    data: Data,
    tokenizer: PreTrainedTokenizerBase,
    *,
    split: Split,
    max_prompt_tokens: int,
    max_solution_tokens: int | None = None,
) -> Loaded:
    """Read a split and tokenise it, once.

    A prompt goes through the tokenizer's chat template as one user message (chat messages as
    they are), with the assistant's turn opened at the end; a tokenizer without a template gets
    the plain text. Solutions are tokenised on their own and end with EOS, so that prompt and
    solution tokens concatenate to what sampling would have produced.

    Args:
      max_prompt_tokens: Problems with longer prompts are dropped and counted.
      max_solution_tokens: The same for solutions, EOS included, and both answers of a pair; None is no limit.

    Returns:
      The problems; none at all for the evaluation split of a file without one.

    Raises:
      Refusal: unreadable data, or no problem within the limits.
    """
    examples, malformed = _read(data, split)
    problems = _tokenize(examples, tokenizer)
    kept = [
        problem
        for problem in problems
        if len(problem.prompt_tokens) <= max_prompt_tokens
        and (max_solution_tokens is None or _solution_length(problem) <= max_solution_tokens)
    ]
    if problems and not kept:
        raise Refusal(_nothing_fits(problems, split, max_prompt_tokens, max_solution_tokens))
    return Loaded(kept, len(problems) - len(kept), len(problems) + len(malformed), malformed)


def _solution_length(problem: Problem) -> int:
    rejected = problem.rejected_tokens if isinstance(problem, Pair) else ()
    return max(len(problem.solution_tokens), len(rejected))


def _read(data: Data, split: Split) -> tuple[list[Example], list[str]]:
    """The records, and what is wrong with pairs that could not be read."""
    match data:
        case Arithmetic():
            return _read_arithmetic(data, split), []
        case Gsm8k():
            return _read_gsm8k(data, split), []
        case PromptFile():
            return _read_prompt_file(data, split), []
        case ArithmeticPairs():
            pairs, malformed = read_arithmetic_pairs(data, split)
        case PairFile():
            pairs, malformed = read_pair_file(data, split)
    return [Example(pair.place, pair.prompt, pair.answer, pair.chosen, pair.record, pair) for pair in pairs], malformed


def _read_arithmetic(data: Arithmetic, split: Split) -> list[Example]:
    records = arithmetic_records(
        difficulty=data.difficulty,
        problems=data.train_problems if split == "train" else data.eval_problems,
        seed=data.seed,
        split=split,
        unfinished_share=data.unfinished_share if split == "train" else 0.0,
    )
    return [
        Example(f"arithmetic problem {n}", record["question"], record["answer"], record["solution"], record)
        for n, record in enumerate(records)
    ]


def _read_gsm8k(data: Gsm8k, split: Split) -> list[Example]:
    files = _gsm8k_files(data.path, "train" if split == "train" else "test")
    return [_gsm8k_example(row, data.instruction) for file in files for row in read_rows(file)]


def _gsm8k_example(row: Row, instruction: str) -> Example:
    solution = _CALCULATOR_MARK.sub("", row.text("answer"))
    _, mark, answer = solution.rpartition("####")
    if not mark:
        raise Refusal(f"{row.place}: no '#### <number>' in 'answer'")
    prompt = f"{row.text('question')} {instruction}".strip()
    return Example(row.place, prompt, answer.strip().replace(",", ""), solution, row.record)


def _gsm8k_files(path: str, name: str) -> list[Path]:
    """One file of split `name`, or its shards in order: in a directory as given, or in a snapshot from the hub."""
    directory = Path(path).expanduser()
    if not directory.is_dir():
        directory = _from_hub(path)
    patterns = (f"{name}.jsonl", f"{name}.parquet", f"{name}-*.parquet", f"main/{name}-*.parquet")
    for pattern in patterns:
        if found := sorted(directory.glob(pattern)):
            return found
    raise Refusal(f"{directory} holds no {name}.jsonl and no {name}.parquet")


def _from_hub(path: str) -> Path:
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(path, repo_type="dataset", allow_patterns=["main/*", "train*", "test*"]))
    except (OSError, ValueError) as error:
        reason = str(error).strip().split("\n")[0]
        raise Refusal(
            f"data.path={path!r} is neither a directory nor a data set that the hub gave ({reason}); "
            "without a network, give a directory with train.jsonl and test.jsonl"
        ) from error


def _read_prompt_file(data: PromptFile, split: Split) -> list[Example]:
    path = data.train if split == "train" else data.evaluation
    if path is None:
        return []
    return [_prompt_example(row, data) for row in read_rows(Path(path).expanduser())]


def _prompt_example(row: Row, data: PromptFile) -> Example:
    prompt = row.value(data.prompt_key)
    if isinstance(prompt, list) and prompt:
        for message in prompt:
            _check_message(message, f"{row.place}: a message in {data.prompt_key!r}")
    elif not isinstance(prompt, str) or not prompt:
        raise Refusal(f"{row.place}: {data.prompt_key!r} must be a text or a list of messages, got {prompt!r:.80}")
    return Example(
        place=row.place,
        prompt=prompt,
        answer=None if data.answer_key is None else row.text(data.answer_key),
        solution=None if data.solution_key is None else row.text(data.solution_key),
        record=row.record,
    )


def _check_message(message: object, where: str) -> None:
    valid = isinstance(message, dict) and all(isinstance(message.get(key), str) for key in ("role", "content"))
    if not valid:
        raise Refusal(f"{where} must have the texts 'role' and 'content', got {message!r:.80}")


def _tokenize(examples: list[Example], tokenizer: PreTrainedTokenizerBase) -> list[Problem]:
    if not examples:
        return []
    prompts = [_prompt_text(example, tokenizer) for example in examples]
    for example, prompt in zip(examples, prompts, strict=True):
        _check_encodes(example, prompt)
    # A chat template writes its special tokens itself; plain text gets the tokenizer's.
    prompt_ids = tokenizer(prompts, add_special_tokens=tokenizer.chat_template is None)["input_ids"]
    solution_ids = tokenizer([example.solution or "" for example in examples], add_special_tokens=False)["input_ids"]
    rejected = [example.pair.rejected if example.pair else "" for example in examples]
    rejected_ids = tokenizer(rejected, add_special_tokens=False)["input_ids"]
    problems = []
    for n, example in enumerate(examples):
        if not prompt_ids[n]:
            raise Refusal(
                f"{example.place}: the tokenizer makes no tokens of the prompt {prompts[n]!r:.80}; leave it out"
            )
        kind, more = Problem, {}
        if example.pair is not None:
            ends = {"rejected_tokens": (*rejected_ids[n], tokenizer.eos_token_id)}
            kind, more = Pair, {**ends, "margin": example.pair.margin, "safe": example.pair.safe}
        problems.append(
            kind(
                prompt_id=n,
                prompt=prompts[n],
                prompt_tokens=tuple(prompt_ids[n]),
                answer=example.answer,
                solution_tokens=() if example.solution is None else (*solution_ids[n], tokenizer.eos_token_id),
                record=example.record,
                **more,
            )
        )
    return problems


def _check_encodes(example: Example, prompt: str) -> None:
    rejected = example.pair.rejected if example.pair else ""
    try:
        "".join((prompt, example.answer or "", example.solution or "", rejected)).encode()
    except UnicodeEncodeError as error:
        half = error.object[error.start]
        raise Refusal(
            f"{example.place}: a text holds {half!r}, half of a surrogate pair, which cannot be encoded; write the "
            "whole character or leave it out"
        ) from error


def _prompt_text(example: Example, tokenizer: PreTrainedTokenizerBase) -> str:
    if tokenizer.chat_template is None:
        if isinstance(example.prompt, str):
            return example.prompt
        raise Refusal(
            f"{example.place}: the prompt is chat messages and the tokenizer has no chat template; "
            'give prompts as text, or set "chat_template" in its tokenizer_config.json'
        )
    messages = [{"role": "user", "content": example.prompt}] if isinstance(example.prompt, str) else example.prompt
    try:
        text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    except TemplateError as error:
        raise Refusal(f"{example.place}: the tokenizer's chat template refuses this prompt: {error}") from error
    return cast(str, text)


def _nothing_fits(
    problems: list[Problem], split: Split, max_prompt_tokens: int, max_solution_tokens: int | None
) -> str:
    message = f"all {len(problems)} {split} problems are over the token limits: "
    prompts = [len(problem.prompt_tokens) for problem in problems]
    message += f"rollout.max_prompt_tokens={max_prompt_tokens}, prompts have {min(prompts)} to {max(prompts)}"
    if max_solution_tokens is not None:
        solutions = [_solution_length(problem) for problem in problems]
        message += (
            f"; rollout.max_response_tokens leaves {max_solution_tokens} to a solution, "
            f"solutions have {min(solutions)} to {max(solutions)}"
        )
    return f"{message}; raise the limit until the longest fits, to keep all"

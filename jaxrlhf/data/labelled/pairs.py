"""Preference pairs: a prompt, a chosen answer and a rejected answer."""

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

from jaxrlhf.config import Refusal
from jaxrlhf.config.sources import PairFields
from jaxrlhf.data.arithmetic import OPERATORS, Split, stable_hash
from jaxrlhf.data.chats.messages import check_no_images, read_answer, read_messages, read_prompt, without_prompt
from jaxrlhf.data.control_tokens import prefix_of_both
from jaxrlhf.data.records import Messages, PairPart, Row, SourceRecord

_TURN = re.compile(r"\n\n(Human|Assistant):")
_ANSWERS = ("chosen", "rejected")
_IMAGES = ("images", "image")
"""Fields of published pairs that hold images."""
_ROLES = {"Human": "user", "Assistant": "assistant"}


def wrong_solution(question: str, solution: str) -> str:
    """Return the worked solution with one mistake, the same on every machine.

    About half of the solutions with several steps stop one step early. In all others the result of one step is off by
    1 to 3, and the following steps continue from the wrong result.
    """
    *steps, last = solution.split("\n")
    choice = stable_hash(f"{question}\n{solution}")
    if choice % 2 and len(steps) > 1:
        return "\n".join((*steps[:-1], f"#### {steps[-2].partition('=')[2]}"))
    off = (choice // 2 % 3 + 1) * (1 if choice // 8 % 2 else -1)
    lines = _with_mistake(steps, choice // 16 % len(steps), off)
    if lines[-1] == last:  # a division rounded the mistake away
        lines = _with_mistake(steps, len(steps) - 1, off)
    return "\n".join(lines)


def _with_mistake(steps: Sequence[str], mistake: int, off: int) -> list[str]:
    """Return the lines with `off` added to the result of step `mistake`, or `-off` if the sum would be negative."""
    lines, right, wrong = [], "", ""
    for number, step in enumerate(steps):
        task, _, result = step.partition("=")
        if number > mistake:
            task = wrong + task.removeprefix(right)
        read = re.fullmatch(r"(-?\d+)([-+*/])(\d+)", task)
        assert read is not None, f"a step of a worked solution is one operation, got {task!r}"
        left, operator, operand = read.groups()
        value = OPERATORS[operator](int(left), int(operand))
        if number == mistake:
            value += off if value + off >= 0 else -off
        lines.append(f"{task}={value}")
        right, wrong = result, str(value)
    return [*lines, f"#### {wrong}"]


def read_pairs(rows: Iterable[Row], data: PairFields, split: Split, malformed: list[str]) -> Iterator[SourceRecord]:
    """Yield the pairs of a split, in order.

    Args:
      malformed: List to which the error of each skipped, unreadable pair is appended.

    Raises:
      Refusal: A file is unreadable, more pairs are malformed than `data` allows, or all pairs are malformed.
    """
    first, total, place = len(malformed), 0, ""
    for row in rows:
        total, place = total + 1, row.place
        try:
            pair = _pair(row, data)
        except ValueError as error:
            malformed.append(str(error))
        else:
            if not data.evaluation_fraction or _held_out(pair, data) == (split == "evaluation"):
                yield pair
    bad = len(malformed) - first
    if bad and (bad == total or bad > data.malformed_fraction * total):
        where = place.rpartition(", ")[0]
        raise Refusal(
            f"{bad} of the {total} pairs of {where} are malformed, and "
            f"data.malformed_fraction={data.malformed_fraction} are allowed; the first: {malformed[first]}"
        )


def _held_out(pair: SourceRecord, data: PairFields) -> bool:
    return stable_hash(json.dumps(pair.prompt)) < data.evaluation_fraction * 2**64


def _pair(row: Row, data: PairFields) -> SourceRecord:
    if not row.has(data.chosen_key) and row.has("completion") and row.has("label"):
        raise Refusal(
            f"{row.place}: a 'completion' with a 'label' is no pair, and single labeled answers are not read; give "
            f"{data.chosen_key!r} and {data.rejected_key!r}"
        )
    for key in _IMAGES:
        if row.has(key) and row.value(key):
            raise Refusal(f"{row.place}: {key!r} contains images, and pairs are text only; leave the record out")
    first, second = row.value(data.chosen_key, "chosen_key"), row.value(data.rejected_key, "rejected_key")
    first, second = ([one] if isinstance(one, Mapping) else one for one in (first, second))
    if isinstance(first, list) != isinstance(second, list):
        first, second = (_as_messages(one) if isinstance(one, str) else one for one in (first, second))
    prompt: str | Messages | None
    chosen: str | Messages
    rejected: str | Messages
    if isinstance(first, list) and isinstance(second, list):
        prompt, *ends = _split_messages(row, first, second, data)
        chosen, rejected = (read_answer(end, row.place, key) for key, end in zip(_ANSWERS, ends, strict=True))
        if isinstance(chosen, str) != isinstance(rejected, str):  # messages in both, so that the template renders both
            chosen, rejected = map(_as_messages, (chosen, rejected))
    else:
        chosen, rejected = texts = [_text(row, key) for key in (data.chosen_key, data.rejected_key)]
        prompt = _prompt(row, data)
        if prompt is None:
            prompt, chosen, rejected = _split(row, texts, data)
    empty = [name for name, answer in zip(_ANSWERS, (chosen, rejected), strict=True) if not _has_content(answer)]
    if empty:
        raise Refusal(f"{row.place}: the {' and the '.join(empty)} answer is empty")
    if chosen == rejected:
        raise Refusal(f"{row.place}: the chosen and the rejected answer are the same")
    margin = 0.0 if data.margin_key is None else row.value(data.margin_key, "margin_key")
    if isinstance(margin, str):  # a cell of a CSV file
        with suppress(ValueError):
            margin = float(margin)
    if isinstance(margin, bool) or not isinstance(margin, int | float) or not math.isfinite(margin):
        raise Refusal(f"{row.place}: {data.margin_key!r} must be a finite number, got {margin!r:.80}")
    pair = PairPart(rejected, float(margin), _safe(row, data))
    return SourceRecord(row.place, prompt, None, chosen, row.stored, pair)


def _as_messages(answer: str | Messages) -> Messages:
    return [{"role": "assistant", "content": answer}] if isinstance(answer, str) else answer


def _has_content(answer: str | Messages) -> bool:
    return bool(answer.strip()) if isinstance(answer, str) else bool(answer)


def _split_messages(
    row: Row, chosen: list[Any], rejected: list[Any], data: PairFields
) -> tuple[str | Messages, list[Any], list[Any]]:
    """Return the prompt, and the messages of the chosen and of the rejected answer after the prompt.

    If both answers begin with an assistant message, the prompt is the record's prompt field. If that field holds
    messages, the answers may begin with these messages, which are then removed. Otherwise the prompt is the messages
    that both answers begin with, as in TRL.
    """
    prompt = _prompt(row, data)
    answers = [*zip(_ANSWERS, (chosen, rejected), strict=True)]
    for key, messages in answers:
        check_no_images(messages, row.place, key)
    read = [read_messages(messages, row.place, key) for key, messages in answers]
    answered = [bool(messages) and messages[0]["role"] == "assistant" for messages in read]
    if prompt is not None and all(answered):
        return prompt, chosen, rejected
    if isinstance(prompt, list):
        first, second = (without_prompt(messages, prompt, row.place, key) for key, messages in answers)
        return prompt, first, second
    pairs = enumerate(zip(*(messages[:-1] for messages in read), strict=False))
    same = next((n for n, (one, other) in pairs if one != other), min(map(len, read)) - 1)
    if same < 1:
        raise Refusal(f"{row.place}: chosen and rejected have no first message in common, so the prompt is unknown")
    return read[0][:same], chosen[same:], rejected[same:]


def _text(row: Row, key: str) -> str:
    value = row.value(key)
    if not isinstance(value, str):
        raise Refusal(f"{row.place}: {key!r} must be a text or a list of messages, got {value!r:.80}")
    return value


def _prompt(row: Row, data: PairFields) -> str | Messages | None:
    """Return the prompt; None if no field is set for it, or the field of the default name is missing."""
    key = data.prompt_key
    if key is None or (key == "prompt" and not row.has(key)):
        return None
    return read_prompt(row.value(key, "prompt_key"), row.place, key)


def _safe(row: Row, data: PairFields) -> tuple[bool, bool] | None:
    if data.safe_keys is None:
        return None
    chosen, rejected = (row.value(key, "safe_keys") for key in data.safe_keys)
    if not (isinstance(chosen, bool) and isinstance(rejected, bool)):
        raise Refusal(f"{row.place}: {data.safe_keys} must be true or false, got {chosen!r:.40} and {rejected!r:.40}")
    return chosen, rejected


def _split(row: Row, texts: list[str], data: PairFields) -> tuple[str | Messages, str, str]:
    """Return the prompt that both answers begin with, and the rest of each answer."""
    chosen, rejected = texts
    if data.prompt_key is None and not (_TURN.match(chosen) and _TURN.match(rejected)):
        return _split_texts(row, chosen, rejected)
    try:
        *shared, last = _dialogue(chosen, place=f"{row.place}: chosen")
        *others, other = _dialogue(rejected, place=f"{row.place}: rejected")
    except Refusal as error:
        fields = sorted(row.record)
        raise Refusal(f"{error}; if a field has the prompt, name it by prompt_key, there are {fields}") from error
    if shared != others:
        raise Refusal(f"{row.place}: chosen and rejected differ before the last turn")
    return shared, str(last["content"]), str(other["content"])


def _split_texts(row: Row, chosen: str, rejected: str) -> tuple[str, str, str]:
    """Return the words that both texts begin with, and the rest of each text, from the space before it on."""
    found = re.match(r"(?s)(.*\S)\s", prefix_of_both(chosen, rejected))
    if found is None:
        raise Refusal(
            f"{row.place}: with prompt_key=None the prompt is the words that chosen and rejected begin with, and they "
            f"have none in common, got {chosen!r:.60} and {rejected!r:.60}"
        )
    prompt = found[1]
    return prompt, chosen[len(prompt) :], rejected[len(prompt) :]


def _dialogue(text: str, *, place: str) -> Messages:
    """Return the turns of a dialogue in the format of hh-rlhf as chat messages.

    Raises:
      Refusal: The turns do not alternate from the human's first to the assistant's last.
    """
    before, *parts = _TURN.split(text)
    roles = parts[::2]
    if before.strip() or not roles or roles != ["Human", "Assistant"] * (len(roles) // 2):
        raise Refusal(
            f"{place}: turns must alternate, from '\\n\\nHuman:' to a last '\\n\\nAssistant:', got {text!r:.80}"
        )
    return [{"role": _ROLES[role], "content": turn.strip()} for role, turn in zip(roles, parts[1::2], strict=True)]

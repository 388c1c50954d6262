"""Solutions in steps, each labeled right or wrong, to train a process reward model."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from jaxrlhf.batch import Problem
from jaxrlhf.config import HubSteps, Refusal, StepFile
from jaxrlhf.data.arithmetic import Split
from jaxrlhf.data.chats.messages import read_prompt
from jaxrlhf.data.hub import split_rows
from jaxrlhf.data.records import Row, SourceRecord, StepPart


@dataclass(frozen=True)
class LabelledSteps(Problem):
    """Problem with a solution in steps; `solution_tokens` holds all steps with their separators, without EOS.

    Attributes:
      step_ends: End of each step in `solution_tokens` (exclusive).
      step_labels: True for each step that is right.
    """

    step_ends: tuple[int, ...] = ()
    step_labels: tuple[bool, ...] = ()


def read_steps(data: StepFile | HubSteps, split: Split) -> Iterator[SourceRecord]:
    """Yield the labeled solutions of a split; nothing for a split without records.

    Raises:
      Refusal: A file is unreadable, or a record has no list of texts with one label for each.
    """
    for row in split_rows(data, split):
        steps, labels = _listed(row, data.steps_key, str, "texts"), _listed(row, data.labels_key, bool, "booleans")
        if len(steps) != len(labels):
            raise Refusal(
                f"{row.place}: {data.steps_key!r} has {len(steps)} steps and {data.labels_key!r} {len(labels)} labels; "
                "give each step one label"
            )
        prompt = read_prompt(row.value(data.prompt_key, "prompt_key"), row.place, data.prompt_key)
        parts = StepPart(steps, labels, data.separator)
        yield SourceRecord(row.place, prompt, None, None, row.stored, steps=parts)


def _listed(row: Row, key: str, kind: type, called: str) -> tuple[Any, ...]:
    value = row.value(key)
    if not isinstance(value, list) or not value or not all(type(one) is kind for one in value):
        raise Refusal(f"{row.place}: {key!r} must be a list of {called}, one for each step, got {value!r:.80}")
    return tuple(value)

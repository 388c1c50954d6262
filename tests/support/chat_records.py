"""Chats of records, loaded as training does."""

import json

import pyarrow as pa
import pyarrow.parquet

from jaxrlhf.config import PromptFile
from jaxrlhf.data.sources import load_problems


def said(role, content, **more):
    return {"role": role, "content": content, **more}


def call(arguments):
    return {"type": "function", "id": "abcdefghi", "function": {"name": "add", "arguments": arguments}}


SKY = said("user", "sky?")
CALLED = said("assistant", "I add.", tool_calls=[call({"a": 1})])
CALLED_ALONE = CALLED | {"content": ""}
RESULT = said("tool", "4", tool_call_id="abcdefghi", name="add")
FOUR = said("assistant", "It is 4.")
THOUGHT = said("assistant", "4", reasoning_content="two and two")


def load(tokenizer, data):
    return load_problems(data, tokenizer, split="train", max_prompt_tokens=2000).problems


def write(path, *records):
    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(pa.Table.from_pylist(list(records)), path)
    else:
        path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


def solution(tokenizer, path, *, key="completion", **record):
    """Text of a solution, and the parts of it that are imitated."""
    data = PromptFile(write(path, record), answer_key=None, solution_key=key)
    (problem,) = load(tokenizer, data)
    ids, mask = problem.solution_tokens, problem.solution_mask or (True,) * len(problem.solution_tokens)
    assert len(ids) == len(mask)
    learned = "".join(tokenizer.decode([i]) if m else "\0" for i, m in zip(ids, mask, strict=True))
    return tokenizer.decode(ids), [part for part in learned.split("\0") if part]


FLOW = [CALLED, RESULT, FOUR]
TURNS = [FOUR, said("user", "sure?"), said("assistant", "Yes.")]

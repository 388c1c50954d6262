"""Code reward: runs the program in a response against its tests.

The program is the last fenced block after the response's thinking that is marked as Python or has no language mark.
Its tests are a field of the record, in one of these forms (or as the JSON text of one of them):

    {"inputs": ["1 2\\n", ...], "outputs": ["3\\n", ...]}      standard input, and expected output
    [{"input": "1 2\\n", "output": "3\\n"}, ...]              the same, pair by pair
    ["assert add(1, 2) == 3", ...]                          code that runs after the program, one test per entry
    "def check(): ...\\ncheck()"                             code that runs after the program, as one test

Every test runs in a fresh process. Outputs are compared line by line, ignoring spaces at the end of lines and empty
lines at the end. Test code runs in the program's process, so the program can deceive it: if a policy learns to cheat,
tests by output are safer.
"""

import json
import re
import textwrap
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from jaxrlhf.rewards.final_text import answered
from jaxrlhf.rewards.sandbox.sandbox import Limits, run

_OPENING = re.compile(r"(?P<before>.*?)(?<!`)(?P<fence>`{3,}+|~~~)[ \t]*\{?\.?(?P<language>[\w+#-]*)[^`]*")
_MARGIN = re.compile(r"[\s>]*(?:(?:[-*+]|\d+[.)])\s+)*")
"""Marks of quotes and lists before a fence."""
_PYTHON = ("python", "python3", "py")


@dataclass(frozen=True)
class Case:
    """One test: code that runs after the program, or the program's standard input and its expected output."""

    code: str | None = None
    given: str = ""
    expected: str = ""


def passes(
    prompt: str,
    response: str,
    answer: str | None,
    record: Mapping[str, Any],
    *,
    tests_key: str,
    credit: Literal["all", "fraction"],
    time_limit_s: float,
    total_s: float,
    memory_bytes: int,
    output_bytes: int,
    allow_unsandboxed: bool,
    in_thinking: bool = False,
) -> float:
    """Return 1 if the program passes every test, else 0 or the fraction of passed tests; 0 without a program.

    Raises:
      ValueError: The record's tests cannot be read; the response is then unscorable, not wrong.
      RuntimeError: The machine cannot confine programs.
    """
    cases = read_cases(record.get(tests_key), tests_key)
    program = answered(prompt, response, last_program, in_thinking=in_thinking)
    if program is None:
        return 0.0
    end, passed = time.monotonic() + total_s, 0
    for case in cases:
        left_s = end - time.monotonic()
        if left_s <= 0:
            break
        limits = Limits(min(time_limit_s, left_s), memory_bytes, output_bytes, allow_unsandboxed)
        good = _passes(program, case, limits)
        passed += good
        if credit == "all" and not good:
            break
    return passed / len(cases) if credit == "fraction" else float(passed == len(cases))


def last_program(response: str) -> str | None:
    """Return the last closed fenced block in Python; None if there is none."""
    found: str | None = None
    block: list[str] | None = None
    fence = language = ""
    for line in re.split(r"\r?\n", response):
        end = line.strip(" \t>")
        if block is None:
            opened = _OPENING.fullmatch(line)  # else it is inline code
            if opened is not None:
                fence, language = opened["fence"], opened["language"].lower()
                # Text may precede a marked block; tildes without a mark are a line.
                if language in _PYTHON or (fence[0] == "`" and _MARGIN.fullmatch(opened["before"])):
                    block = []
        elif end.startswith(fence) and not end.strip(fence[0]):
            found = "\n".join(block) if language in ("", *_PYTHON) else found
            block = None
        else:
            block.append(line)
    return None if found is None else textwrap.dedent(found)


def read_cases(tests: Any, key: str) -> list[Case]:
    """Read the tests of a record, in any form that the module's docstring lists.

    Raises:
      ValueError: The tests have another form, or there are none.
    """
    if isinstance(tests, str):
        try:
            tests = json.loads(tests)
        except ValueError:
            tests = [tests]
    if isinstance(tests, Mapping) and set(tests) == {"inputs", "outputs"}:
        lists = tests["inputs"], tests["outputs"]
        if all(isinstance(column, list) for column in lists):
            tests = [{"input": given, "output": expected} for given, expected in zip(*lists, strict=True)]
    cases = [_case(test) for test in tests] if isinstance(tests, list) else []
    if not cases or None in cases:
        raise ValueError(f"the record's {key!r} holds no tests that can be read, but {tests!r:.80}")
    return [case for case in cases if case is not None]


def _case(test: Any) -> Case | None:
    match test:
        case str() if test.strip():
            return Case(code=test)
        case {"input": str(given), "output": str(expected), **more} if _of_streams(more):
            return Case(given=given, expected=expected)
    return None


def _of_streams(more: Mapping[Any, Any]) -> bool:
    """Return False if a LiveCodeBench or PrimeIntellect field marks the test as a function call."""
    return more.get("testtype", "stdin") == "stdin" and more.get("type", "stdin_stdout") == "stdin_stdout"


def _passes(program: str, case: Case, limits: Limits) -> bool:
    if case.code is not None:
        return run(program, limits=limits, test=case.code).whole
    ended = run(program, limits=limits, stdin=case.given)
    return ended.status == 0 and _lines(ended.output) == _lines(case.expected)


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().split("\n")]

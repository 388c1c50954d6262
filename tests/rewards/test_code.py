"""Code reward: the program of a response, and its tests."""

import time

import pytest

from jaxrlhf import config
from jaxrlhf.rewards.sandbox import programs
from jaxrlhf.rewards.sandbox.sandbox import Limits, check_sandbox
from jaxrlhf.rewards.scorer import Scorer


@pytest.fixture(scope="module", autouse=True)
def _confining_machine():
    try:
        check_sandbox(Limits(time_s=5.0, memory_bytes=1 << 28, output_bytes=1 << 16))
    except ValueError as error:
        pytest.skip(str(error))


BLOCK = "Text.\n```python\nprint(int(input()) + 1)\n```\nMore text."


@pytest.mark.parametrize(
    ("response", "program"),
    [
        (BLOCK, "print(int(input()) + 1)"),
        ("```\na\n```\n```py\nb\n```", "b"),
        ("```python\na\n```\n```text\nb\n```", "a"),  # the last Python block
        ("```python\na\n```\n```python\nb", "a"),  # the last closed block
        ("1. So:\n   ```python\n   if a:\n       b\n   ```", "if a:\n    b"),
        ("```a``` is used:\n```python\nb\n```", "b"),  # inline code is no block
        ("```python title=sum.py\na\n```", "a"),
        ("```python\n```", ""),
        ("````python\na = '```'\n````", "a = '```'"),
        ("~~~python\na\n~~~", "a"),
        ("~~~\nText.\n```python\na\n```", "a"),  # a line of tildes
        ("1. ```python\n   if a:\n       b\n   ```", "if a:\n    b"),
        ("The program: ```python\na\n```", "a"),
        ("Write ``` first:\n```python\na\n```", "a"),
        ("```{.python}\r\na\r\n```\r\n", "a"),
        ("```python\nprint('a\x0cb')\n```", "print('a\x0cb')"),
        ("`" * 60_000 + "\n```python\na\n```", None),  # a fence that is not closed
        ("a", None),
        ("", None),
        ("```python\na", None),
    ],
)
def test_the_program_is_the_last_block(response, program):
    assert programs.last_program(response) == program


INCREMENT = {"inputs": ["1\n", "2\n", "3\n", "x\n"], "outputs": ["2", "3 \n\n", "5\n", "0\n"]}  # two right, two not


def code(response: str, tests, credit="fraction", **changes) -> float:
    settings = vars(config.CodeReward(credit=credit, **changes))
    return programs.passes("", response, None, {"tests": tests}, **{k: v for k, v in settings.items() if k != "weight"})


def test_credit_is_the_share_of_tests_or_all_of_them():
    assert code(BLOCK, INCREMENT) == 0.5
    assert code(BLOCK, INCREMENT, credit="all") == 0.0
    assert code(BLOCK, [{"input": "1", "output": "2\n"}, {"input": "8", "output": "9"}], credit="all") == 1.0
    assert code(BLOCK, '{"inputs": ["1"], "outputs": ["2"]}') == 1.0
    assert code("no program", INCREMENT) == 0.0
    defined = "```python\ndef add(a, b):\n    return a + b\n```"
    assert code(defined, ["assert add(1, 2) == 3", "assert add(1, 1) == 3", "assert add('a', 'b') == 'ab'"]) == 2 / 3
    assert code(defined, "def check():\n    assert add(1, 2) == 3\ncheck()", credit="all") == 1.0
    assert code("```python\nsyntax error\n```", ["assert True"]) == 0.0


def test_tests_beyond_the_time_limit_fail():
    slow = "```python\nimport time\ntime.sleep(60 if input() == 'slow' else 0)\nprint(1)\n```"
    tests = {"inputs": ["quick", "slow", "quick", "quick"], "outputs": ["1"] * 4}
    assert code(slow, tests, time_limit_s=1.0, total_s=10.0) == 0.75
    started = time.monotonic()
    assert code(slow, {"inputs": ["slow"] * 50, "outputs": ["1"] * 50}, time_limit_s=0.4, total_s=1.0) == 0.0
    assert time.monotonic() - started < 3


@pytest.mark.parametrize(
    "tests",
    [
        *(None, [], "", 5, {}, [5], {"inputs": ["1"], "outputs": ["1", "2"]}, {"inputs": [1], "outputs": ["1"]}),
        {"inputs": "12", "outputs": "34"},  # texts instead of lists
        {"inputs": ["1"], "outputs": ["1"], "fn_name": "add"},
        [{"input": "1", "output": "1", "testtype": "functional"}],
        [{"input": "1", "output": "1", "type": "function_call", "fn_name": "add"}],
    ],
)
def test_tests_that_cannot_be_read_are_an_error_and_not_a_wrong_answer(tests):
    with pytest.raises(ValueError, match=r"tests that can be read|shorter|longer"):
        code(BLOCK, tests)


def test_programs_are_scored_through_the_pool():
    part = config.CodeReward(credit="fraction", time_limit_s=2.0)
    responses = [BLOCK, "none", "```python\nwhile True: pass\n```", BLOCK]
    records = [{"tests": INCREMENT}, {"tests": INCREMENT}, {"tests": ["assert True"]}, {}]
    with Scorer(config.Rewards(parts=(part,))) as scorer:
        scores = scorer.score(["p"] * 4, responses, [None] * 4, records)
        assert [(f.part, f.index, f.cause) for f in scorer.failures] == [("code", 3, "exception")]
    assert scores.score_B.tolist() == [0.5, 0.0, 0.0, 0.0] and scores.scorable_B.tolist() == [True] * 3 + [False]


def test_a_total_beyond_the_time_of_a_call_is_refused():
    with pytest.raises(ValueError, match=r"total_s=25 must be below Rewards.timeout_s=20"):
        config.Rewards(parts=(config.CodeReward(),), timeout_s=20.0)

"""Numbers as people write them, and the rules that read them."""

import time
from decimal import Decimal

import pytest

from jaxrlhf.rewards.answers import gsm8k, last_number, marked_number
from jaxrlhf.rewards.formats import matches

MINUS = "\N{MINUS SIGN}"


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("72", "72"),
        ("072", "72"),
        ("1,234", "1234"),
        ("1,234,567.80", "1234567.8"),
        ("12,34,567", "1234567"),  # Indian grouping
        ("$18", "18"),
        ("\\$18", "18"),
        ("$ 18.50", "18.5"),
        ("€7", "7"),
        ("£1,000", "1000"),
        ("7€", "7"),
        ("20%", "20"),
        ("12.5 %", "12.5"),
        ("-3", "-3"),
        (f"{MINUS}3", "-3"),
        ("+3", "3"),
        ("-$5", "-5"),
        ("$-5", "-5"),
        ("-0", "0"),
        (".5", "0.5"),
        ("-.5", "-0.5"),
        ("42.", "42"),
        ("3.14.", "3.14"),
        ("42 apples", "42"),
        ("42kg", "42"),
        ("5/week", "5"),
        ("1e3", "1000"),
        ("2.5e-1", "0.25"),
        ("123456789012345678901234567890123", "123456789012345678901234567890123"),
        ("-123456789012345678901234567890123", "-123456789012345678901234567890123"),
        ("1,23,4", None),
        ("1234,567", None),
        ("1.2.3", None),
        ("3/4", None),
        ("1,00", None),
        ("about 5", None),
        ("five", None),
        ("", None),
        ("-", None),
        ("$", None),
        (".", None),
    ],
)
def test_number_after_the_mark(text, value):
    expected = None if value is None else Decimal(value)
    assert marked_number(f"so it is\n#### {text}") == expected
    assert marked_number(f"####{text}\n") == expected


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("She has 3 apples and 4 pears, so 7.", "7"),
        ("the answer is $1,234.50!", "1234.5"),
        ("from 10-12 days", "12"),
        ("5-3=2", "2"),
        ("x = -8", "-8"),
        ("x=-8", "-8"),
        (f"5 {MINUS} 8 = {MINUS}3", "-3"),
        ("(7)-2", "2"),
        ("**42**", "42"),
        ("\\boxed{42}", "42"),
        ("1. first\n2. second", "2"),
        ("7 is right, not 1.2.3", "7"),
        ("no number", None),
        ("", None),
    ],
)
def test_last_number_in_a_text(text, value):
    assert last_number(text) == (None if value is None else Decimal(value))


@pytest.mark.parametrize(
    ("response", "answer", "strict", "flexible"),
    [
        ("3+4=7\n#### 7", "7", 1, 1),
        ("3+4=7\n#### 7.00", "7", 1, 1),
        ("#### 1,000", "1000", 1, 1),
        ("#### 1000", "1,000", 1, 1),
        ("#### 6\nno wait\n#### 7", "7", 1, 1),  # the last mark counts
        ("#### 7\nno wait\n#### 6", "7", 0, 0),
        ("The answer is 7.", "7", 0, 1),
        ("#### 7 because 2+5", "7", 1, 0),
        ("#### The answer is 7", "7", 0, 1),
        ("#### 7\n####", "7", 0, 1),
        ("#### 70", "7", 0, 0),
        ("", "7", 0, 0),
        ("#### 7", "4+3=7\n#### 7", 1, 1),  # a reference with its worked solution
        ("#### -7", "7", 0, 0),
        ("#### 20%", "20", 1, 1),
    ],
)
def test_strict_and_flexible(response, answer, strict, flexible):
    assert gsm8k("", response, answer, {}, method="strict") == strict
    assert gsm8k("", response, answer, {}, method="flexible") == flexible


@pytest.mark.parametrize("answer", [None, "", "unknown", "#### none"])
def test_a_missing_reference_is_an_error_rather_than_a_wrong_answer(answer):
    with pytest.raises(ValueError, match="reference"):
        gsm8k("", "#### 7", answer, {})


@pytest.mark.parametrize(
    "text", ["9" * 20_000, "1," * 10_000, "1,22" * 5_000, "-" * 20_000, "1.2" * 5_000, ",111" * 5_000]
)
def test_reading_numbers_takes_linear_time(text):
    start = time.perf_counter()
    last_number(text + "x")
    marked_number("####" + text)
    assert time.perf_counter() - start < 0.5


def test_format_is_a_full_match():
    pattern = r"(?s)<think>.*</think>\s*####\s*-?\d+"
    assert matches("", "<think>a\nb</think>\n#### 7", None, {}, pattern=pattern) == 1.0
    assert matches("", "<think>a\nb</think>\n#### 7 .", None, {}, pattern=pattern) == 0.0

"""Rewards for a correct final number.

Numbers are read as people write them (`$1,234.50`, `-3`, `.5`, `20%`, `1e3`) and compared as exact decimals, so `3.50`
equals `3.5`. Currency and percent signs are ignored: `20%` is 20.
"""

import re
from collections import deque
from collections.abc import Mapping
from decimal import Decimal
from typing import Any, Literal

from jaxrlhf.rewards.final_text import answered, without_gaps

MARK = "####"

# A sign counts only if it cannot be a minus between two terms ("10-12"). A number neither begins nor ends inside
# another number ("1.2.3", "3/4", "1,23,4"), so malformed numbers do not match.
_NUMBER = re.compile(
    r"""
    (?<!\d)(?<!\d[.,/])
    (?P<sign>(?<![\w)\]])[-+\u2212])?
    (?:\\?[$€£]\s?(?P<inner_sign>[-+\u2212])?)?
    (?P<digits>
      (?: \d{1,3}(?:,\d{2,3})*,\d{3} | \d+ ) (?:\.\d+)?
      | (?<!\w) \.\d+
    )
    (?P<exponent>[eE][-+]?\d{1,3}(?!\d))?
    (?![.,/]?\d)
    """,
    re.VERBOSE,
)


def last_number(text: str) -> Decimal | None:
    """Return the last number anywhere in the text; None if there is none."""
    found = deque(_NUMBER.finditer(text), maxlen=1)
    return _value(found[0]) if found else None


def marked_number(text: str) -> Decimal | None:
    """Return the number right after the last `####`; None if there is no mark or no number follows it.

    The last mark counts, as in verl, so that a response that corrects itself is judged by its last answer.
    """
    _, mark, tail = text.rpartition(MARK)
    found = _NUMBER.match(tail.lstrip(" \t\r\n*_`")) if mark else None  # `#### **5**` is emphasized
    return None if found is None else _value(found)


def gsm8k(
    prompt: str,
    response: str,
    answer: str | None,
    record: Mapping[str, Any],
    *,
    method: Literal["strict", "flexible"] = "strict",
    in_thinking: bool = False,
) -> float:
    """Return 1 if the response's final number equals the reference answer, else 0.

    Args:
      answer: Number, or worked solution that ends in `#### number`.
      method: `strict` reads the number after the last `####`, `flexible` the last number of the response.
      in_thinking: True also reads an answer inside the thinking.

    Raises:
      ValueError: The reference holds no number; the response is then unscorable, not wrong.

    Source: Cobbe et al. 2021 (arXiv:2110.14168), answer format of the data set.
    """
    expected, read = _reference(answer), marked_number if method == "strict" else last_number
    given = answered(prompt, response, lambda text: read(without_gaps(text)), in_thinking=in_thinking)
    return float(given == expected)


def _reference(answer: str | None) -> Decimal:
    if answer is None:
        raise ValueError("this reward compares with a reference answer, and the record has none")
    plain = without_gaps(answer)
    if MARK in plain:
        expected = marked_number(plain)
    else:
        found = _NUMBER.match(plain.strip())
        expected = None if found is None else _value(found)
    if expected is None:
        raise ValueError(f"the reference answer {answer[:80]!r} is not a number")
    return expected


def _value(found: re.Match[str]) -> Decimal:
    digits = found["digits"].replace(",", "") + (found["exponent"] or "")
    negative = {found["sign"], found["inner_sign"]} & {"-", "\u2212"}
    return Decimal("-" + digits if negative else digits)

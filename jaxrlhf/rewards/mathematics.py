"""Is the final answer right, as mathematics? `\\frac{1}{2}`, `0.5` and `2/4` are one answer.

Reading and comparing is done by math-verify over SymPy. Its own time limits are signals, which
only a main thread may set; they are off here, since the pool limits every call.
"""

import logging
import re
from collections.abc import Mapping
from typing import Any

from jaxrlhf.config import Refusal

try:
    from math_verify import parse, verify
except ModuleNotFoundError as error:
    raise Refusal(f"MathReward needs math-verify ({error}): pip install 'jaxrlhf[math]'") from error

BOX = re.compile(r"\\(?:boxed|fbox)\s*(?=\{)")
DELIMITER = re.compile(r"(?<!\\)\$")  # of a formula; `\$` is the sign of dollars

# math-verify reads `1\,000` as 1 times 0, and nothing that has a stop at the end of its box.
THOUSANDS = re.compile(r"(?<![\d.,^_])\d{1,3}(?:(?:\\[ ,:;!]|[~ \u00a0\u2009\u202f])\d{3})+(?!\d)")
STOP = re.compile(r"(?<!\\right)(?<![{\\.,;\s])\s*[.,;]\s*(?=})")

logging.getLogger("math_verify").setLevel(logging.ERROR)  # else it warns that it has no time limit


def same_answer(prompt: str, response: str, answer: str | None, record: Mapping[str, Any]) -> float:
    """1 if the response's final answer equals the reference answer, else 0.

    The final answer is what the last `\\boxed{}` or `\\fbox{}` holds; without one, what math-verify
    finds last: a formula in dollar signs, a number, or what follows "the final answer is".
    `1\\,000` and `1 000` are 1000, and a full stop at the end of a box is none of the answer.

    Args:
      answer: An expression in LaTeX or plain text, with or without its box or dollar signs.

    Raises:
      ValueError: If the reference cannot be read; the response is then unscorable, not wrong.
    """
    if answer is None:
        raise ValueError("this reward compares with a reference answer, and the record has none")
    enclosed = answer if BOX.search(answer) or DELIMITER.search(answer) else rf"\boxed{{{answer}}}"
    expected = parse(_readable(enclosed), parsing_timeout=None)
    if not expected:
        raise ValueError(f"math-verify cannot read the reference answer {answer[:80]!r}")
    *before, last = BOX.split(response)
    given = parse(_readable(r"\boxed" + last if before else response), parsing_timeout=None)
    return float(verify(expected, given, timeout_seconds=None))


def _readable(text: str) -> str:
    """The text as math-verify reads it right: boxes of one form, without a stop at their end, and whole numbers."""
    return STOP.sub("", THOUSANDS.sub(lambda number: re.sub(r"\D", "", number[0]), BOX.sub(r"\\boxed", text)))

"""Math reward: compares final answers as mathematics, so `\\\\frac{1}{2}`, `0.5` and `2/4` are equal.

An answer is read as a whole: a quantity with its unit, a list, an interval, a relation, a table, or words. An answer
that cannot be read as a whole is compared as text, and numbers inside it are not compared. docs/rewards.md lists the
decisions behind these rules.
"""

import re
from collections.abc import Mapping
from typing import Any

from jaxrlhf.rewards.final_text import answered
from jaxrlhf.rewards.mathematics.equality import equal, rounds
from jaxrlhf.rewards.mathematics.expressions import number, operation, real
from jaxrlhf.rewards.mathematics.options import same_option, text_of_option
from jaxrlhf.rewards.mathematics.reading import read_answer, squeezed
from jaxrlhf.rewards.mathematics.spelling import LONGEST, undressed, without_commas
from jaxrlhf.rewards.mathematics.stated import reference_text, stated_answer
from jaxrlhf.rewards.mathematics.values import Quantity

_LOGARITHM = re.compile(r"\\?(?<![A-Za-z])log(?![A-Za-z_])(?!\s*_)")
_INDIAN = re.compile(r"(?<![\d,.])\d{1,2}(?:,\d\d)+,\d{3}(?![\d,])")


def same_answer(
    prompt: str, response: str, answer: str | None, record: Mapping[str, Any], *, in_thinking: bool = False
) -> float:
    """Return 1 if the response's final answer equals the reference answer, else 0.

    Args:
      answer: An expression in LaTeX or plain text, with or without its box or dollar signs.
      in_thinking: True also reads an answer inside the thinking.

    Raises:
      ValueError: There is no reference answer; the response is then unscorable, not wrong.
    """
    if answer is None:
        raise ValueError("this reward compares with a reference answer, and the record has none")
    expected = reference_text(answer)
    if expected is None:
        raise ValueError(f"the reference answer {answer[:80]!r} is empty")
    given = answered(prompt, response, stated_answer, in_thinking=in_thinking)
    return float(given is not None and same_text(given, expected))


def same_text(given: str, expected: str) -> bool:
    """Return whether two answers are equal, as text, as an option or as mathematics."""
    if squeezed(given) == squeezed(expected) or same_option(given, expected):
        return True
    text = text_of_option(given)
    if text is not None and same_text(text, expected):
        return True
    if len(given) > LONGEST or len(expected) > LONGEST:
        return False
    reference, bare = without_commas(undressed(expected)), undressed(given)
    # The answer 100,200 may be one number or two: it is read in both ways and compared with the reference.
    ways = [without_commas(bare), bare, *_exact(bare)]
    # A logarithm without its base may be natural or decimal.
    wanted = [reference, _LOGARITHM.sub(r"\\lg", reference)]
    ways += [_INDIAN.sub(lambda found: found[0].replace(",", ""), bare), _LOGARITHM.sub(r"\\lg", ways[0])]
    pairs = dict.fromkeys((way, each) for way in ways for each in wanted)
    return any(_same_values(read_answer(way), read_answer(each)) for way, each in pairs)


def _same_values(given: Any, expected: Any) -> bool:
    """Return whether two values are equal; percent below a reference of less than 1 are its hundredth."""
    if isinstance(given, Quantity) and isinstance(expected, Quantity) and given.percent and not expected.percent:
        size = real(expected.expr)
        if size is not None and abs(size) < 1 and not expected.unit:
            given = Quantity(operation("div", given.expr, number(100)))
    return equal(given, expected)


def _exact(text: str) -> list[str]:
    """Return the exact value before its rounded value, such as 1/6 of `1/6 ≈ 0.1667`; empty without a rounded value."""
    exact, sign, rounded = text.partition(r"\approx")
    if not sign or not exact.strip():
        return []
    values = read_answer(exact.strip()), read_answer(rounded.strip())
    return [exact.strip()] if rounds(*values) else []

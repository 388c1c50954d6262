"""Search for reference answers that cannot be parsed as mathematics."""

import re
from collections.abc import Sequence

from jaxrlhf.rewards.mathematics.reading import read_answer
from jaxrlhf.rewards.mathematics.spelling import undressed, without_commas
from jaxrlhf.rewards.mathematics.stated import reference_text
from jaxrlhf.rewards.mathematics.values import Words


def read_as_text(answers: Sequence[str]) -> list[str]:
    """Return the references with digits or formulas that can only be compared as text; plain words are left out."""
    found = []
    for answer in answers:
        text = reference_text(answer)
        if text is None or not re.search(r"[\d\\^]", re.sub(r"\\(?:text|mathrm|mbox)[a-z]*", "", text)):
            continue
        if isinstance(read_answer(without_commas(undressed(text))), Words):
            found.append(answer)
    return found

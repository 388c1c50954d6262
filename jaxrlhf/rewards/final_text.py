"""Text of a response behind its thinking, and numbers with gaps between thousands."""

import re

_BEGIN, _END = "<think>", "</think>"
_GAPS = re.compile(r"(?<![\d.,^_])(\d{1,3})((?:(?:\{,\}|\\[ ,:;!]|[~ \u00a0\u2009\u202f])\d{3})+)(?!\d|[ ~]?/\d)")


def after_thinking(prompt: str, response: str) -> str:
    """Return what stands behind the last end of thinking; nothing of a response that was cut inside its thinking."""
    said = response.rpartition(_END)[2]
    if said == response and prompt.rstrip().endswith(_BEGIN):
        return ""  # the prompt began the thinking, and nothing ended it
    return said.rpartition(_BEGIN)[0] if _BEGIN in said else said


def without_gaps(text: str) -> str:
    """Return a text whose numbers have no spaces, and no commas of LaTeX, between thousands: `1{,}000` is 1000."""
    return _GAPS.sub(lambda found: found[1] + re.sub(r"\D", "", found[2]), text)

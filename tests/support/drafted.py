"""Verification of every draft, whatever it is expected to gain."""

from jaxrlhf.engine.speculation.choice import Speculation


def widest(speculation: Speculation, rows: int, active: int) -> int:
    """The most tokens of a row that one verification may run; takes the place of `Speculation._width`."""
    return max((width for width in speculation.widths if rows * width <= speculation._most_tokens), default=1)

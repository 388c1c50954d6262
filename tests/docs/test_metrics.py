"""Every number that a run writes is explained in docs/metrics.md: what tests of whole runs ask of theirs."""

import re
from pathlib import Path

from tiny_runs import records

PAGE = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text()
STANDS_FOR = {  # what the page leaves open in a name
    "*": "[a-z_]+",
    "<phase>": "(generate|prepare|relayout|reward|update)",
    "<reward>": "format",  # of these runs
    "<role>": "(actor|critic)",
    "<age>": "[0-9]+",
    "<pool>": "[a-z]+",
    "<tool>": "[A-Za-z_]+",
}


def names(page: str) -> list[str]:
    """Return the names of the metrics in the rows of the table."""
    firsts = [line.split("|")[1] for line in page.splitlines() if line.startswith("| `")]
    return [name for cell in firsts for name in re.findall("`(.+?)`", re.sub(r"\(.*?\)", "", cell))]


def pattern(name: str) -> str:
    """A regular expression of what a name on the page stands for."""
    parts = re.split(r"(\*|<\w+>)", name)
    return "".join(STANDS_FOR.get(part) or re.escape(part) for part in parts)


PATTERN = re.compile("|".join(map(pattern, names(PAGE))))


def test_a_name_on_the_page_stands_for_these():
    assert names("| `a/b` (`c` given), `a/<role>_d` | of `e/f` |\n|---|---|\n| `time/*_s` | |") == [
        *("a/b", "a/<role>_d"),
        "time/*_s",
    ]
    known = ["step", "score/format", "time/step_s", "memory/update_bytes", "router/critic_loss"]
    unknown = ["steps", "score/other", "score/me", "time/steps", "memory/other_bytes", "router/critic"]
    assert [name for name in known + unknown if PATTERN.fullmatch(name)] == known


def unexplained(workdir: Path, *, files: int) -> list[str]:
    """Names that a run wrote and the page does not have, for tests of whole runs."""
    found = list(workdir.rglob("metrics.jsonl"))
    written = {name for file in found for record in records(file) for name in record}
    assert {"eval/accuracy", "kl/ref", "policy/entropy", "time/eval_s"} <= written
    assert len(found) == files
    return [name for name in sorted(written) if not PATTERN.fullmatch(name)]

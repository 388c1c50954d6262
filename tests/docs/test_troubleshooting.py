"""Names in docs/troubleshooting.md: metrics that docs/metrics.md explains, settings, commands, errors and files."""

import re
from pathlib import Path

from tests.docs.test_coming_from import problem
from tests.docs.test_metrics import PATTERN, names

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "troubleshooting.md").read_text()
EXPLAINED = set(names((ROOT / "docs" / "metrics.md").read_text()))
SOURCE = "\n".join(path.read_text() for path in sorted((ROOT / "jaxrlhf").rglob("*.py")))
NOT_OURS = {"ray status", "~/.cache/jaxrlhf/xla"}
PARTIAL = {"total_s"}  # of several rewards


def is_there(name: str) -> bool:
    """True if a name in code on the page is one of the repository's."""
    if name in NOT_OURS:
        return True
    if name.startswith(("jaxrlhf[", "pip install")):
        return all(extra in (ROOT / "pyproject.toml").read_text() for extra in re.findall(r"\[(\w+)\]", name))
    if re.fullmatch(r"[a-z_]+(\.jsonl|\.json|\.log|\.md|/)", name) or name.isupper() or name in PARTIAL:
        return name.rstrip("/") in SOURCE
    if name.startswith("jaxrlhf ") or (name.isidentifier() and name[0].islower()) or "." in name or "=" in name:
        return problem(name.removesuffix(":")) is None
    if name.isidentifier():
        return f"class {name}(" in SOURCE
    return name in EXPLAINED or PATTERN.fullmatch(name) is not None


def test_names_that_are_wrong_are_found():
    wrong = [
        "score/meen",
        "rollout.slot",
        "jaxrlhf fly",
        "HostGone",
        "jaxrlhf[cudas]",
        "samples.json.gz",
        "JAX_CACHE_OFF",
    ]
    assert [name for name in wrong if is_there(name)] == []


def test_what_helps_is_there():
    found = re.findall("`([^`]+)`", PAGE)
    assert len(found) > 120
    assert [name for name in found if not is_there(name)] == []

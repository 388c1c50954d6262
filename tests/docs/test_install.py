"""Installation as documented: the extras are in pyproject.toml, and the changelog starts with the version."""

import re
import tomllib
from pathlib import Path

from jaxrlhf.version import __version__

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
SOURCES = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "notebooks").glob("*.ipynb")]
CODE = [path for folder in ("jaxrlhf", "configs", "scripts") for path in (ROOT / folder).rglob("*.py")]
HISTORY = ROOT / "docs" / "changelog.md"  # it names what has been removed


def extras(text: str) -> set[str]:
    """Extras of `jaxrlhf[a,b]` and of a checkout's `.[a,b]`."""
    named = re.findall(r"(?:jaxrlhf|(?<=['\" ])\.)\[([a-z][\w, -]*)\]", text)
    return {name.strip() for names in named for name in names.split(",")}


def test_extras_are_found():
    text = "pip install 'jaxrlhf[a, b-c]' and -e '.[d]' or .[e]; not x.[f], jaxrlhf[0]"
    assert extras(text) == {"a", "b-c", "d", "e"}


def test_extras_exist():
    told = {path: extras(path.read_text()) for path in [*SOURCES, *CODE] if path != HISTORY}
    assert len(set().union(*told.values())) > 15
    unknown = {path.name: names - set(PROJECT["optional-dependencies"]) for path, names in told.items()}
    assert {name: names for name, names in unknown.items() if names} == {}


def test_the_changelog_starts_with_the_version():
    assert HISTORY.read_text().startswith(f"# Changelog\n\n## {__version__}, ")

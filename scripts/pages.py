"""Folders of pages and results, and the parts of pages that scripts write; two HTML comments mark each part."""

import argparse
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
RESULTS = ROOT / "scripts" / "benchmarks" / "results"


def add_folders(parser: argparse.ArgumentParser) -> None:
    """Add flags for the folders that a script writes to."""
    parser.add_argument("--results", type=Path, default=RESULTS, help="where JSON files are read and written")
    parser.add_argument("--docs", type=Path, default=DOCS, help="where pictures and tables are written")


def renew(page: Path, parts: Mapping[str, str]) -> None:
    """Replace parts of a page file, by name."""
    page.write_text(written(page.read_text(encoding="utf-8"), parts), encoding="utf-8")


def written(page: str, parts: Mapping[str, str]) -> str:
    """Return the text of a page with each part between its marks replaced.

    Raises:
      ValueError: The page has no marks for a part.
    """
    for name, text in parts.items():
        start, end = f"<!-- {name} -->", f"<!-- end of {name} -->"
        before, opened, rest = page.partition(start)
        _, closed, after = rest.partition(end)
        if not (opened and closed):
            raise ValueError(f"the page has no place for {name!r}; mark it with {start} and {end}")
        page = f"{before}{start}\n{text}\n{end}{after}"
    return page

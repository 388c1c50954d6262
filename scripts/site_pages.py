"""Hook of the documentation site (mkdocs.yml): README as its overview, and links to files that are no pages.

On GitHub a page may link to anything in the repository; on the site such a link would be dead, and becomes the path.
"""

import posixpath
import re
from collections.abc import Callable
from itertools import cycle
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
OVERVIEW = "docs/overview.md"
"""README's place among the pages."""
_CODE = re.compile(r"(^```.*?^```$)", re.DOTALL | re.MULTILINE)
_LINK = re.compile(r"\[([^\]\n]*)\]\((?!https?:|#)([^)#\n]*)(#[^)\n]*)?\)")


def on_files(files: Files, config: Any) -> Files:
    """Add README, with its links as from docs/."""
    text = (ROOT / "README.md").read_text()
    moved = _with_links(text, lambda link: _written(link[1], posixpath.relpath(link[2], "docs"), link[3]))
    files.append(File.generated(config, posixpath.basename(OVERVIEW), content=moved))
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Turn links out of docs/ into the paths that they lead to, but for those to README."""
    folder = posixpath.dirname(posixpath.join("docs", page.file.src_uri))

    def within(link: re.Match[str]) -> str:
        words, target, anchor = link.groups()
        path = posixpath.normpath(posixpath.join(folder, target))
        if path == "README.md":
            return _written(words, posixpath.relpath(OVERVIEW, folder), anchor)
        if path.startswith("docs/"):
            return link[0]
        return words if path in words else f"{words} (`{path}`)"

    return _with_links(markdown, within)


def _with_links(markdown: str, change: Callable[[re.Match[str]], str]) -> str:
    """Change links of prose, and leave code as it is."""
    parts = _CODE.split(markdown)
    return "".join(part if code else _LINK.sub(change, part) for part, code in zip(parts, cycle((False, True))))


def _written(words: str, target: str, anchor: str | None) -> str:
    return f"[{words}]({target}{anchor or ''})"

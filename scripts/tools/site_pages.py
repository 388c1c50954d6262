"""Hook of the documentation site (mkdocs.yml): adds README as the overview, and changes links.

On GitHub a page may link to any file of the repository. On the site a link to a file outside docs/ would be dead, so
the path replaces the link. Settings and functions that a page names in code, such as `PPO` or `algos.gae`, become links
to the reference.
"""

import ast
import posixpath
import re
from collections.abc import Callable
from functools import cache
from itertools import cycle
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[2]
OVERVIEW = "docs/overview.md"
"""Path of README among the pages."""
LEFT_ALONE = re.compile(r"(^```.*?^```$|^#[^\n]*$)", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"\[([^\]\n]*)\]\((?!https?:|#)([^)#\n]*)(#[^)\n]*)?\)")

_NAME = re.compile(r"(?<![\[`])`(?:[\w.]+=)?([A-Za-z_][\w.:]*)(?:\([^`\n]*\))?`(?![\]`])")


def on_files(files: Files, config: Any) -> Files:
    """Add README to the pages, with links relative to docs/."""
    text = (ROOT / "README.md").read_text()
    moved = _in_prose(LINK, text, lambda link: _written(link[1], posixpath.relpath(link[2], "docs"), link[3]))
    files.append(File.generated(config, posixpath.basename(OVERVIEW), content=moved))
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Replace links out of docs/ by their paths, except links to README, and link names in code to the reference."""
    folder = posixpath.dirname(posixpath.join("docs", page.file.src_uri))

    def within(link: re.Match[str]) -> str:
        words, target, anchor = link.groups()
        path = posixpath.normpath(posixpath.join(folder, target))
        if path == "README.md":
            return _written(words, posixpath.relpath(OVERVIEW, folder), anchor)
        if path.startswith("docs/"):
            return link[0]
        return words if path in words else f"{words} (`{path}`)"

    return _in_prose(_NAME, _in_prose(LINK, markdown, within), _to_reference)


def _to_reference(name: re.Match[str]) -> str:
    anchor = _reference().get(name[1])
    return name[0] if anchor is None else f"[{name[0]}][{anchor}]"


@cache
def _reference() -> dict[str, str]:
    """Return the anchors of the reference, by the names that pages use: `PPO`, `algos.gae`, `dataflows.ppo:learn`."""
    found: dict[str, str] = {}
    for page in sorted((ROOT / "docs" / "reference").glob("*.md")):
        for module in re.findall(r"^::: (\S+)", page.read_text(), re.MULTILINE):
            room = module.removeprefix("jaxrlhf.")
            for node in ast.parse((ROOT / f"{module.replace('.', '/')}.py").read_text()).body:
                if isinstance(node, ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node) and node.name[0] != "_":
                    of_function = f"{room}:{node.name}", f"{room.partition('.')[0]}.{node.name}"
                    names = (node.name,) if isinstance(node, ast.ClassDef) else of_function
                    found |= dict.fromkeys(names, f"{module}.{node.name}")
    return found


def _in_prose(pattern: re.Pattern[str], markdown: str, change: Callable[[re.Match[str]], str]) -> str:
    """Replace matches of a pattern, except in code blocks and headings."""
    parts = LEFT_ALONE.split(markdown)
    return "".join(part if alone else pattern.sub(change, part) for part, alone in zip(parts, cycle((False, True))))


def _written(words: str, target: str, anchor: str | None) -> str:
    return f"[{words}]({target}{anchor or ''})"

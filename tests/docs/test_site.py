"""The documentation as a site: it builds without a warning, no link of it is dead, and it asks no other host."""

import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace
from urllib.parse import unquote, urlsplit

import pytest

import jaxrlhf.config
from jaxrlhf.__main__ import COMMANDS
from scripts.tools import site_pages

ROOT = Path(__file__).parents[2]
LOADED = {("script", "src"), ("link", "href"), ("img", "src"), ("iframe", "src")}
"""Elements that a browser fetches by itself, and the attributes that name what."""


class Page(HTMLParser):
    """Anchors, links and fetched addresses of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        self.anchors |= {given[name] for name in ("id", "name") if name in given}
        for name in ("href", "src"):
            if name in given and given.get("rel") != "canonical":
                self.links.append(given[name])
                if (tag, name) in LOADED:
                    self.loaded.append(given[name])


def pages(site: Path) -> dict[Path, Page]:
    return {path.resolve(): Page(path.read_text()) for path in sorted(site.rglob("*.html"))}


def dead_links(site: Path) -> list[str]:
    """Links within the site to a file or an anchor that is not there."""
    found, known = [], pages(site)
    for path, page in known.items():
        for link in page.links:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            start = site if parts.path.startswith("/") else path.parent
            target = (start / unquote(parts.path).lstrip("/")).resolve() if parts.path else path
            target = target / "index.html" if target.is_dir() else target
            anchors = known[target].anchors if target in known else set()
            if not target.exists() or (parts.fragment and target in known and unquote(parts.fragment) not in anchors):
                found.append(f"{path.relative_to(site.resolve())}: {link}")
    return found


def test_dead_links_are_found(tmp_path):
    (tmp_path / "deeper").mkdir()
    (tmp_path / "index.html").write_text(
        '<h1 id="top"><a href="deeper/#here">1</a><a href="#top">2</a><a href="no">3</a>'
    )
    (tmp_path / "deeper" / "index.html").write_text(
        '<a href="..">4</a><a href="../#gone">5</a><a href="https://x.y/z">6</a>'
    )
    assert dead_links(tmp_path) == ["deeper/index.html: ../#gone", "index.html: deeper/#here", "index.html: no"]


@pytest.mark.parametrize(
    ("place", "written", "shown"),
    [
        (
            "data.md",
            "[rewards](rewards.md#form) [there](https://x.y)",
            "[rewards](rewards.md#form) [there](https://x.y)",
        ),
        ("data.md", "[`a/b.py`](../a/b.py) [the task](../scripts/task.py)", "`a/b.py` the task (`scripts/task.py`)"),
        ("data.md", "[begin](../README.md#use-it)", "[begin](overview.md#use-it)"),
        (
            "reference/data.md",
            "[data](../data.md) [begin](../../README.md)",
            "[data](../data.md) [begin](../overview.md)",
        ),
        ("data.md", "```python\nnorms[0](hidden)\n```\n[a](../a.py)", "```python\nnorms[0](hidden)\n```\na (`a.py`)"),
        ("data.md", "`a=RLOO(kl=None)`", "[`a=RLOO(kl=None)`][jaxrlhf.config.algorithms.critic_free.RLOO]"),
        ("data.md", "`algos.gae` `gae`", "[`algos.gae`][jaxrlhf.algos.advantages.gae] `gae`"),
        ("data.md", "`dataflows.ppo:learn`", "[`dataflows.ppo:learn`][jaxrlhf.dataflows.ppo.learn]"),
        ("data.md", "# `PPO`\n[`PPO`](a.md)", "# `PPO`\n[`PPO`](a.md)"),
    ],
)
def test_links_lead_to_pages_and_the_reference_or_become_paths(place, written, shown):
    page = SimpleNamespace(file=SimpleNamespace(src_uri=place))
    assert site_pages.on_page_markdown(written, page=page) == shown


def test_links_in_the_repository_lead_to_files():
    written = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    prose = {page: site_pages.LEFT_ALONE.sub("", page.read_text()) for page in written}
    links = [(page, link[2]) for page, text in prose.items() for link in site_pages.LINK.finditer(text)]
    assert len(links) > 100
    assert [(page.name, target) for page, target in links if not (page.parent / target).exists()] == []


def test_every_page_has_its_place_in_the_navigation():
    navigation = (ROOT / "mkdocs.yml").read_text()
    names = [str(path.relative_to(ROOT / "docs")) for path in (ROOT / "docs").rglob("*.md")]
    assert [name for name in sorted(names) if not re.search(rf"[ ]{re.escape(name)}\n", navigation)] == []


def test_every_setting_is_in_the_reference():
    shown = {
        name
        for page in (ROOT / "docs/reference").glob("*.md")
        for name in re.findall("^::: (.+)", page.read_text(), re.M)
    }
    classes = [one for one in vars(jaxrlhf.config).values() if isinstance(one, type)]
    # What makes commands is not for users.
    assert {one.__module__ for one in classes if one.__doc__} - shown == {"jaxrlhf.config.cli.command_line"}


def test_every_command_is_in_the_reference():
    page = (ROOT / "docs/reference/commands.md").read_text()
    assert sorted(re.findall(r"^## jaxrlhf (\w+)$", page, re.MULTILINE)) == sorted(COMMANDS)
    assert sorted(re.findall(r"^::: jaxrlhf\.(\w+)$", page, re.MULTILINE)) == sorted(COMMANDS)


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.mark.slow
def test_the_site_builds_and_no_link_is_dead(site):
    assert dead_links(site) == []
    assert {path.stem for path in (ROOT / "docs").glob("*.md")} - {"index"} < {path.name for path in site.iterdir()}


@pytest.mark.slow
def test_the_site_needs_no_network(site):
    fetched = {address for page in pages(site).values() for address in page.loaded}
    assert fetched and [address for address in fetched if urlsplit(address).netloc] == []

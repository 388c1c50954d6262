"""Picture of the rooms (folders) of the package and their imports, from the source code.

    python -m scripts.tools.draw_rooms   # writes docs/rooms.png

A room is one floor above the highest room that it imports. Imports implied by other imports are not drawn.
"""

import ast
from collections import defaultdict

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from scripts.pages import DOCS, ROOT

PACKAGE = ROOT / "jaxrlhf"
PICTURE = DOCS / "rooms.png"
SINGLE = ("batch", "episode", "pictures", "version")
"""Rooms that are a single file."""
COMMANDS = "command lines"
"""Room of all command lines: the other top-level modules of the package, which nothing imports."""
WIDTH, HEIGHT = 2.0, 0.62


def main() -> None:
    """Draw the picture."""
    graph, lines = imports()
    floors = {room: floor_of(room, graph) for room in graph}
    places = positions(floors)
    figure, axes = plt.subplots(figsize=(13, 1.25 * (1 + max(floors.values()))))
    for room, below in reduced(graph).items():
        for target in below:
            (x, y), (u, v) = places[room], places[target]
            axes.annotate(
                "",
                xy=(u, v + HEIGHT / 2),
                xytext=(x, y - HEIGHT / 2),
                zorder=0,
                arrowprops={"arrowstyle": "-|>", "color": "#8a94a6", "lw": 0.9, "shrinkA": 0, "shrinkB": 0},
            )
    for room, (x, y) in places.items():
        box = plt.Rectangle(
            (x - WIDTH / 2, y - HEIGHT / 2), WIDTH, HEIGHT, fc="#eef3fb", ec="#2f5d9b", lw=1.2, zorder=2
        )
        axes.add_patch(box)
        axes.text(x, y + 0.09, room, ha="center", va="center", fontsize=12, weight="bold", zorder=3)
        axes.text(
            x, y - 0.17, f"{lines[room]:,} lines".replace(",", " "), ha="center", va="center", fontsize=9, zorder=3
        )
    axes.autoscale_view()
    axes.axis("off")
    figure.savefig(PICTURE, dpi=110, bbox_inches="tight")


def imports() -> tuple[dict[str, set[str]], dict[str, int]]:
    """Return the rooms that each room imports anywhere in its files, and the lines of code of each room."""
    rooms = {path.name for path in PACKAGE.iterdir() if path.is_dir() and path.name != "__pycache__"}
    graph: dict[str, set[str]] = defaultdict(set)
    lines: dict[str, int] = defaultdict(int)
    for path in sorted(PACKAGE.rglob("*.py")):
        room = room_of(path.relative_to(PACKAGE).parts[0], rooms)
        if path == PACKAGE / "__init__.py":
            continue
        text = path.read_text()
        lines[room] += len(text.splitlines())
        graph[room] |= {room_of(name, rooms) for name in imported(text)} - {room}
    return dict(graph), dict(lines)


def imported(source: str) -> set[str]:
    """Return the top-level folders and modules of the package that a file imports."""
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and node.module:
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
    below = {name.split(".")[1] for name in names if name.startswith("jaxrlhf.")}
    return {name for name in below if not name.startswith("__")}


def room_of(name: str, rooms: set[str]) -> str:
    """Return the room of a top-level file or folder of the package."""
    stem = name.removesuffix(".py")
    return stem if stem in rooms or stem in SINGLE else COMMANDS


def floor_of(room: str, graph: dict[str, set[str]]) -> int:
    """Return the floor of a room: the length of its longest chain of imports."""
    return 1 + max((floor_of(below, graph) for below in graph.get(room, ())), default=-1)


def reduced(graph: dict[str, set[str]]) -> dict[str, set[str]]:
    """Return the transitive reduction: the imports that other imports do not imply."""

    def below(room: str) -> set[str]:
        return graph[room].union(*(below(target) for target in graph[room])) if graph[room] else set()

    return {room: targets - set().union(*map(below, targets)) for room, targets in graph.items()}


def positions(floors: dict[str, int]) -> dict[str, tuple[float, float]]:
    """Return the center of each room's box, with a row of boxes for each floor."""
    rows: dict[int, list[str]] = defaultdict(list)
    for room, floor in sorted(floors.items()):
        rows[floor].append(room)
    widest = max(map(len, rows.values()))
    step = WIDTH * 1.15
    return {
        room: ((place - (len(row) - 1) / 2) * step * widest / max(len(row), widest * 0.75), floor * 1.25)
        for floor, row in rows.items()
        for place, room in enumerate(row)
    }


if __name__ == "__main__":
    main()

"""The house rules, as functions from files to a list of what breaks them."""

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

FLOORS = {
    "config": 0,
    "batch": 0,
    "runtime": 0,
    "algos": 1,
    "data": 1,
    "tracking": 1,
    "sharding": 1,
    "processes": 1,
    "resharding": 2,
    "rewards": 2,
    "models": 2,
    "batching": 3,
    "engine": 3,
    "checkpoint": 3,
    "workers": 4,
    "planner": 5,
    "single_controller": 5,
    "dataflows": 6,
    "trainer": 7,
}
COMMAND_LINES = 8  # the floor of every other module right in the package
MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 80
VAGUE = {"util", "utils", "helper", "helpers", "common", "base", "misc"}


def floors(package: Path) -> list[str]:
    """Imports that do not point down, and rooms that stand on no floor."""
    found = [f"{room.name}/ is on no floor" for room in _rooms(package) if room.name not in FLOORS]
    for path in sorted(package.rglob("*.py")):
        room = _room(path, package)
        where = path.relative_to(package)
        found += [f"{where} imports {name}; write the whole name" for name in _imports(path) if name.startswith(".")]
        for target in sorted(_rooms_imported(path, package) - {room}):
            here, there = FLOORS.get(room, COMMAND_LINES), FLOORS.get(target, COMMAND_LINES)
            if there >= here:
                found.append(f"{where} (floor {here}) imports {target} (floor {there})")
    return found


def sizes(path: Path) -> list[str]:
    """A file or a function that is too long to read at once."""
    source = path.read_text()
    lines = len(source.splitlines())
    found = [f"{path.name} has {lines} lines, over {MAX_FILE_LINES}"] if lines > MAX_FILE_LINES else []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            if lines > MAX_FUNCTION_LINES:
                found.append(f"{path.name}: {node.name} has {lines} lines, over {MAX_FUNCTION_LINES}")
    return found


def shadowing(path: Path) -> list[str]:
    """A module with the name of one in the standard library."""
    name = path.parent.name if path.name == "__init__.py" else path.stem
    return [f"{path.name} has the name of the standard library's {name}"] if name in sys.stdlib_module_names else []


def vague_names(path: Path) -> list[str]:
    """Modules, classes and functions named after nothing in particular."""
    definitions = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    tree = ast.parse(path.read_text())
    names = [path.stem, path.parent.name, *(node.name for node in ast.walk(tree) if isinstance(node, definitions))]
    words = {name: re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])", name) for name in names}
    return [f"{path.name}: {name}" for name in names if VAGUE & {word.lower() for word in words[name]}]


def undocumented(path: Path) -> list[str]:
    """A module without a docstring."""
    return [] if ast.get_docstring(ast.parse(path.read_text())) else [f"{path.name} has no docstring"]


def imported_packages(path: Path) -> set[str]:
    """Top-level packages that a file imports, anywhere in it."""
    return {name.partition(".")[0] for name in _imports(path)}


def front_door_logic(path: Path) -> list[str]:
    """What a room's `__init__.py` does beyond a docstring, imports, literals and a lazy `__getattr__`."""
    found = []
    for node in ast.parse(path.read_text()).body:
        text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        lazy = isinstance(node, ast.FunctionDef) and node.name in ("__getattr__", "__dir__")
        if not (isinstance(node, ast.Import | ast.ImportFrom) or text or lazy or _is_literal(node) or _is_typing(node)):
            found.append(f"{path.parent.name}/{path.name}:{node.lineno}: {ast.unparse(node).splitlines()[0]}")
    return found


def _rooms(package: Path) -> list[Path]:
    return [path.parent for path in sorted(package.glob("*/__init__.py"))]


def _room(path: Path, package: Path) -> str:
    """The room of a file; a module right in the package is its own."""
    return path.relative_to(package).parts[0].removesuffix(".py")


def _rooms_imported(path: Path, package: Path) -> set[str]:
    """First name below the package in each import: `jaxrlhf.models.hf` gives `models`.

    What the package's own `__init__` offers (`from jaxrlhf import train`) counts as a command
    line, the highest floor; its dunders (`__version__`) do not count.
    """
    below = {name.split(".")[1] for name in _imports(path) if name.startswith(f"{package.name}.")}
    return {name for name in below if not name.startswith("__")}


def _imports(path: Path) -> Iterator[str]:
    """Dotted names of all that a file imports, `from a import b` as `a.b`, anywhere in it."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{'.' * node.level}{node.module or ''}.{alias.name}" for alias in node.names)


def _is_literal(node: ast.stmt) -> bool:
    if not isinstance(node, ast.Assign | ast.AnnAssign) or node.value is None:
        return False
    try:
        ast.literal_eval(node.value)
    except ValueError:
        return False
    return True


def _is_typing(node: ast.stmt) -> bool:
    """`if TYPE_CHECKING:` around imports."""
    guard = isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
    return guard and all(isinstance(child, ast.Import | ast.ImportFrom) for child in node.body)

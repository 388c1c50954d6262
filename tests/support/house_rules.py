"""The house rules, as functions from files to a list of what breaks them."""

import ast
import re
import sys
import tokenize
from collections.abc import Iterator
from functools import cache, lru_cache
from pathlib import Path

FLOORS = {
    "config": 0,
    "batch": 0,
    "episode": 0,
    "pictures": 0,
    "runtime": 0,
    "version": 0,
    "algos": 1,
    "data": 1,
    "tracking": 1,
    "viewer": 2,
    "sharding": 1,
    "processes": 1,
    "resharding": 2,
    "rewards": 2,
    "models": 2,
    "conversations": 2,
    "batching": 3,
    "engine": 3,
    "optimizers": 3,
    "checkpoint": 3,
    "environments": 3,
    "serving": 4,
    "agent_loop": 5,
    "workers": 6,
    "planner": 7,
    "single_controller": 7,
    "dataflows": 8,
    "trainer": 9,
}
COMMAND_LINES = 10  # the floor of every other module right in the package
MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 80
MAX_ROOM_FILES = 16
UNCLEAR_OPENINGS = {"What", "Which", "Where", "How", "Whether", "Of", "As", "Those", "Likewise", "Idem"}
_CODE = re.compile(r"`[^`]*`|^\s*\w+(?:, \w+)*: ", re.MULTILINE)
_UNCLEAR_ENTRY = re.compile(r"^\s+([\w, `*]+): ((?:Of|Idem|As|Those|That|Likewise)\b[^\n]*)", re.MULTILINE)
RETIRED = {
    r"\b[Ii]slands?\b": "local submesh",
    r"\battend_spread\b|\bclass Spread\b": "shared-prefix attention",
    r"\bUNWATCHED\b|\bclass (Watched|Routed)\b": "RouterInputs, RouterOutputs",
    r"\bfor_few_tokens\b|\bfor_slots\b|\bclass Turned\b": "decode layout",
    r"\bhiding\b\(": "mask_bias",
    r"\bmark_refusal\b|\bis_refusal\b": "Refusal",
    r"\bown_model\b|\bOwnModel\b": "CausalLM",
    r"\bclass (Lane|Place|Rewarded|Answered|Ends)\b": "DeviceQueue, RankCoordinates, Returns, PromptGroups",
}
"""Patterns that the package has given up, and the words that it uses in their place."""
DIALECT = {
    r"begun|gone on|go(es)? on\b": "started, resumed, continues",
    r"those that|those which|of whom": "the noun again, and one relative clause",
    r"(?<!picture )drawn (from|by|among|at|with)|drew": "sampled",
    r"(lies|lie) (in|on|at|beside|before|behind)\b": "is stored, is located",
}
"""Words of docstrings and comments that a reader of other frameworks would have to decode, and plain ones."""
CHAINS = re.compile(r"\b(of which|in which case|that of those|which of them)\b")
MOST_CHAINS = 10
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
    lines = len(path.read_text().splitlines())
    found = [f"{path.name} has {lines} lines, over {MAX_FILE_LINES}"] if lines > MAX_FILE_LINES else []
    for node in _nodes(path):
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
    names = [path.stem, path.parent.name, *(node.name for node in _nodes(path) if isinstance(node, definitions))]
    words = {name: re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])", name) for name in names}
    return [f"{path.name}: {name}" for name in names if VAGUE & {word.lower() for word in words[name]}]


def undocumented(path: Path) -> list[str]:
    """A module without a docstring."""
    return [] if ast.get_docstring(_tree(path)) else [f"{path.name} has no docstring"]


def imported_packages(path: Path) -> set[str]:
    """Top-level packages that a file imports, anywhere in it."""
    return {name.partition(".")[0] for name in _imports(path)}


def front_door_logic(path: Path) -> list[str]:
    """Statements of a room's `__init__.py` beyond a docstring, imports, literals and a lazy `__getattr__`."""
    found = []
    for node in _tree(path).body:
        text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        lazy = isinstance(node, ast.FunctionDef) and node.name in ("__getattr__", "__dir__")
        if not (isinstance(node, ast.Import | ast.ImportFrom) or text or lazy or _is_literal(node) or _is_typing(node)):
            found.append(f"{path.parent.name}/{path.name}:{node.lineno}: {ast.unparse(node).splitlines()[0]}")
    return found


def circles(package: Path) -> list[str]:
    """Files that import each other, directly or over others, anywhere in them (`TYPE_CHECKING` included)."""
    files = {_module(path, package): path for path in sorted(package.rglob("*.py"))}
    graph = {
        name: {t for n in _imports(path) if (t := _target(n, files)) not in (None, name)}
        for name, path in files.items()
    }
    doors = {name for name, path in files.items() if path.name == "__init__.py"}
    graph = {name: targets - doors for name, targets in graph.items() if name not in doors}
    return [" -> ".join(group) for group in _strongly_connected(graph)]


def widths(package: Path) -> list[str]:
    """Folders with more files than a newcomer reads through; families of models are a table of their own."""
    folders = {path.parent for path in package.rglob("*.py")}
    counts = {folder: len([path for path in folder.glob("*.py") if path.name != "__init__.py"]) for folder in folders}
    return [
        f"{folder.relative_to(package.parent)}/ has {count} files, over {MAX_ROOM_FILES}"
        for folder, count in sorted(counts.items())
        if count > MAX_ROOM_FILES and folder.name != "families"
    ]


def retired_words(path: Path) -> list[str]:
    """Names and words that this project has given up for the field's own."""
    found = []
    for number, line in enumerate(path.read_text().splitlines(), 1):
        found += [f"{path.name}:{number}: {old}; say {new}" for old, new in RETIRED.items() if re.search(old, line)]
    return found


def dialect(path: Path) -> list[str]:
    """Words of docstrings and comments that the field does not use in this sense."""
    return [
        f"{path.name}:{line}: {match[0]!r}; say {plain}"
        for text, line in _prose(path)
        for words, plain in DIALECT.items()
        for match in re.finditer(rf"\b(?:{words})", text)
    ]


def chains(paths: list[Path]) -> list[str]:
    """Chained clauses in the docstrings and comments of all files, if there are more than a few."""
    found = [
        f"{path.name}:{line}: {match[0]!r}"
        for path in paths
        for text, line in _prose(path)
        for match in CHAINS.finditer(text)
    ]
    return found if len(found) > MOST_CHAINS else []


def unclear_docstrings(path: Path) -> list[str]:
    """Docstrings that begin in the middle: their subject is named only further on, or elsewhere."""
    found = []
    for node in _nodes(path):
        for text, line in _docstrings(node):
            first = text.split(maxsplit=1)[0].strip(",.:;") if text.split() else ""
            if first in UNCLEAR_OPENINGS or text.startswith("The same"):
                found.append(f"{path.name}:{line}: docstring opens with {first!r}")
            found += [f"{path.name}:{line}: {name}: {says[:40]}" for name, says in _UNCLEAR_ENTRY.findall(text)]
    return found


def repeated_class_names(paths: list[Path]) -> list[str]:
    """Class names that mean several things."""
    places: dict[str, list[str]] = {}
    for path in paths:
        for node in _nodes(path):
            if isinstance(node, ast.ClassDef):
                places.setdefault(node.name, []).append("/".join(path.parts[-2:]))
    return [f"{name}: {', '.join(where)}" for name, where in sorted(places.items()) if len(where) > 1]


@lru_cache(maxsize=1)
def _tree(path: Path) -> ast.Module:
    """A file, parsed once for all rules that look at it one after another."""
    return ast.parse(path.read_text())


@lru_cache(maxsize=1)
def _nodes(path: Path) -> tuple[ast.AST, ...]:
    return tuple(ast.walk(_tree(path)))


def _rooms(package: Path) -> list[Path]:
    return [path.parent for path in sorted(package.glob("*/__init__.py"))]


def _room(path: Path, package: Path) -> str:
    """The room of a file; a module right in the package is its own."""
    return path.relative_to(package).parts[0].removesuffix(".py")


def _rooms_imported(path: Path, package: Path) -> set[str]:
    """First name below the package in each import: `jaxrlhf.models.hf` gives `models`.

    What the package's own `__init__` offers (`from jaxrlhf import train`) counts as a command line, the highest floor.
    """
    return {name.split(".")[1] for name in _imports(path) if name.startswith(f"{package.name}.")}


def _imports(path: Path) -> Iterator[str]:
    """Dotted names of all that a file imports, `from a import b` as `a.b`, anywhere in it."""
    for node in _nodes(path):
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


def _docstrings(node: ast.AST) -> Iterator[tuple[str, int]]:
    """Docstring of a definition and of the attributes documented in its body, each with its line."""
    body = getattr(node, "body", None)
    if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) or not body:
        return
    for statement in body:
        value = statement.value if isinstance(statement, ast.Expr) else None
        if isinstance(value, ast.Constant) and isinstance(value.value, str):
            yield value.value, statement.lineno


@cache
def _prose(path: Path) -> list[tuple[str, int]]:
    """Docstrings and comments of a file, without the names of code in them, each with its line."""
    found = [(text, line) for node in _nodes(path) for text, line in _docstrings(node)]
    with path.open("rb") as file:
        tokens = [token for token in tokenize.tokenize(file.readline) if token.type == tokenize.COMMENT]
    found += [(token.string, token.start[0]) for token in tokens]
    return [(_CODE.sub("", text), line) for text, line in found]


def _module(path: Path, package: Path) -> str:
    return ".".join(path.relative_to(package.parent).with_suffix("").parts).removesuffix(".__init__")


def _target(name: str, files: dict[str, Path]) -> str | None:
    """File that an import reads: `a.b.Thing` is in `a/b.py`."""
    return name if name in files else (parent if (parent := name.rpartition(".")[0]) in files else None)


def _strongly_connected(graph: dict[str, set[str]]) -> list[list[str]]:
    """Groups of nodes in which each node leads to all others, by reachability."""
    reach = {name: _reachable(name, graph) for name in graph}
    groups = {
        frozenset(other for other in reach[name] if name in reach[other]) | {name}
        for name in graph
        if name in reach[name]
    }
    return [sorted(group) for group in sorted(groups, key=sorted)]


def _reachable(start: str, graph: dict[str, set[str]]) -> set[str]:
    seen: set[str] = set()
    stack = list(graph[start])
    while stack:
        name = stack.pop()
        if name not in seen:
            seen.add(name)
            stack += graph.get(name, ())
    return seen

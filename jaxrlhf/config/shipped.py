"""The configurations that come with the package."""

from pathlib import Path

_PACKAGE = Path(__file__).parents[1]


def shipped() -> dict[str, Path]:
    """The configurations that come with the package, by name; those in `recipes/` are for real work."""
    installed = _PACKAGE / "configs"  # where the wheel carries them
    folder = installed if installed.is_dir() else _PACKAGE.parent / "configs"
    return {path.stem: path for path in sorted(folder.rglob("*.py"), key=lambda path: path.stem)}

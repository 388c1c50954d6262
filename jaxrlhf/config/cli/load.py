"""Configuration files: loading by name to a `Config`, and conversion of a `Config` to JSON."""

import dataclasses
import difflib
import re
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from jaxrlhf.config.checks.contradictions import checked
from jaxrlhf.config.cli.annotations import check_types, field_types
from jaxrlhf.config.named_functions import find_neighbours, shipped, shipped_file
from jaxrlhf.config.refusal import Refusal, unchecked
from jaxrlhf.config.run import Config

_MODULES = "jaxrlhf_configuration_"


def load(path_or_name: str | Path, change: Callable[[Config], Config] | None = None) -> Config:
    """Read a configuration file and call its `get_config()`.

    Args:
      path_or_name: Path of a file; if the file does not exist, the name of a configuration that ships with the package,
        such as `ppo_gsm8k`. `.py` may be left out.
      change: Function that builds a changed configuration from the configuration of the file. The configuration of the
        file may then be contradictory, as long as the changed one is valid.

    Raises:
      Refusal: The file does not exist, settings do not fit, or there is no `get_config` that returns a `Config`. The
        message names the file, the line and the remedy. Errors of the file's own code are raised unchanged.
    """
    path = _find(str(path_or_name))
    try:
        config = _read(path)
    except Refusal as contradiction:
        if change is None:
            raise
        return _repaired(path, change, contradiction)
    return config if change is None else change(config)


def _repaired(path: Path, change: Callable[[Config], Config], contradiction: Refusal) -> Config:
    """Apply a change to a file whose configuration is contradictory; raise the file's error if that does not fix it.

    Raises:
      Refusal: The contradiction remains after the change, or another contradiction is found.
    """
    try:
        with unchecked():
            config = _read(path)
    except Exception:  # the file's own code failed on the contradiction, so the contradiction is reported
        raise contradiction from contradiction.__cause__
    try:
        return change(config)
    except Refusal as error:
        if " ".join(str(error).split()) in str(contradiction):
            raise contradiction from error
        raise


def _read(path: Path) -> Config:
    """Run a configuration file, which may import its neighbors, and return its configuration."""
    module = _new_module(f"{_MODULES}{path.stem}", path)
    try:
        _execute(module, path)
        defined = callable(getattr(module, "get_config", None))
        config = module.get_config() if defined else None
        if isinstance(config, Config):
            return checked(config)
    except Exception as error:
        reason = _reason(error, module)
        if reason is None:  # an error of the file's own code; its traceback says more than one line
            raise
        raise Refusal(f"{_place(error, path)}: {reason}") from error
    if not defined:
        raise Refusal(f"{path}: get_config() is missing; add `def get_config() -> Config:`")
    raise Refusal(f"{path}: get_config() must return a jaxrlhf Config, got {type(config).__name__}")


def load_module(path_or_name: str | Path) -> ModuleType:
    """Run a configuration file as a module, to use its classes and functions in another file; it runs once.

        LUFFY = load_module("algorithms/luffy").LUFFY

    Args:
      path_or_name: File or name, as for `load`.

    Raises:
      Refusal: The file does not exist. Errors of the file's own code are raised unchanged.
    """
    path = _find(str(path_or_name))
    name = f"{_MODULES}module_{path.stem}"
    known = sys.modules.get(name)
    if known is not None and known.__file__ == str(path.absolute()):
        return known
    module = _new_module(name, path)
    try:
        _execute(module, path)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _new_module(name: str, path: Path) -> ModuleType:
    module = ModuleType(name)
    module.__file__ = str(path.absolute())
    find_neighbours(path)
    # Type hints and pickles of classes that the file defines look up their module here.
    sys.modules[name] = module
    return module


def _execute(module: ModuleType, path: Path) -> None:
    # Not imported: a bytecode cache has a resolution of one second and could return the version before an edit.
    exec(compile(path.read_bytes(), str(path), "exec"), module.__dict__)


def loaded() -> list[ModuleType]:
    """Return the configuration files read so far as modules, which other processes cannot import."""
    return [module for name, module in sys.modules.items() if name.startswith(_MODULES)]


def _find(name: str) -> Path:
    for path in (Path(name), Path(f"{name}.py")):
        if path.is_file():
            return path
    if (path_shipped := shipped_file(name)) is not None:
        return path_shipped
    known, wanted = shipped(), name.removesuffix(".py")
    siblings = {str(path).removesuffix(".py"): str(path) for path in sorted(Path(name).parent.glob("*.py"))}
    close = difflib.get_close_matches(wanted, siblings, n=1) or difflib.get_close_matches(Path(wanted).name, known, n=1)
    if close:
        raise Refusal(f"no configuration {name!r}; did you mean {siblings.get(close[0], close[0])}?")
    raise Refusal(f"no configuration {name!r}: neither a file nor one of {', '.join(known)}")


def _place(error: Exception, path: Path) -> str:
    """Return `file:line` of the line of the file that was running."""
    if isinstance(error, SyntaxError) and error.filename == str(path):
        return f"{path}:{error.lineno}"
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
    return f"{path}:{lines[-1]}" if lines else str(path)


def _reason(error: Exception, module: ModuleType) -> str | None:
    """Return one line on wrong settings, with the closest name; None if the error is not about settings."""
    message = " ".join(str(error).split())
    if isinstance(error, SyntaxError):
        return f"{error.msg}: {(error.text or '').strip()}"
    if isinstance(error, Refusal):
        return message
    if isinstance(error, dataclasses.FrozenInstanceError):
        return f"{message}: settings are frozen; make changed settings with dataclasses.replace(settings, field=value)"
    if (wrong := _wrong_type(error)) is not None:
        return wrong
    absent = re.match(r"cannot import name '(\w+)' from 'jaxrlhf.config'", message)
    if absent:
        from jaxrlhf import config

        name = absent[1].removesuffix("Loss")
        if (file := _algorithm_file(name)) is not None:
            return f"jaxrlhf.config no longer has {absent[1]}; write {name} = load_module('algorithms/{file}').{name}"
        close = difflib.get_close_matches(absent[1], vars(config), n=1)
        return f"jaxrlhf.config has no {absent[1]}" + (f"; did you mean {close[0]}?" if close else "")
    misspelled = re.match(r"(\w+)\.__init__\(\) got an unexpected keyword argument '(\w+)'", message)
    if misspelled:
        owner, field = misspelled.groups()
        settings = vars(module).get(owner)
        if isinstance(settings, type) and dataclasses.is_dataclass(settings):
            if (advice := getattr(settings, "removed", {}).get(field)) is not None:
                return f"{owner}.{field} was removed: {advice}"
            close = difflib.get_close_matches(field, field_types(settings), n=1)
            return f"{owner} has no setting {field}" + (f"; did you mean {close[0]}?" if close else "")
    return None


def _algorithm_file(name: str) -> str | None:
    """Return the file of `configs/algorithms/` that defines a class; None if there is none."""
    files = (path for path in shipped().values() if path.parent.name == "algorithms")
    return next((path.stem for path in files if re.search(rf"^class {name}\b", path.read_text(), re.MULTILINE)), None)


def _wrong_type(error: Exception) -> str | None:
    """Return a message on the field of the wrong type, if settings of a wrong type made their own checks fail."""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        if frame.f_code.co_name == "__post_init__":
            settings = frame.f_locals["self"]
            try:
                check_types(settings, type(settings).__name__)
            except Refusal as wrong:
                return str(wrong)
    return None


def to_json(settings: Any) -> Any:
    """Convert settings to JSON data: dataclasses get their class name under `class`, functions become their names."""
    if dataclasses.is_dataclass(settings):
        fields = {field.name: to_json(getattr(settings, field.name)) for field in dataclasses.fields(settings)}
        return {"class": type(settings).__name__, **fields}
    if isinstance(settings, tuple):
        return [to_json(item) for item in settings]
    if callable(settings):
        return getattr(settings, "__qualname__", repr(settings))
    return settings

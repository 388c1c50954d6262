"""Settings by dotted name: listing them, finding them, and a `Config` with some changed."""

import dataclasses
import difflib
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

from jaxrlhf.config.cli.annotations import check_type, field_types, variants
from jaxrlhf.config.refusal import Refusal
from jaxrlhf.config.run import Config


def override(config: Config, changes: Mapping[str, Any]) -> Config:
    """A copy with settings changed by dotted name, all of them before any check on the whole.

        override(config, {"steps": 3, "actor.optimizer.learning_rate": 1e-5, "model": Pretrained("/x")})

    Raises:
      Refusal: A name that is no setting, a value of another type, or settings that contradict each other after the
        change.
    """
    for name in changes:
        find(config, name)
    return _rebuild(config, changes, prefix="")


def setting_names(settings: Any, prefix: str = "") -> list[str]:
    """Dotted names of all settings that hold a plain value rather than further settings."""
    found = []
    for name, (value, annotation) in _parts(settings).items():
        if dataclasses.is_dataclass(value) or (isinstance(value, tuple) and any(map(dataclasses.is_dataclass, value))):
            found += setting_names(value, f"{prefix}{name}.")
        elif not variants(annotation):
            found.append(prefix + name)
    return found


def find(config: Config, name: str) -> tuple[Any, Any]:
    """The value and the annotation of a setting.

    Args:
      name: Dotted, with the index for members of tuples: `rewards.parts.0.weight`.

    Raises:
      Refusal: There is no such setting; the message says what there is.
    """
    value, annotation, reached = config, type(config), ""
    for part in name.split("."):
        if part not in _parts(value):
            raise Refusal(f"no setting {name}: " + _advice(config, name, reached, value, annotation))
        value, annotation = _parts(value)[part]
        reached = f"{reached}.{part}".removeprefix(".")
    return value, annotation


def _parts(settings: Any) -> dict[str, tuple[Any, Any]]:
    """The value and annotation of each part that a dotted name may go on with."""
    if isinstance(settings, tuple):
        return {str(index): (item, Any) for index, item in enumerate(settings)}
    if not dataclasses.is_dataclass(settings):
        return {}
    return {name: (getattr(settings, name), kind) for name, kind in field_types(type(settings)).items()}


def _rebuild(settings: Any, changes: Mapping[str, Any], prefix: str) -> Any:
    """Apply changes from the leaves up, so that each dataclass is built and checked once."""
    below: dict[str, dict[str, Any]] = defaultdict(dict)
    for name, new in changes.items():
        part, _, rest = name.partition(".")
        below[part][rest] = new
    built = {name: value for name, (value, _) in _parts(settings).items()}
    for part, inner in below.items():
        if "" in inner:
            built[part] = inner.pop("")
            check_type(prefix + part, built[part], _parts(settings)[part][1])
        if inner:
            built[part] = _rebuild(built[part], inner, f"{prefix}{part}.")
    return tuple(built.values()) if isinstance(settings, tuple) else type(settings)(**built)


def _advice(config: Config, name: str, reached: str, value: Any, annotation: Any) -> str:
    """Reason why a setting's name leads nowhere after `reached`, and a name that does lead somewhere."""
    part, *rest = name.removeprefix(reached).removeprefix(".").split(".")
    kinds = [] if value is config else variants(annotation)
    if value is None and kinds:
        return f"{reached} is None; set it to {_either(kind.__name__ for kind in kinds)}(...) in the configuration file"
    owners = [kind.__name__ for kind in kinds if part in field_types(kind)]
    if owners:
        return (
            f"{reached} is {type(value).__name__}, and {part} belongs to {_either(owners)}; "
            f"set {reached}={owners[0]}(...) in the configuration file"
        )
    here = difflib.get_close_matches(part, _parts(value), n=1)
    elsewhere = defaultdict(list)
    for setting in setting_names(config):
        elsewhere[setting.rpartition(".")[2]].append(setting)
    namesakes = difflib.get_close_matches(name.rpartition(".")[2], elsewhere, n=1)
    if here and (rest or part not in elsewhere):  # the whole name of a setting elsewhere is no misspelt one from here
        return f"did you mean {'.'.join([reached, *here, *rest]).removeprefix('.')}?"
    if namesakes:
        return f"did you mean {_either(elsewhere[namesakes[0]])}?"
    return f"{reached or 'the configuration'} has {', '.join(_parts(value)) or 'no further settings'}"


def _either(words: Iterable[str]) -> str:
    return " or ".join(words)

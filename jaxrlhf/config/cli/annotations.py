"""Types of settings: read from dataclass annotations and checked against values."""

import dataclasses
import types
import typing
from typing import Any, Literal

from jaxrlhf.config.refusal import Refusal


def field_types(owner: type) -> dict[str, Any]:
    """Return the annotation of each field of a dataclass, by name."""
    hints = typing.get_type_hints(owner)
    return {field.name: hints[field.name] for field in dataclasses.fields(owner)}


def alternatives(annotation: Any) -> tuple[Any, ...]:
    """Return the members of a union; any other annotation is returned as the only member."""
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return typing.get_args(annotation)
    return (annotation,)


def variants(annotation: Any) -> list[type]:
    """Return the dataclasses that a setting may hold, subclasses included."""
    if _is_sequence(annotation):
        return variants(typing.get_args(annotation)[0])
    found = []
    for member in alternatives(annotation):
        if dataclasses.is_dataclass(member) and isinstance(member, type):
            found += [member, *(kind for child in member.__subclasses__() for kind in variants(child))]
    return found


def spell(annotation: Any) -> str:
    """Return an annotation in words, for an error message."""
    if typing.get_origin(annotation) is Literal:
        return "one of " + ", ".join(map(repr, typing.get_args(annotation)))
    if _is_sequence(annotation):
        return f"a tuple of {spell(typing.get_args(annotation)[0])}"
    if typing.get_origin(annotation) is tuple:
        return f"a tuple of {' and '.join(map(spell, typing.get_args(annotation)))}"
    if len(alternatives(annotation)) > 1:
        return " or ".join(map(spell, alternatives(annotation)))
    if annotation is bool:
        return "True or False"
    return "None" if annotation is type(None) else getattr(annotation, "__name__", str(annotation))


def check_type(name: str, value: object, annotation: Any) -> None:
    """Raise `Refusal` unless `value` fits the annotation of setting `name`."""
    if not _conforms(value, annotation):
        raise Refusal(f"{name} must be {spell(annotation)}, got {value!r}{_hint(value, annotation)}")


def _hint(value: object, annotation: Any) -> str:
    """Return advice on a value of the wrong type, if the intended value can be guessed."""
    if _is_sequence(annotation) and _conforms((value,), annotation):
        return f"; write a tuple with one entry as ({value!r},), with a comma"
    if isinstance(value, list) and _conforms(tuple(value), annotation):
        return "; write a tuple, with ( ) instead of [ ], and a comma after a single entry"
    kinds = variants(annotation)
    if isinstance(value, type) and value in kinds:
        return f"; write {value.__name__}(...), with its settings in the parentheses"
    if isinstance(value, str):
        meant = [kind.__name__ for kind in kinds if kind.__name__.lower() == value.lower()]
        taking = [kind.__name__ for kind in kinds if _begins_with_a_text(kind)]
        if meant or taking:
            return "; write " + " or ".join([f"{one}(...)" for one in meant] or [f"{one}({value!r})" for one in taking])
    return ""


def _begins_with_a_text(owner: type) -> bool:
    """Return True for settings such as `Pretrained`, whose first field is a required text."""
    first = next((field for field in dataclasses.fields(owner) if not field.kw_only), None)
    return first is not None and field_types(owner)[first.name] is str and first.default is dataclasses.MISSING


def check_types(settings: Any, name: str) -> None:
    """Run `check_type` on each field of a dataclass, including nested dataclasses."""
    for field, annotation in field_types(type(settings)).items():
        value = getattr(settings, field)
        check_type(f"{name}.{field}", value, annotation)
        below = value if isinstance(value, tuple) else (value,)
        for index, item in enumerate(below):
            if dataclasses.is_dataclass(item):
                check_types(item, f"{name}.{field}.{index}" if below is value else f"{name}.{field}")


def _conforms(value: object, annotation: Any) -> bool:
    if annotation is Any:
        return True
    if typing.get_origin(annotation) is Literal:
        return value in typing.get_args(annotation)
    if len(alternatives(annotation)) > 1:
        return any(_conforms(value, member) for member in alternatives(annotation))
    if _is_sequence(annotation):
        item = typing.get_args(annotation)[0]
        return isinstance(value, tuple) and all(_conforms(entry, item) for entry in value)
    if typing.get_origin(annotation) is tuple:
        kinds = typing.get_args(annotation)
        return isinstance(value, tuple) and len(value) == len(kinds) and all(map(_conforms, value, kinds))
    if isinstance(value, bool):  # True is an int in Python; as a number of steps it is a mistake
        return annotation is bool
    if annotation is float:
        return isinstance(value, int | float)
    return isinstance(value, typing.get_origin(annotation) or annotation)


def _is_sequence(annotation: Any) -> bool:
    return typing.get_origin(annotation) is tuple and typing.get_args(annotation)[1:] == (Ellipsis,)

"""Signatures of an episode's tools; a policy's calls are checked against their JSON schemas."""

import json
from collections.abc import Collection, Mapping, Sequence
from math import isfinite
from typing import Any

from jsonschema import Draft202012Validator
from jsonschema.exceptions import SchemaError
from referencing import Registry
from referencing.exceptions import Unresolvable
from referencing.jsonschema import DRAFT202012

from jaxrlhf.config import Refusal
from jaxrlhf.conversations.tool_calls.written import WrittenCall
from jaxrlhf.episode import MalformedCall, ToolCall, ToolSchema


class Signatures:
    """Names and parameters of tools.

    Attributes:
      names: Names of all tools.

    Raises:
      Refusal: A tool has no name, two tools have the same name, or parameters are no JSON schema of an object.
    """

    def __init__(self, tools: Sequence[ToolSchema]) -> None:
        self._parameters: dict[str, Mapping[str, Any]] = {}
        self._validators: dict[str, Draft202012Validator] = {}
        for tool in tools:
            name, schema = _declared(tool)
            if name in self._parameters:
                raise Refusal(f"two tools have the name {name!r}; give each its own")
            self._parameters[name], self._validators[name] = schema, _validator(name, schema)

    @property
    def names(self) -> Collection[str]:
        return self._parameters.keys()

    def check(self, written: WrittenCall) -> ToolCall | MalformedCall:
        """Return the call with arguments of the types that the schema requires, or the error of a malformed call."""
        name, arguments = (
            self._positional(written.arguments) if written.name is None else (written.name, written.arguments)
        )
        if not isinstance(name, str) or name not in self._parameters:
            names = ", ".join(self._parameters)
            known = f"the tools are {names}" if names else "there are no tools"
            return MalformedCall("unknown_tool", f"there is no tool {str(name)[:80]!r}; {known}")
        arguments = {} if arguments is None else _decoded(arguments, Mapping)
        if not isinstance(arguments, Mapping):
            return MalformedCall("arguments", f"the arguments of {name} must be an object, by name")
        properties = self._parameters[name].get("properties") or {}
        given = {key: _fitting(value, properties.get(key, {}), typed=written.typed) for key, value in arguments.items()}
        if not _is_json(given):
            return MalformedCall("arguments", f"the arguments of {name} must be JSON values")
        error = next(iter(self._validators[name].iter_errors(given)), None)
        if error is not None:
            place = "".join(f" {part}" for part in error.absolute_path)
            return MalformedCall("arguments", f"the arguments of {name} do not fit:{place} {error.message[:200]}")
        return ToolCall(name, given, written.call_id)

    def _positional(self, text: str) -> tuple[str, dict[str, str]]:
        """Return name and arguments of `name: a, b`, or of `a, b` if there is only one tool."""
        name, colon, rest = text.partition(":")
        if not colon or name.strip() not in self._parameters:
            if len(self._parameters) != 1:
                return name.strip(), {}
            name, rest = next(iter(self._parameters)), text
        keys = list(self._parameters[name.strip()].get("properties") or {})
        values = rest.split(",", max(len(keys) - 1, 0)) if rest.strip() else []
        return name.strip(), {key: value.strip() for key, value in zip(keys or [""], values, strict=False)}


def _declared(tool: ToolSchema) -> tuple[str, Mapping[str, Any]]:
    function = tool.get("function", tool)
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str) or not name:
        raise Refusal(f'a tool schema has no name: {tool!r:.200}; expected {{"function": {{"name": ...}}}}')
    schema = function.get("parameters") or {"type": "object", "properties": {}}
    if not isinstance(schema, Mapping):
        raise Refusal(f"the parameters of tool {name!r} are no JSON schema of an object: {schema!r:.200}")
    return name, schema


def _validator(name: str, schema: Mapping[str, Any]) -> Draft202012Validator:
    strict = _without_nullable(schema)
    if "properties" in strict:
        strict.setdefault("additionalProperties", False)  # a function has no other parameters
    if any(not reference.startswith("#") for reference in _references(strict)):
        raise Refusal(f"the parameters of tool {name!r} refer to another document; write the whole schema")
    try:
        Draft202012Validator.check_schema(strict)
    except SchemaError as error:
        raise Refusal(f"the parameters of tool {name!r} are no JSON schema: {error.message[:200]}") from error
    resolver = Registry().with_resource("", DRAFT202012.create_resource(strict)).resolver()
    for reference in _references(strict):
        try:
            resolver.lookup(reference)
        except Unresolvable as error:
            raise Refusal(f"the parameters of tool {name!r} refer to {reference!r}, which does not exist") from error
    return Draft202012Validator(strict)


def _without_nullable(schema: Any) -> Any:
    """Return the schema with OpenAPI's `nullable` replaced by the type `null` of JSON schema."""
    if isinstance(schema, list):
        return [_without_nullable(item) for item in schema]
    if not isinstance(schema, Mapping):
        return schema
    # A property may be named `nullable`, so only a boolean is removed.
    own = {key: value for key, value in schema.items() if key != "nullable" or not isinstance(value, bool)}
    plain = {key: _without_nullable(value) for key, value in own.items()}
    return {"anyOf": [plain, {"type": "null"}]} if schema.get("nullable") is True else plain


def _references(schema: Any) -> list[str]:
    if isinstance(schema, list):
        return [found for item in schema for found in _references(item)]
    if not isinstance(schema, Mapping):
        return []
    own = [schema["$ref"]] if isinstance(schema.get("$ref"), str) else []
    return [*own, *(found for item in schema.values() for found in _references(item))]


def _fitting(value: Any, schema: Any, *, typed: bool) -> Any:
    """Convert a value to a type that the schema allows; return the value unchanged if no conversion fits."""
    types = _types(schema)
    if isinstance(value, float) and value.is_integer() and "integer" in types and "number" not in types:
        return int(value)
    if not isinstance(value, str) or (types and "string" in types and (typed or types == {"string"})):
        return value
    kinds = {"integer": int, "number": (int, float), "boolean": bool, "null": type(None), "array": list, "object": dict}
    words = {"True": "true", "False": "false", "None": "null"}
    read = _decoded(words.get(value.strip(), value))
    for name in sorted(types - {"string"}) if types else () if typed else kinds:
        kind: Any = kinds.get(name, ())
        if isinstance(read, kind) and not (isinstance(read, bool) and name in ("integer", "number")):
            return read
        if name == "integer" and isinstance(read, float) and read.is_integer():
            return int(read)
    return value


def _types(schema: Any) -> set[str]:
    """Return the types that a schema allows; empty if it does not say."""
    if not isinstance(schema, Mapping):
        return set()
    declared = schema.get("type")
    found = {declared} if isinstance(declared, str) else set(declared or ())
    for key in ("anyOf", "oneOf"):
        for choice in schema.get(key) or ():
            found |= _types(choice)
    if isinstance(schema.get("enum"), list) and not found:
        found = {"string"} if all(isinstance(item, str) for item in schema["enum"]) else set()
    return found | ({"null"} if schema.get("nullable") is True and found else set())


def _is_json(value: Any) -> bool:
    """Return True if JSON can hold the value; a policy may write complex numbers, sets and infinities in Python."""
    match value:
        case dict():
            return all(isinstance(key, str) and _is_json(item) for key, item in value.items())
        case list():
            return all(map(_is_json, value))
        case float():
            return isfinite(value)
    return value is None or isinstance(value, str | int)


def _decoded(value: Any, kind: Any = object) -> Any:
    """Parse a text as JSON; return the text if that fails or gives a value of another kind."""
    if not isinstance(value, str):
        return value
    try:
        read = json.loads(value, parse_constant=_no_constant)
    except (ValueError, RecursionError):
        return value
    return read if isinstance(read, kind) else value


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")

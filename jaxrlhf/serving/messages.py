"""Messages and tools of chat requests, in the form of chat templates."""

import json
from collections.abc import Iterable
from itertools import groupby
from typing import Any

from jaxrlhf.data.images import MARK
from jaxrlhf.serving.errors import invalid, unsupported

LONGEST_NAME = 256
"""Largest number of characters of a tool's name, which is searched in texts. OpenAI's API admits 64."""


def message_of(given: dict[str, Any], number: int, images: list[str]) -> dict[str, Any]:
    """Convert a message to the form of chat templates: contents are texts, arguments of calls are objects.

    Args:
      images: List that images in messages of users and tools are appended to.
    """
    place = f"messages[{number}]"
    role = given.get("role")
    if role not in ("system", "developer", "user", "assistant", "tool"):
        raise invalid(f"{place}.role is {role!r}; expected system, developer, user, assistant or tool", "messages")
    message: dict[str, Any] = {"role": "system" if role == "developer" else role}
    message["content"] = _content(given.get("content"), place, images if role in ("user", "tool") else None)
    reasoning = given.get("reasoning_content", given.get("reasoning"))
    if reasoning:
        message["reasoning_content"] = _content(reasoning, place)
    for name in ("tool_call_id", "name"):
        if given.get(name) is not None:
            message[name] = _content(given[name], place)
    if role == "tool" and "tool_call_id" not in message:
        raise invalid(f"{place} has no tool_call_id", "messages")
    if given.get("tool_calls"):
        message["tool_calls"] = _calls(given["tool_calls"], place)
    return message


def merged_systems(messages: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Merge consecutive system messages into one message each; developer messages are system messages here."""
    merged: list[dict[str, Any]] = []
    for role, adjacent in groupby(messages, key=lambda message: message["role"]):
        same = list(adjacent)
        if role == "system":
            same = [{**same[0], "content": "\n\n".join(message["content"] for message in same)}]
        merged += same
    return merged


def _content(given: Any, place: str, images: list[str] | None = None) -> str:
    if given is None or isinstance(given, str):
        return given or ""
    return "".join(_part(part, place, images) for part in (given if isinstance(given, list) else [given]))


def _part(part: Any, place: str, images: list[str] | None) -> str:
    """Return the text of a content part; an image is appended to `images` and becomes a `MARK`.

    Args:
      images: List that receives images; None refuses images.
    """
    kind = part.get("type") if isinstance(part, dict) else None
    if kind in ("text", "output_text"):
        if not isinstance(part.get("text"), str):
            raise invalid(f"{place}.content has a part of type {kind!r} without a text", "messages")
        return part["text"]
    if kind != "image_url":
        raise unsupported(f"{place}.content must be a text or a list of parts, each a text or an image_url", "messages")
    if images is None:
        raise unsupported(f"{place}.content has an image; users' and tools' messages may have some", "messages")
    url = part["image_url"].get("url") if isinstance(part.get("image_url"), dict) else part.get("image_url")
    if not isinstance(url, str) or not url.startswith("data:"):
        raise unsupported(
            f"{place}.content: the image_url {str(url)[:40]!r} is no data URL, and nothing is fetched here; send the "
            "image as data:image/...;base64,...",
            "messages",
        )
    images.append(url)
    return MARK


def _calls(given: Any, place: str) -> list[dict[str, Any]]:
    calls = []
    for call in given if isinstance(given, list) else [given]:
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise invalid(f"{place}.tool_calls must have function.name and function.arguments", "messages")
        arguments = function.get("arguments") or "{}"
        try:
            arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
        except (ValueError, RecursionError) as error:
            raise invalid(
                f"{place}.tool_calls: arguments of {function['name']} are no JSON ({error})", "messages"
            ) from error
        if not isinstance(arguments, dict):
            raise invalid(f"{place}.tool_calls: arguments of {function['name']} are no object", "messages")
        calls.append(
            {
                "type": "function",
                "id": str(call.get("id") or ""),
                "function": {"name": function["name"], "arguments": arguments},
            }
        )
    return calls


def tools_of(given: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Convert tools to the form of chat templates; `strict` has no effect here and is left out."""
    tools = []
    for number, tool in enumerate(given):
        function = tool["function"] if isinstance(tool.get("function"), dict) else {}
        if tool.get("type") != "function" or not isinstance(function.get("name"), str):
            raise invalid(f"tools[{number}] must be of type 'function' and have function.name", "tools")
        if (length := len(function["name"])) > LONGEST_NAME:
            message = f"tools[{number}].function.name has {length} characters; expected at most {LONGEST_NAME}"
            raise invalid(message, "tools")
        tools.append({"type": "function", "function": {key: function[key] for key in function if key != "strict"}})
    return tools

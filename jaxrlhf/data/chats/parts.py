"""Parts of a message's content: texts, and pictures that a part names."""

from collections.abc import Mapping
from typing import Any

_PICTURES = ("image", "image_url")
_NAMES = ("bytes", "path", "url", "image", "image_url")


def contents(message: Mapping[str, Any]) -> list[Any]:
    """The parts of a message's content; none where that is a text."""
    content = message.get("content")
    return content if isinstance(content, list) else []


def is_picture(part: Any) -> bool:
    """True for a part that stands for a picture."""
    return isinstance(part, Mapping) and part.get("type") in _PICTURES


def held(value: Any) -> Any:
    """Bytes, path or URL of a picture that is told as a mapping, such as by `datasets` or in OpenAI's API."""
    if not isinstance(value, Mapping):
        return value
    return next((held(value[name]) for name in _NAMES if value.get(name)), None)


def pictures_named(messages: Any) -> list[Any]:
    """The pictures that parts of messages name, in their order."""
    found = [held(part) for message in messages for part in contents(message) if is_picture(part)]
    return [picture for picture in found if picture is not None]

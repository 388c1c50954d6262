"""Parts of a message's content: texts and images."""

from collections.abc import Mapping
from typing import Any

_TYPES = ("image", "image_url")
_NAMES = ("bytes", "path", "url", "image", "image_url")


def contents(message: Mapping[str, Any]) -> list[Any]:
    """Return the parts of a message's content; empty if the content is a text."""
    content = message.get("content")
    return content if isinstance(content, list) else []


def is_image(part: Any) -> bool:
    """Return True for a part that is an image."""
    return isinstance(part, Mapping) and part.get("type") in _TYPES


def unpacked(value: Any) -> Any:
    """Return the bytes, path or URL of an image; mappings, such as of `datasets` or OpenAI's API, are unpacked."""
    if not isinstance(value, Mapping):
        return value
    return next((unpacked(value[name]) for name in _NAMES if value.get(name)), None)


def named_images(messages: Any) -> list[Any]:
    """Return the images that parts of messages refer to, in order."""
    found = [unpacked(part) for message in messages for part in contents(message) if is_image(part)]
    return [image for image in found if image is not None]

"""Validation of values that user code returns: converts them to plain data, or raises `EnvironmentFailure`."""

import base64
import io
import json
import numbers
import re
import sys
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, get_args

from jaxrlhf.episode import (
    CallRecord,
    Content,
    EnvironmentFailure,
    FailureCause,
    Message,
    Observation,
    Opening,
    ToolSchema,
)
from jaxrlhf.pictures import upright_rgb
from jaxrlhf.processes.plain import is_finite, is_number, short_repr

ROLES = ("user", "tool", "system")
ADDRESS = re.compile(r"0x[0-9a-fA-F]{6,}")


class Size:
    """Budget of text that an answer may hold.

    Args:
      limit: Budget in bytes of UTF-8.
    """

    def __init__(self, limit: int) -> None:
        self._limit = self._left = limit

    def text(self, value: str) -> str:
        """Return a text that can be encoded as UTF-8, and subtract its size from the budget.

        Raises:
          EnvironmentFailure: The answer holds too much text.
        """
        if len(value) <= self._left:
            encoded = value.encode(errors="replace")
            self._left -= len(encoded)
            if self._left >= 0:
                return encoded.decode()
        raise EnvironmentFailure("output", f"answered with more than {self._limit} bytes of text")


def opening(value: Any, limit: int) -> Opening:
    """Convert the value of `reset`: an `Opening`, messages, the text or picture of a user message, or None.

    Raises:
      EnvironmentFailure: The value is none of these.
    """
    if isinstance(value, tuple) and len(value) == 2 and isinstance(value[1], Mapping):  # as from gymnasium
        value = value[0]
    if value is None or isinstance(value, str) or _is_picture(value):
        value = Opening([] if value is None else _as_messages(value))
    elif not isinstance(value, Opening) and _is_list(value):
        value = Opening(value)
    if not isinstance(value, Opening):
        raise wrong("reset returned", value, "an Opening, messages, a text or None")
    size = Size(limit)
    tools = [_schema(tool, size) for tool in _list(value.tools, "Opening.tools")]
    if not isinstance(value.appended, str):
        raise wrong("Opening.appended is", value.appended, "a text")
    sent = messages(value.messages, (*ROLES, "assistant"), size)
    return Opening(sent, tools, size.text(value.appended), _anchor(value.state, size), _budget(value, "Opening"))


def observation(value: Any, limit: int) -> Observation:
    """Convert the value of `step`: an `Observation`, a text, a picture, or a tuple like gymnasium's.

    Raises:
      EnvironmentFailure: The value is none of these, or its reward or a metric is not finite.
    """
    if isinstance(value, tuple) and len(value) in (3, 5):
        truncated = value[3] if len(value) == 5 else False
        value = Observation(_as_messages(value[0]), value[1], done=value[2], truncated=truncated)
    elif isinstance(value, str) or _is_picture(value):
        value = Observation(_as_messages(value))
    if not isinstance(value, Observation):
        raise wrong("step returned", value, "an Observation, a text, or (text, reward, done)")
    size = Size(limit)
    sent = messages(value.messages, ROLES, size)
    done, truncated = _flag(value.done, "done"), _flag(value.truncated, "truncated")
    if not (sent or done or truncated):
        raise EnvironmentFailure("wrong-type", "step returned no message, and the episode is not over")
    if not isinstance(value.metrics, Mapping):
        raise wrong("Observation.metrics is", value.metrics, "a mapping of numbers")
    metrics = {size.text(str(name)): number(one, f"metric {name}") for name, one in value.metrics.items()}
    most, calls = _budget(value, "Observation"), [_call(call, size) for call in _list(value.calls, "Observation.calls")]
    return Observation(
        sent, number(value.reward, "the reward"), done, truncated, _anchor(value.state, size), metrics, most, calls
    )


def messages(value: Any, roles: Sequence[str], size: Size) -> list[Message]:
    """Convert messages to plain data for chat templates.

    Raises:
      EnvironmentFailure: The value is not a list of messages, or the role of a message is not in `roles`.
    """
    found: list[Message] = []
    for message in _list(value, "messages"):
        if not isinstance(message, Mapping) or not isinstance(message.get("content"), str | list | tuple):
            raise wrong("a message is", message, "a mapping with a role, and a text or a list of parts as its content")
        if message.get("role") not in roles:
            raise wrong("the role of a message is", message.get("role"), "one of " + ", ".join(roles))
        others = _plain({**message, "content": ""}, size)
        found.append({**others, "content": _content(message["content"], size)})
    return found


def number(value: Any, what: str) -> float:
    """Convert a value to a finite float.

    Raises:
      EnvironmentFailure: The value is not a number, or not finite in float32.
    """
    if not is_number(value):
        raise wrong(f"{what} is", value, "a number")
    found = float(value)
    if not is_finite(found):
        raise EnvironmentFailure("not-finite", f"{what} is {found}")
    return found


def reward(value: Any) -> float | None:
    """Convert a final reward; None stays None.

    Raises:
      EnvironmentFailure: The reward is not a finite number.
    """
    return None if value is None else number(value, "the final reward")


def tool_content(value: Any, limit: int) -> Content:
    """Convert a tool's value to content for the policy: a text as is, a number as text, JSON, or parts with images.

    Raises:
      EnvironmentFailure: The content is too long, or the value cannot be converted.
    """
    value = _as_parts(value)
    if _is_list(value) and all(map(_is_part, value)) and any(part["type"] != "text" for part in value):
        return _content(value, Size(limit))
    if isinstance(value, numbers.Number) and not isinstance(value, bool):
        value = str(value)
    elif not isinstance(value, str):
        try:
            value = json.dumps(value, ensure_ascii=False)
        except (TypeError, ValueError, RecursionError):
            raise wrong("it returned", value, "a text, a number or what JSON can hold") from None
    return Size(limit).text(value)


def error_text(text: str) -> str:
    """Return the error message for the policy; memory addresses, which differ between processes, are masked."""
    return f"error: {ADDRESS.sub('0x...', text)}".encode(errors="replace").decode()


def wrong(what: str, value: Any, expected: str) -> EnvironmentFailure:
    """Build the failure for a value of an unexpected type."""
    detail = f"{what} a {type(value).__name__} ({short_repr(value)}), expected {expected}"
    return EnvironmentFailure("wrong-type", detail)


def _as_messages(text: Any) -> list[Message]:
    return text if _is_list(text) else [{"role": "user", "content": _as_parts(text)}]


def _is_picture(value: Any) -> bool:
    """Return True for a PIL image; PIL is not imported for this check."""
    pillow = sys.modules.get("PIL.Image")
    return pillow is not None and isinstance(value, pillow.Image)


def _as_parts(value: Any) -> Any:
    """Wrap a picture in a list of content parts; return any other value unchanged."""
    return [{"type": "image", "image": value}] if _is_picture(value) else value


def _is_part(value: Any) -> bool:
    """Return True for a text part or an image part of a message's content."""
    return isinstance(value, Mapping) and value.get("type") in ("text", "image", "image_url") and value["type"] in value


def _content(value: Any, size: Size) -> Content:
    """Convert content to a text, or to OpenAI's content parts: texts and data URLs of images."""
    if isinstance(value, str):
        return size.text(value)
    parts: list[dict[str, Any]] = []
    for part in value:
        match part:
            case {"type": "text", "text": str(text)}:
                parts.append({"type": "text", "text": size.text(text)})
            case {"type": "image", "image": image} | {"type": "image_url", "image_url": {"url": image}}:
                parts.append({"type": "image_url", "image_url": {"url": size.text(_data_url(image))}})
            case _:
                raise wrong(
                    "a part of a content is", part, "a text, or an image: a picture of PIL, bytes or a data URL"
                )
    return parts


def _data_url(image: Any) -> str:
    """Convert an image to a data URL; a PIL image is encoded as PNG."""
    if _is_picture(image):
        stream = io.BytesIO()
        try:
            upright_rgb(image).save(stream, format="PNG")
        except ValueError as error:
            raise EnvironmentFailure("wrong-type", f"an image cannot be shown: {error}") from None
        image = stream.getvalue()
    if isinstance(image, bytes):
        return f"data:image/png;base64,{base64.b64encode(image).decode()}"
    if isinstance(image, str) and image.startswith("data:"):
        return image
    raise wrong("an image is", image, "a picture of PIL, encoded bytes or a data URL, because nothing is fetched")


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)


def _list(value: Any, what: str) -> Sequence[Any]:
    if not _is_list(value):
        raise wrong(f"{what} is", value, "a list")
    return value


def _flag(value: Any, what: str) -> bool:
    if not isinstance(value, bool) and type(value).__name__ not in ("bool", "bool_"):  # numpy's bool
        raise wrong(f"{what} is", value, "True or False")
    return bool(value)


def _budget(value: Opening | Observation, what: str) -> int | None:
    """Check and return `max_tokens`, the token limit of the next reply."""
    most = value.max_tokens
    if most is not None and not (isinstance(most, int) and most > 0):
        raise wrong(f"{what}.max_tokens is", most, "a whole number above 0, or None")
    return most


def _call(value: Any, size: Size) -> CallRecord:
    """Convert the record of a tool call that an environment made itself."""
    known = isinstance(value, CallRecord) and isinstance(value.name, str)
    if not known or value.failure not in (None, *get_args(FailureCause)):
        raise wrong("Observation.calls holds", value, "CallRecords, each with a name and a FailureCause or None")
    return CallRecord(size.text(value.name), number(value.seconds, "the seconds of a call"), value.failure)


def _schema(value: Any, size: Size) -> ToolSchema:
    if not isinstance(value, Mapping) or not isinstance(value.get("function"), Mapping):
        raise wrong("a tool is", value, "a schema of a function, as OpenAI has it")
    return _plain(dict(value), size)


def _plain(value: Any, size: Size, depth: int = 0) -> Any:
    """Copy data that JSON can hold."""
    if depth > 32:
        raise EnvironmentFailure("wrong-type", "lists and mappings are more than 32 deep within each other")
    if isinstance(value, str):
        return size.text(value)
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int | float):
        return int(value) if isinstance(value, int) else float(value)  # instances of user subclasses become plain
    if isinstance(value, Mapping):
        return {size.text(str(key)): _plain(one, size, depth + 1) for key, one in value.items()}
    if _is_list(value):
        return [_plain(one, size, depth + 1) for one in value]
    raise wrong("a message holds", value, "what JSON can hold")


def _anchor(value: Any, size: Size) -> Hashable:
    """Copy a state for comparison with other states: a number, a text, or a tuple of these."""
    if isinstance(value, tuple):
        return tuple(_anchor(one, size) for one in value)
    if isinstance(value, str):
        return size.text(value)
    if value is None or type(value) in (bool, int, float, bytes):
        return value
    if hasattr(value, "item") and not getattr(value, "shape", True):  # a numpy scalar
        return _anchor(value.item(), size)
    raise wrong("the state is", value, "a number, a text, or a tuple of these")

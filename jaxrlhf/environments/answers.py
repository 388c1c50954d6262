"""Values that a user's code returns, as the run takes them: plain data of the right types, or why it is none."""

import base64
import io
import json
import math
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

LARGEST_REWARD = 3.4028234663852886e38  # of float32
SPEAKERS = ("user", "tool", "system")
ADDRESS = re.compile(r"0x[0-9a-fA-F]{6,}")


class Size:
    """Text that an answer may still hold.

    Args:
      limit: Bytes.
    """

    def __init__(self, limit: int) -> None:
        self._limit = self._left = limit

    def text(self, value: str) -> str:
        """A text that can be written as UTF-8.

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
    """The beginning that `reset` returned: an `Opening`, messages, text or picture of a user's message, or None.

    Raises:
      EnvironmentFailure: It is none of these.
    """
    if isinstance(value, tuple) and len(value) == 2 and isinstance(value[1], Mapping):  # as gymnasium's
        value = value[0]
    if value is None or isinstance(value, str) or _is_picture(value):
        value = Opening([] if value is None else _said(value))
    elif not isinstance(value, Opening) and _is_list(value):
        value = Opening(value)
    if not isinstance(value, Opening):
        raise wrong("reset returned", value, "an Opening, messages, a text or None")
    size = Size(limit)
    tools = [_schema(tool, size) for tool in _list(value.tools, "Opening.tools")]
    if not isinstance(value.appended, str):
        raise wrong("Opening.appended is", value.appended, "a text")
    said = messages(value.messages, (*SPEAKERS, "assistant"), size)
    return Opening(said, tools, size.text(value.appended), _anchor(value.state, size), _budget(value, "Opening"))


def observation(value: Any, limit: int) -> Observation:
    """The answer that `step` returned: an `Observation`, a text, a picture, or a tuple as gymnasium's.

    Raises:
      EnvironmentFailure: It is none of these, or its reward or a metric is not finite.
    """
    if isinstance(value, tuple) and len(value) in (3, 5):
        truncated = value[3] if len(value) == 5 else False
        value = Observation(_said(value[0]), value[1], done=value[2], truncated=truncated)
    elif isinstance(value, str) or _is_picture(value):
        value = Observation(_said(value))
    if not isinstance(value, Observation):
        raise wrong("step returned", value, "an Observation, a text, or (text, reward, done)")
    size = Size(limit)
    said = messages(value.messages, SPEAKERS, size)
    done, truncated = _flag(value.done, "done"), _flag(value.truncated, "truncated")
    if not (said or done or truncated):
        raise EnvironmentFailure("wrong-type", "step returned no message, and the episode is not over")
    if not isinstance(value.metrics, Mapping):
        raise wrong("Observation.metrics is", value.metrics, "a mapping of numbers")
    metrics = {size.text(str(name)): number(one, f"metric {name}") for name, one in value.metrics.items()}
    most, calls = _budget(value, "Observation"), [_call(call, size) for call in _list(value.calls, "Observation.calls")]
    return Observation(
        said, number(value.reward, "the reward"), done, truncated, _anchor(value.state, size), metrics, most, calls
    )


def messages(value: Any, speakers: Sequence[str], size: Size) -> list[Message]:
    """Messages as chat templates read them.

    Raises:
      EnvironmentFailure: They are something else, or nobody of `speakers` says them.
    """
    found: list[Message] = []
    for message in _list(value, "messages"):
        if not isinstance(message, Mapping) or not isinstance(message.get("content"), str | list | tuple):
            raise wrong("a message is", message, "a mapping with a role, and a text or a list of parts as its content")
        if message.get("role") not in speakers:
            raise wrong("the role of a message is", message.get("role"), "one of " + ", ".join(speakers))
        others = _plain({**message, "content": ""}, size)
        found.append({**others, "content": _content(message["content"], size)})
    return found


def number(value: Any, what: str) -> float:
    """A finite number.

    Raises:
      EnvironmentFailure: It is something else.
    """
    if isinstance(value, str | bytes) or not hasattr(value, "__float__") or getattr(value, "shape", False):
        raise wrong(f"{what} is", value, "a number")
    found = float(value)
    if not math.isfinite(found) or abs(found) > LARGEST_REWARD:
        raise EnvironmentFailure("not-finite", f"{what} is {found}")
    return found


def reward(value: Any) -> float | None:
    """A final reward, or None for none.

    Raises:
      EnvironmentFailure: It is not a finite number.
    """
    return None if value is None else number(value, "the final reward")


def tool_content(value: Any, limit: int) -> Content:
    """Content that a tool's value is told in: itself, a number's text, JSON, or parts with images.

    Raises:
      EnvironmentFailure: It is too long, or cannot be told.
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


def told(text: str) -> str:
    """A failure as the policy is told of it: addresses would be others in every process."""
    return f"error: {ADDRESS.sub('0x...', text)}".encode(errors="replace").decode()


def wrong(what: str, value: Any, expected: str) -> EnvironmentFailure:
    """The failure of a value that has not the type that was expected."""
    try:
        text = " ".join(repr(value).split())
    except BaseException as error:
        text = f"its repr raises {type(error).__name__}"
    shown = text if len(text) <= 120 else text[:117] + "..."
    return EnvironmentFailure("wrong-type", f"{what} a {type(value).__name__} ({shown}), expected {expected}")


def _said(text: Any) -> list[Message]:
    return text if _is_list(text) else [{"role": "user", "content": _as_parts(text)}]


def _is_picture(value: Any) -> bool:
    """True for an image of PIL, which is not imported for values that are none."""
    pillow = sys.modules.get("PIL.Image")
    return pillow is not None and isinstance(value, pillow.Image)


def _as_parts(value: Any) -> Any:
    """A picture as the parts of a content; anything else stays."""
    return [{"type": "image", "image": value}] if _is_picture(value) else value


def _is_part(value: Any) -> bool:
    """True for a text or an image among the parts of a content."""
    return isinstance(value, Mapping) and value.get("type") in ("text", "image", "image_url") and value["type"] in value


def _content(value: Any, size: Size) -> Content:
    """A text, or parts of which each is a text or the data URL of an image, as OpenAI has them."""
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
    """An image as a data URL; a picture becomes a PNG."""
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
    raise wrong("an image is", image, "a picture of PIL, encoded bytes or a data URL, as nothing is fetched")


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)


def _list(value: Any, what: str) -> Sequence[Any]:
    if not _is_list(value):
        raise wrong(f"{what} is", value, "a list")
    return value


def _flag(value: Any, what: str) -> bool:
    if not isinstance(value, bool) and type(value).__name__ not in ("bool", "bool_"):  # numpy's
        raise wrong(f"{what} is", value, "True or False")
    return bool(value)


def _budget(value: Opening | Observation, what: str) -> int | None:
    """Most tokens of the next reply."""
    most = value.max_tokens
    if most is not None and not (isinstance(most, int) and most > 0):
        raise wrong(f"{what}.max_tokens is", most, "a whole number above 0, or None")
    return most


def _call(value: Any, size: Size) -> CallRecord:
    """A tool call that an environment made itself."""
    known = isinstance(value, CallRecord) and isinstance(value.name, str)
    if not known or value.failure not in (None, *get_args(FailureCause)):
        raise wrong("Observation.calls holds", value, "CallRecords, each with a name and a FailureCause or None")
    return CallRecord(size.text(value.name), number(value.seconds, "the seconds of a call"), value.failure)


def _schema(value: Any, size: Size) -> ToolSchema:
    if not isinstance(value, Mapping) or not isinstance(value.get("function"), Mapping):
        raise wrong("a tool is", value, "a schema of a function, as OpenAI has it")
    return _plain(dict(value), size)


def _plain(value: Any, size: Size, depth: int = 0) -> Any:
    """Data that JSON can hold, copied."""
    if depth > 32:
        raise EnvironmentFailure("wrong-type", "lists and mappings are more than 32 deep within each other")
    if isinstance(value, str):
        return size.text(value)
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int | float):
        return int(value) if isinstance(value, int) else float(value)  # not a class of the user's
    if isinstance(value, Mapping):
        return {size.text(str(key)): _plain(one, size, depth + 1) for key, one in value.items()}
    if _is_list(value):
        return [_plain(one, size, depth + 1) for one in value]
    raise wrong("a message holds", value, "what JSON can hold")


def _anchor(value: Any, size: Size) -> Hashable:
    """A state to be compared with others': numbers, texts and tuples of them."""
    if isinstance(value, tuple):
        return tuple(_anchor(one, size) for one in value)
    if isinstance(value, str):
        return size.text(value)
    if value is None or type(value) in (bool, int, float, bytes):
        return value
    if hasattr(value, "item") and not getattr(value, "shape", True):  # a number of numpy's
        return _anchor(value.item(), size)
    raise wrong("the state is", value, "a number, a text, or a tuple of these")

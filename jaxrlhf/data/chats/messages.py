"""Messages of records, converted from the published formats to the form that chat templates take."""

import json
from collections.abc import Mapping
from typing import Any

from jaxrlhf.config import Refusal
from jaxrlhf.data.chats.parts import contents, is_image
from jaxrlhf.data.images import MARK

REASONING = ("reasoning_content", "thinking", "reasoning")
"""Names of the message field that holds an assistant's reasoning."""

SHAREGPT = {"human": "user", **dict.fromkeys(("gpt", "chatgpt", "model"), "assistant"), "observation": "tool"}
"""Roles of the speakers in ShareGPT's format; any other speaker's name is the role."""


def letters(text: str) -> str:
    """Return the text without whitespace, which templates change at the ends of messages and thinking."""
    return "".join(text.split())


def tool_schemas(tools: Any) -> list[dict[str, Any]]:
    """Return the tool schemas in a record's field `tools`, a list or its JSON text; empty if the field has none."""
    try:
        given = json.loads(tools) if isinstance(tools, str) else tools
    except (ValueError, RecursionError):
        return []
    named = isinstance(given, list) and all(
        isinstance(tool, Mapping) and isinstance(_function(tool).get("name"), str) for tool in given
    )
    return [{"type": "function", "function": _whole(_function(tool))} for tool in given] if named else []


def _whole(value: Any) -> Any:
    """Return a schema without keys that are None, which parquet adds if records have different keys."""
    if isinstance(value, Mapping):
        return {key: _whole(item) for key, item in value.items() if item is not None}
    return [_whole(item) for item in value] if isinstance(value, list) else value


def _function(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    function = tool.get("function", tool)
    return function if isinstance(function, Mapping) else {}


def read_prompt(value: Any, place: str, key: str, *, images: bool = False) -> str | list[dict[str, Any]]:
    """Return the prompt in a field: a text, or chat messages.

    Args:
      images: True allows images in the messages.

    Raises:
      Refusal: The value is empty or no prompt, or contains an image.
    """
    if value and isinstance(value, str):
        return value
    if not value or not isinstance(value, list):
        raise Refusal(f"{place}: {key!r} must be a text or a list of messages, got {value!r:.80}")
    if not images:
        check_no_images(value, place, key)
    return read_messages(value, place, key)


def read_messages(messages: list[Any], place: str, key: str) -> list[dict[str, Any]]:
    """Return the messages in a field, as `read_message` does."""
    return [read_message(message, f"{place}: a message in {key!r}") for message in messages]


def read_message(given: Any, where: str) -> dict[str, Any]:
    """Return a message with the texts `role` and `content`; images become `MARK`, arguments of calls become objects.

    Args:
      where: Place of the message, for error messages.

    Raises:
      Refusal: The value is no message.
    """
    message = _of_sharegpt(given, where)
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise Refusal(f"{where} must have the texts 'role' and 'content', got {given!r:.80}")
    kept = {key: value for key, value in message.items() if value is not None and (value or key not in REASONING)}
    if "function_call" in kept or kept["role"] == "function":
        raise Refusal(f"{where} has OpenAI's old form, 'function_call'; write 'tool_calls' and messages of role 'tool'")
    if kept["role"] == "developer":
        kept["role"] = "system"
    if kept.get("tool_calls"):
        kept["tool_calls"] = _calls(kept["tool_calls"], where)
    else:
        kept.pop("tool_calls", None)
    optional = kept["role"] == "assistant" and ("tool_calls" in kept or any(kept.get(name) for name in REASONING))
    content = kept.get("content", "" if optional else None)
    if isinstance(content, list):
        content = _text(content)
    if not isinstance(content, str):
        raise Refusal(f"{where} must have the texts 'role' and 'content', got {given!r:.80}")
    return kept | {"content": content}


def _of_sharegpt(given: Any, where: str) -> Any:
    """Convert a message of ShareGPT's format, `from` and `value`, to `role` and `content`; return others unchanged."""
    if not isinstance(given, Mapping) or "role" in given or not isinstance(given.get("from"), str):
        return given
    speaker = given["from"]
    if speaker == "function_call":
        raise Refusal(f"{where} is a function_call of ShareGPT's form; write an assistant message with 'tool_calls'")
    others = {key: value for key, value in given.items() if key not in ("from", "value")}
    return {**others, "role": SHAREGPT.get(speaker, speaker), "content": given.get("value")}


def _text(parts: list[Any]) -> str | None:
    """Join the parts of a content into one text; return None if a part is neither text nor image."""
    found = [MARK if is_image(part) else part.get("text") if isinstance(part, Mapping) else None for part in parts]
    texts = [text for text in found if isinstance(text, str)]
    return "".join(texts) if len(texts) == len(found) else None


def _calls(given: Any, where: str) -> list[dict[str, Any]]:
    """Return tool calls without fields that are None, with arguments as objects."""
    calls = []
    for call in given if isinstance(given, list) else [given]:
        function = call.get("function", call) if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise Refusal(f"{where}: 'tool_calls' must have function.name and function.arguments, got {call!r:.80}")
        arguments = function.get("arguments") or {}
        try:
            arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
        except (ValueError, RecursionError) as error:
            raise Refusal(f"{where}: the arguments of the call {function['name']} are not JSON ({error})") from error
        if not isinstance(arguments, Mapping):
            raise Refusal(
                f"{where}: the arguments of the call {function['name']} must be an object, got {arguments!r:.80}"
            )
        others = {key: value for key, value in call.items() if value is not None} if function is not call else {}
        kept = {key: value for key, value in function.items() if value is not None}
        calls.append({"type": "function", **others, "function": {**kept, "arguments": dict(arguments)}})
    return calls


def read_answer(messages: list[Any], place: str, key: str) -> str | list[dict[str, Any]]:
    """Return an assistant's answer: the text of a single message without calls and reasoning, else all messages."""
    read = read_turns(messages, place, key)
    plain = len(read) == 1 and not (read[0].keys() & {"tool_calls", *REASONING})
    return str(read[0]["content"]) if plain else read


def read_turns(messages: list[Any], place: str, key: str) -> list[dict[str, Any]]:
    """Return the messages of an answer.

    Raises:
      Refusal: The first or last message is not the assistant's, or a message contains an image.
    """
    read = read_messages(messages, place, key)
    if not read or read[0]["role"] != "assistant" or read[-1]["role"] != "assistant":
        raise Refusal(
            f"{place}: {key!r} must begin and end with an assistant message, got the roles "
            f"{[message['role'] for message in read]}"
        )
    check_no_images(messages, place, key)
    return read


def check_no_images(messages: list[Any], place: str, key: str) -> None:
    """Raise `Refusal` if a message of a text-only field contains an image."""
    parts = (part for message in messages if isinstance(message, Mapping) for part in contents(message))
    if any(map(is_image, parts)):
        raise Refusal(f"{place}: {key!r} contains an image, and only texts are read there; leave the record out")


def without_prompt(messages: list[Any], prompt: Any, place: str, key: str) -> list[Any]:
    """Return the messages of an answer without the prompt's messages at their beginning, if they repeat the prompt.

    Raises:
      Refusal: The messages begin with another prompt.
    """
    read = read_messages(messages, place, key)
    turns = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
    if not read or (read[0]["role"] == "assistant" and turns[0]["role"] != "assistant"):
        return messages
    beginning, given = ([(one["role"], one["content"]) for one in some] for some in (read[: len(turns)], turns))
    if beginning == given:
        return messages[len(turns) :]
    raise Refusal(
        f"{place}: the messages before the answer in {key!r} differ from the prompt; give the answer alone, or the "
        "prompt as the messages before it"
    )

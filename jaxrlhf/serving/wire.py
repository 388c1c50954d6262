"""Requests of OpenAI's API: parsing of the fields, and refusal of fields that the engine does not support."""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jaxrlhf.config import Sampling
from jaxrlhf.data.images import MARK
from jaxrlhf.serving.errors import ApiError, invalid, unsupported

_IGNORED = {
    *("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key"),
    *("prompt_cache_retention", "verbosity"),
}
"""Fields that are accepted and ignored."""

_ONLY: Mapping[str, Sequence[Any]] = {
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "logit_bias": ({},),
    "response_format": ({"type": "text"},),
    "top_logprobs": (0,),
    "echo": (False,),
    "suffix": ("",),
    "functions": ([],),
    "function_call": ("none",),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "chat_template": (),
    "continue_final_message": (False,),
    "add_generation_prompt": (True,),
    "ignore_eos": (False,),
    "stop_token_ids": ([],),
    "bad_words": ([],),
    "include_stop_str_in_output": (False,),
    "skip_special_tokens": (True,),
    "length_penalty": (1,),
    "best_of": (1,),
    "use_beam_search": (False,),
    "prompt_logprobs": (0,),
    "truncate_prompt_tokens": (),
    "web_search_options": (),
}
"""Fields with the only values that are accepted, besides None."""

_COMMON = {
    *("model", "n", "seed", "stop", "stream", "stream_options", "temperature", "top_p", "top_k", "min_p"),
    *("min_tokens", "max_tokens", "return_token_ids", "logprobs"),
}
_CHAT = {
    *("messages", "tools", "tool_choice", "max_completion_tokens", "parallel_tool_calls"),
    *("chat_template_kwargs", "reasoning_effort"),
}
_COMPLETION = {"prompt", "best_of"}
MOST_STOPS = 16
LARGEST = 2**31 - 1
"""Largest integer in a field: the engine counts in 32 bits."""
_MOST_STOP_CHARACTERS = 256


@dataclass(frozen=True)
class Wanted:
    """Choices that a request asks for.

    Attributes:
      max_tokens: Largest number of tokens of a choice; None is as many as fit.
      n: Number of choices per prompt.
      seed: Integer in [0, 2**32); None samples differently each time.
      stop: Texts that end a choice.
      logprobs: Whether answers have log-probabilities of the tokens.
      token_ids: Whether answers have the fields `prompt_token_ids` and `token_ids`.
      usage: Whether the last event of a stream counts tokens.
    """

    model: str
    sampling: Sampling
    max_tokens: int | None
    n: int
    seed: int | None
    stop: tuple[str, ...]
    stream: bool
    usage: bool
    logprobs: bool
    token_ids: bool


@dataclass(frozen=True)
class ChatRequest:
    """Request to `/v1/chat/completions`; `tools` is empty if `tool_choice` is `none`.

    Attributes:
      images: Data URLs of images; each image has a `MARK` in a message.
      variables: Further variables of the chat template.
    """

    wanted: Wanted
    messages: tuple[dict[str, Any], ...]
    tools: tuple[dict[str, Any], ...]
    images: tuple[str, ...] = ()
    variables: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class CompletionRequest:
    """Request to `/v1/completions`; each prompt is a text or token ids."""

    wanted: Wanted
    prompts: tuple[str | tuple[int, ...], ...]


def chat_request(body: Any) -> ChatRequest:
    """Read the body of a chat request.

    Raises:
      ApiError: A field is missing, unknown, invalid or not supported.
    """
    fields = _Fields(body, _COMMON | _CHAT)
    limit = fields.integer("max_completion_tokens", low=1)
    images: list[str] = []
    messages = _one_system(_message(message, n, images) for n, message in enumerate(fields.items("messages", dict)))
    if not messages:
        raise invalid("messages is empty; give at least one", "messages")
    if images and sum(str(message["content"]).count(MARK) for message in messages) != len(images):
        raise invalid(f"beside images a text must not spell {MARK}", "messages")
    tools = tuple(_tool(tool, n) for n, tool in enumerate(fields.items("tools", dict) if fields.get("tools") else ()))
    choice = fields.get("tool_choice")
    if choice not in (None, "auto", "none"):
        raise unsupported(
            f"tool_choice={choice!r} would force a call, and sampling is not constrained here; use 'auto' or 'none'",
            "tool_choice",
        )
    if tools and choice != "none" and fields.get("parallel_tool_calls") is False:
        raise unsupported(
            "parallel_tool_calls=false: sampling is not constrained, so a reply may make several calls; leave it out",
            "parallel_tool_calls",
        )
    fields.boolean("parallel_tool_calls")
    wanted = _wanted(fields, limit, logprobs=fields.boolean("logprobs"))
    return ChatRequest(wanted, messages, () if choice == "none" else tools, tuple(images), _variables(fields))


def completion_request(body: Any) -> CompletionRequest:
    """Read the body of a completion request; raises the errors of `chat_request`."""
    fields = _Fields(body, _COMMON | _COMPLETION)
    logprobs = fields.integer("logprobs", low=0)
    if logprobs:
        raise unsupported(
            f"logprobs={logprobs}: the engine has the log-probability of the sampled token only; use 0", "logprobs"
        )
    given = fields.get("prompt")
    several = isinstance(given, list) and bool(given) and isinstance(given[0], list | str)
    prompts = tuple(_prompt(prompt) for prompt in (given if several else [given]))
    wanted = _wanted(fields, None, logprobs=logprobs is not None)
    if fields.get("best_of") not in (None, wanted.n):
        raise unsupported("best_of: choices are not ranked here; leave it out", "best_of")
    return CompletionRequest(wanted, prompts)


class _Fields:
    """Fields of a request body, with checks of their types."""

    def __init__(self, body: Any, known: set[str]) -> None:
        if not isinstance(body, dict):
            raise invalid(f"the body is {_kind(body)}; expected a JSON object", "")
        self._body = body
        for name in sorted(set(body) - known - _IGNORED):
            if name not in _ONLY:
                raise ApiError(f"unknown field {name!r}; leave it out", code="unknown_parameter", param=name)
            if body[name] is not None and body[name] not in _ONLY[name]:
                allowed = " or ".join(repr(value) for value in _ONLY[name])
                raise unsupported(
                    f"{name}={body[name]!r:.80} is not supported; {f'only {allowed}' if allowed else 'leave it out'}",
                    name,
                )

    def get(self, name: str) -> Any:
        return self._body.get(name)

    def _typed(self, name: str, kinds: tuple[type, ...], words: str, fits: Callable[[Any], bool]) -> Any:
        value = self.get(name)
        if value is None:
            return None
        if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds) or not fits(value):
            raise invalid(f"{name} must be {words}, got {str(value)[:80]!r}", name)
        return value

    def integer(self, name: str, *, low: int) -> int | None:
        return self._typed(name, (int,), f"an integer from {low} to {LARGEST}", lambda value: low <= value <= LARGEST)

    def number(self, name: str, default: float, words: str, fits: Callable[[float], bool]) -> float:
        value = self._typed(name, (int, float), words, fits)
        return default if value is None else float(value)

    def boolean(self, name: str) -> bool:
        return bool(self._typed(name, (bool,), "true or false", lambda _: True))

    def text(self, name: str) -> str | None:
        return self._typed(name, (str,), "a text", lambda _: True)

    def items(self, name: str, kind: type) -> list[Any]:
        items = self._typed(name, (list,), "a list", lambda _: True)
        if items is None:
            raise ApiError(f"{name} is missing", code="missing_required_parameter", param=name)
        for number, item in enumerate(items):
            if not isinstance(item, kind):
                raise invalid(f"{name}[{number}] is {_kind(item)}; expected an object", name)
        return items


def _wanted(fields: _Fields, limit: int | None, *, logprobs: bool) -> Wanted:
    model = fields.text("model")
    if model is None:
        raise ApiError("model is missing; /v1/models lists it", code="missing_required_parameter", param="model")
    given = fields.integer("max_tokens", low=1)
    temperature = fields.number("temperature", 1.0, "a number in [0, 2]", lambda value: 0 <= value <= 2)
    top_p = fields.number("top_p", 1.0, "a number in (0, 1]", lambda value: 0 < value <= 1)
    top_k = fields.integer("top_k", low=-1) or 0
    # A temperature of 0, or so small that logits overflow, would break the division: sample greedily instead.
    greedy = temperature < 1e-3
    sampling = Sampling(
        temperature=1.0 if greedy else temperature,
        top_p=top_p,
        top_k=max(0, top_k),
        min_p=fields.number("min_p", 0.0, "a number in [0, 1)", lambda value: 0 <= value < 1),
        min_tokens=fields.integer("min_tokens", low=0) or 0,
        greedy=greedy,
    )
    seed = fields._typed("seed", (int,), "an integer", lambda _: True)
    options = fields.get("stream_options") or {}
    if not isinstance(options, dict) or set(options) - {"include_usage", "include_obfuscation"}:
        raise invalid("stream_options may have include_usage only", "stream_options")
    stops = _stops(fields.get("stop"))
    if stops and sampling.min_tokens:
        raise unsupported("min_tokens with stop: stop texts count from the first token; give only one", "min_tokens")
    return Wanted(
        model=model,
        sampling=sampling,
        max_tokens=given if limit is None else limit,
        n=fields.integer("n", low=1) or 1,
        seed=None if seed is None else seed % 2**32,
        stop=stops,
        stream=fields.boolean("stream"),
        usage=bool(options.get("include_usage")),
        logprobs=logprobs,
        token_ids=fields.boolean("return_token_ids"),
    )


def _stops(given: Any) -> tuple[str, ...]:
    stops = [] if given is None else [given] if isinstance(given, str) else given
    if not isinstance(stops, list) or len(stops) > MOST_STOPS:
        raise invalid(f"stop must be a text, or a list of at most {MOST_STOPS}", "stop")
    for stop in stops:
        if not isinstance(stop, str) or not 0 < len(stop) <= _MOST_STOP_CHARACTERS:
            raise invalid(f"a stop text must have 1 to {_MOST_STOP_CHARACTERS} characters", "stop")
        if stop != stop.encode(errors="replace").decode():
            raise invalid(f"the stop text {stop!r} has half of a surrogate pair; send whole characters", "stop")
    return tuple(stops)


def _message(given: dict[str, Any], number: int, images: list[str]) -> dict[str, Any]:
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


def _variables(fields: _Fields) -> dict[str, Any]:
    """Return the variables of the chat template that a request sets."""
    given = fields.get("chat_template_kwargs")
    if given is not None and not isinstance(given, dict):
        raise invalid("chat_template_kwargs must be an object", "chat_template_kwargs")
    effort = fields.text("reasoning_effort")
    return {**(given or {}), **({} if effort is None else {"reasoning_effort": effort})}


def _one_system(messages: Iterable[dict[str, Any]]) -> tuple[dict[str, Any], ...]:
    """Merge consecutive system messages into one message each; developer messages are system messages here."""
    told: list[dict[str, Any]] = []
    for message in messages:
        if told and message["role"] == told[-1]["role"] == "system":
            told[-1] = {**told[-1], "content": f"{told[-1]['content']}\n\n{message['content']}"}
        else:
            told.append(message)
    return tuple(told)


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


def _tool(given: dict[str, Any], number: int) -> dict[str, Any]:
    function = given.get("function")
    if given.get("type") != "function" or not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise invalid(f"tools[{number}] must be of type 'function' and have function.name", "tools")
    return {"type": "function", "function": {key: value for key, value in function.items() if key != "strict"}}


def _prompt(given: Any) -> str | tuple[int, ...]:
    if isinstance(given, str):
        return given
    if isinstance(given, list) and all(type(id) is int and 0 <= id <= LARGEST for id in given):
        return tuple(given)
    raise invalid("prompt must be a text, a list of token ids, or a list of either", "prompt")


def _kind(value: Any) -> str:
    return "null" if value is None else type(value).__name__

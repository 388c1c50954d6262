"""Requests of OpenAI's API: parsing of the fields, and refusal of fields that the engine does not support."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jaxrlhf.config import Sampling
from jaxrlhf.data.images import MARK
from jaxrlhf.engine.scoring import MOST_LIKELY
from jaxrlhf.serving.errors import ApiError, invalid, unsupported
from jaxrlhf.serving.messages import message_of, one_system, tool_of

_IGNORED = {
    *("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key"),
    *("prompt_cache_options", "prompt_cache_retention", "verbosity", "prediction"),
}
"""Fields that are accepted and ignored, because no answer depends on them here."""

_ONLY: Mapping[str, Sequence[Any]] = {
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "logit_bias": ({},),
    "suffix": ("",),
    "functions": ([],),
    "function_call": ("none",),
    "modalities": (["text"],),
    "audio": (),
    "chat_template": (),
    "continue_final_message": (False,),
    "add_generation_prompt": (True,),
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
    "moderation": (),
    "spaces_between_special_tokens": (True,),
    "add_special_tokens": (True,),
    "return_tokens_as_token_ids": (False,),
    "priority": (0,),
}
"""Fields with the only values that are accepted, besides None."""

_COMMON = {
    *("model", "n", "seed", "stop", "stream", "stream_options", "temperature", "top_p", "top_k", "min_p"),
    *("min_tokens", "max_tokens", "return_token_ids", "logprobs", "response_format", "ignore_eos"),
}
_CHAT = {
    *("messages", "tools", "tool_choice", "max_completion_tokens", "parallel_tool_calls"),
    *("chat_template_kwargs", "reasoning_effort", "top_logprobs"),
}
_COMPLETION = {"prompt", "best_of", "echo"}
MOST_STOPS = 16
LARGEST = 2**31 - 1
"""Largest integer in a field: the engine counts in 32 bits."""
_MOST_STOP_CHARACTERS = 256


@dataclass(frozen=True)
class Wanted:
    """Choices that a request asks for.

    Attributes:
      max_tokens: Largest number of tokens of a choice; None is as many as fit, 0 samples none.
      n: Number of choices per prompt.
      seed: Integer in [0, 2**32); None samples differently each time.
      stop: Texts that end a choice.
      ignore_eos: Whether the stop tokens of the model are ignored.
      schema: JSON schema that choices obey; None is text.
      logprobs: Whether answers have log-probabilities of the tokens.
      likely: Number of the likeliest tokens whose log-probabilities answers have in each token's place.
      echo: Whether answers begin with their prompts.
      token_ids: Whether answers have the fields `prompt_token_ids` and `token_ids`.
      usage: Whether the last event of a stream counts tokens.
    """

    model: str
    sampling: Sampling
    max_tokens: int | None
    n: int
    seed: int | None
    stop: tuple[str, ...]
    ignore_eos: bool
    schema: Mapping[str, Any] | None
    stream: bool
    usage: bool
    logprobs: bool
    likely: int
    echo: bool
    token_ids: bool

    @property
    def scores(self) -> bool:
        """True if prompts and responses are scored, to answer with more than the log-probabilities of the sampling."""
        return self.logprobs and (self.echo or self.likely > 0)


@dataclass(frozen=True)
class ChatRequest:
    """Request to `/v1/chat/completions`; `tools` is empty if `tool_choice` is `none`.

    Attributes:
      one_call: Whether an answer has at most one tool call.
      images: Data URLs of images; each image has a `MARK` in a message.
      variables: Further variables of the chat template.
    """

    wanted: Wanted
    messages: tuple[dict[str, Any], ...]
    tools: tuple[dict[str, Any], ...]
    one_call: bool
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
    messages = one_system(message_of(message, n, images) for n, message in enumerate(fields.items("messages", dict)))
    if not messages:
        raise invalid("messages is empty; give at least one", "messages")
    if images and sum(str(message["content"]).count(MARK) for message in messages) != len(images):
        raise invalid(f"beside images a text must not spell {MARK}", "messages")
    tools = tuple(tool_of(tool, n) for n, tool in enumerate(fields.items("tools", dict) if fields.get("tools") else ()))
    choice = fields.get("tool_choice")
    if choice not in (None, "auto", "none"):
        raise unsupported(
            f"tool_choice={choice!r:.80} would force a call, and calls are not constrained here; use 'auto' or 'none', "
            "or response_format for an answer in JSON",
            "tool_choice",
        )
    one_call = fields.boolean("parallel_tool_calls", default=True) is False
    likely = fields.integer("top_logprobs", low=0, high=MOST_LIKELY) or 0
    logprobs = fields.boolean("logprobs")
    if likely and not logprobs:
        raise invalid("top_logprobs needs logprobs=true", "top_logprobs")
    wanted = _wanted(fields, limit, logprobs=logprobs, likely=likely)
    tools = () if choice == "none" else tools
    if tools and wanted.schema is not None:
        raise unsupported("response_format with tools would forbid their calls; give one of them", "response_format")
    return ChatRequest(wanted, messages, tools, one_call, tuple(images), _variables(fields))


def completion_request(body: Any) -> CompletionRequest:
    """Read the body of a completion request; raises the errors of `chat_request`."""
    fields = _Fields(body, _COMMON | _COMPLETION)
    likely = fields.integer("logprobs", low=0, high=MOST_LIKELY)
    given = fields.get("prompt")
    several = isinstance(given, list) and bool(given) and isinstance(given[0], list | str)
    prompts = tuple(_prompt(prompt) for prompt in (given if several else [given]))
    echo = fields.boolean("echo")
    wanted = _wanted(fields, None, logprobs=likely is not None, likely=likely or 0, echo=echo, fewest=0)
    if fields.get("best_of") not in (None, wanted.n):
        raise unsupported("best_of: choices are not ranked here; leave it out", "best_of")
    if echo and wanted.stream:
        raise unsupported("echo with stream: prompts are not streamed; give one of them", "echo")
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

    def __contains__(self, name: str) -> bool:
        return name in self._body

    def get(self, name: str) -> Any:
        return self._body.get(name)

    def _typed(self, name: str, kinds: tuple[type, ...], words: str, fits: Callable[[Any], bool]) -> Any:
        value = self.get(name)
        if value is None:
            return None
        if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds) or not fits(value):
            raise invalid(f"{name} must be {words}, got {str(value)[:80]!r}", name)
        return value

    def integer(self, name: str, *, low: int, high: int = LARGEST) -> int | None:
        return self._typed(name, (int,), f"an integer from {low} to {high}", lambda value: low <= value <= high)

    def number(self, name: str, default: float, words: str, fits: Callable[[float], bool]) -> float:
        value = self._typed(name, (int, float), words, fits)
        return default if value is None else float(value)

    def boolean(self, name: str, *, default: bool = False) -> bool:
        value = self._typed(name, (bool,), "true or false", lambda _: True)
        return default if value is None else value

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


def _wanted(
    fields: _Fields, limit: int | None, *, logprobs: bool, likely: int, echo: bool = False, fewest: int = 1
) -> Wanted:
    model = fields.text("model")
    if model is None:
        raise ApiError("model is missing; /v1/models lists it", code="missing_required_parameter", param="model")
    given = fields.integer("max_tokens", low=fewest)
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
    schema, stream = _schema(fields), fields.boolean("stream")
    ignore_eos = fields.boolean("ignore_eos")
    for name, is_set in (("min_tokens", sampling.min_tokens), ("ignore_eos", ignore_eos)):
        if schema is not None and is_set:
            raise unsupported(f"{name} with response_format, whose JSON ends an answer; give one of them", name)
    if likely and stream:
        name = "top_logprobs" if "top_logprobs" in fields else "logprobs"
        raise unsupported(f"{name}={likely} with stream: likely tokens are known at the end; give one of them", name)
    return Wanted(
        model=model,
        sampling=sampling,
        max_tokens=given if limit is None else limit,
        n=fields.integer("n", low=1) or 1,
        seed=None if seed is None else seed % 2**32,
        stop=stops,
        ignore_eos=ignore_eos,
        schema=schema,
        stream=stream,
        usage=bool(options.get("include_usage")),
        logprobs=logprobs,
        likely=likely,
        echo=echo,
        token_ids=fields.boolean("return_token_ids"),
    )


def _schema(fields: _Fields) -> Mapping[str, Any] | None:
    """Return the JSON schema of a response format; None for text."""
    given = fields.get("response_format")
    kind = given.get("type") if isinstance(given, dict) else None
    if given is None or kind == "text":
        return None
    if kind == "json_object":
        return {"type": "object"}
    schema = given.get("json_schema") if kind == "json_schema" else None
    schema = schema.get("schema") if isinstance(schema, dict) else None
    if not isinstance(schema, dict):
        raise unsupported(
            f"response_format={given!r:.80}; expected type 'text', 'json_object', or 'json_schema' with "
            "json_schema.schema",
            "response_format",
        )
    return schema


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


def _variables(fields: _Fields) -> dict[str, Any]:
    """Return the variables of the chat template that a request sets."""
    given = fields.get("chat_template_kwargs")
    if given is not None and not isinstance(given, dict):
        raise invalid("chat_template_kwargs must be an object", "chat_template_kwargs")
    effort = fields.text("reasoning_effort")
    return {**(given or {}), **({} if effort is None else {"reasoning_effort": effort})}


def _prompt(given: Any) -> str | tuple[int, ...]:
    if isinstance(given, str):
        return given
    if isinstance(given, list) and all(type(id) is int and 0 <= id <= LARGEST for id in given):
        return tuple(given)
    raise invalid("prompt must be a text, a list of token ids, or a list of either", "prompt")


def _kind(value: Any) -> str:
    return "null" if value is None else type(value).__name__

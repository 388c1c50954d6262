"""Requests of OpenAI's API: the fields of each endpoint, and refusal of fields that the engine does not support."""

from collections.abc import Mapping
from functools import cached_property
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from jaxrlhf.config import Sampling
from jaxrlhf.data.images import MARK
from jaxrlhf.engine.scoring import MOST_LIKELY
from jaxrlhf.serving.errors import ApiError, invalid, unsupported
from jaxrlhf.serving.messages import merged_systems, message_of, tools_of

_IGNORED = {
    *("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key"),
    *("prompt_cache_options", "prompt_cache_retention", "verbosity", "prediction"),
}
"""Fields that are accepted and ignored, because no answer depends on them here."""

_NEUTRAL: Mapping[str, Any] = {
    **dict.fromkeys(("presence_penalty", "frequency_penalty", "prompt_logprobs", "priority"), 0),
    **dict.fromkeys(("repetition_penalty", "length_penalty", "best_of"), 1),
    **dict.fromkeys(("continue_final_message", "include_stop_str_in_output"), False),
    **dict.fromkeys(("use_beam_search", "return_tokens_as_token_ids", "return_hidden_states"), False),
    **dict.fromkeys(("echo", "no_stop_trim"), False),
    **dict.fromkeys(("detokenize", "include_reasoning", "separate_reasoning", "stream_reasoning"), True),
    **dict.fromkeys(("add_generation_prompt", "add_special_tokens"), True),
    **dict.fromkeys(("skip_special_tokens", "spaces_between_special_tokens"), True),
    **{name: [] for name in ("functions", "stop_token_ids", "bad_words")},
    **dict.fromkeys(("audio", "chat_template", "truncate_prompt_tokens", "web_search_options", "moderation"), None),
    **dict.fromkeys(("guided_json", "guided_regex", "guided_choice", "guided_grammar", "structured_outputs"), None),
    **dict.fromkeys(("allowed_token_ids", "logits_processors", "documents", "mm_processor_kwargs"), None),
    **dict.fromkeys(("regex", "ebnf", "lora_path", "cache_salt", "kv_transfer_params", "vllm_xargs"), None),
    **{"logit_bias": {}, "suffix": "", "function_call": "none", "modalities": ["text"]},
}
"""Fields of unsupported features, each with the value that is accepted besides null."""

_LARGEST = 2**31 - 1
"""Largest integer in a field: the engine counts in 32 bits."""

MOST_TOOLS = 128
"""Largest number of tools of a request, as in OpenAI's API: each name is searched in the texts of the request."""

_Count = Annotated[int, Field(ge=0, le=_LARGEST)]
_Positive = Annotated[int, Field(ge=1, le=_LARGEST)]
_Likely = Annotated[int, Field(ge=0, le=MOST_LIKELY)]
_StopText = Annotated[str, Field(min_length=1, max_length=256)]


def _json_schema(given: Any) -> dict[str, Any] | None:
    """Return the JSON schema of a response format; None for text."""
    match given:
        case {"type": "text"}:
            return None
        case {"type": "json_object"}:
            return {"type": "object"}
        case {"type": "json_schema", "json_schema": {"schema": dict(schema)}}:
            return schema
    raise unsupported(
        f"response_format={given!r:.80}; expected type 'text', 'json_object', or 'json_schema' with json_schema.schema",
        "response_format",
    )


def _prompts(given: Any) -> list[str | tuple[int, ...]]:
    """Return each prompt of a request, a text or token ids."""
    several = isinstance(given, list) and bool(given) and isinstance(given[0], list | str)
    return [_prompt(prompt) for prompt in (given if several else [given])]


def _prompt(given: Any) -> str | tuple[int, ...]:
    if isinstance(given, str):
        return given
    if isinstance(given, list) and all(type(token) is int and 0 <= token <= _LARGEST for token in given):
        return tuple(given)
    raise invalid(f"prompt must be a text, a list of token ids, or a list of either, got {str(given)[:80]!r}", "prompt")


class ApiRequest(BaseModel):
    """Fields of both endpoints; null gives the default.

    Attributes:
      seed: Seed of the sampling; None samples differently each time.
      max_tokens: Largest number of tokens of a choice; None is as many as fit, 0 samples none.
      response_format: JSON schema that choices obey; None is text.
    """

    model_config = ConfigDict(strict=True, allow_inf_nan=False)

    model: str
    n: _Positive = 1
    seed: int | None = None
    stop: Annotated[
        list[_StopText],
        Field(max_length=16),
        BeforeValidator(lambda given: [given] if isinstance(given, str) else given),
    ] = []
    ignore_eos: bool = False
    stream: bool = False
    stream_options: Annotated[
        dict[Literal["include_usage", "include_obfuscation"], Any], BeforeValidator(lambda given: given or {})
    ] = {}
    temperature: Annotated[float, Field(ge=0, le=2)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Field(ge=-1, le=_LARGEST)] = 0
    min_p: Annotated[float, Field(ge=0, lt=1)] = 0.0
    min_tokens: _Count = 0
    max_tokens: _Positive | None = None
    response_format: Annotated[dict[str, Any] | None, BeforeValidator(_json_schema)] = None
    return_token_ids: bool = False
    logprobs: bool | int | None = None

    likely_field: ClassVar[str]
    """Name of the field with the number of likely tokens."""

    @classmethod
    def read(cls, body: Any) -> Self:
        """Read a request body.

        Raises:
          ApiError: A field is missing, unknown, invalid or not supported.
        """
        if not isinstance(body, dict):
            kind = "null" if body is None else type(body).__name__
            raise invalid(f"the body is {kind}; expected a JSON object", "")
        for name in sorted(body.keys() - cls.model_fields.keys() - _IGNORED):
            if name not in _NEUTRAL:
                raise ApiError(f"unknown field {name!r}; leave it out", code="unknown_parameter", param=name)
            if body[name] not in (None, neutral := _NEUTRAL[name]):
                advice = "leave it out" if neutral is None else f"only {neutral!r}"
                raise unsupported(f"{name}={body[name]!r:.80} is not supported; {advice}", name)
        try:
            return cls.model_validate({name: value for name, value in body.items() if value is not None})
        except ValidationError as error:
            raise _first_error(error) from error

    @property
    def wants_logprobs(self) -> bool:
        """True if answers have log-probabilities of the tokens; `logprobs` is a bool in a chat, else a number."""
        return self.logprobs is not None and self.logprobs is not False

    @property
    def likely(self) -> int:
        """Number of the likeliest tokens whose log-probabilities answers have in each token's place."""
        return getattr(self, self.likely_field) or 0

    @property
    def wants_scores(self) -> bool:
        """True if prompts and responses are scored, to answer with more than the log-probabilities of the sampling."""
        return self.wants_logprobs and self.likely > 0

    @cached_property
    def sampling(self) -> Sampling:
        """Sampling settings of the choices."""
        # A temperature of 0, or so small that logits overflow, would break the division: sample greedily instead.
        greedy = self.temperature < 1e-3
        return Sampling(
            temperature=1.0 if greedy else self.temperature,
            top_p=self.top_p,
            top_k=max(0, self.top_k),
            min_p=self.min_p,
            min_tokens=self.min_tokens,
            greedy=greedy,
        )

    @model_validator(mode="after")
    def _check_combinations(self) -> Self:
        if self.stop and self.min_tokens:
            raise unsupported(
                "min_tokens with stop: stop texts count from the first token; give only one", "min_tokens"
            )
        for name in ("min_tokens", "ignore_eos"):
            if self.response_format is not None and getattr(self, name):
                raise unsupported(f"{name} with response_format, whose JSON ends an answer; give one of them", name)
        if self.likely and self.stream:
            name = self.likely_field
            message = f"{name}={self.likely} with stream: likely tokens are known at the end; give one of them"
            raise unsupported(message, name)
        return self


class ChatRequest(ApiRequest):
    """Request to `/v1/chat/completions`.

    Attributes:
      messages: Messages in the form of chat templates; each image is a `MARK`.
      tools: Tools in the form of chat templates; empty if `tool_choice` is `none`.
      parallel_tool_calls: Whether an answer may have several tool calls.
    """

    messages: list[dict[str, Any]]
    tools: Annotated[
        list[dict[str, Any]],
        Field(max_length=MOST_TOOLS),
        AfterValidator(tools_of),
        BeforeValidator(lambda given: given or []),
    ] = []
    tool_choice: Any = None
    parallel_tool_calls: bool = True
    max_completion_tokens: _Positive | None = None
    chat_template_kwargs: dict[str, Any] = {}
    reasoning_effort: str | None = None
    logprobs: bool = False
    top_logprobs: _Likely = 0

    likely_field = "top_logprobs"
    echo: ClassVar[bool] = False
    _images: list[str] = []

    @property
    def images(self) -> list[str]:
        """Data URLs of the images in the messages."""
        return self._images

    @property
    def variables(self) -> dict[str, Any]:
        """Further variables of the chat template."""
        effort = {} if self.reasoning_effort is None else {"reasoning_effort": self.reasoning_effort}
        return self.chat_template_kwargs | effort

    @model_validator(mode="after")
    def _check_chat(self) -> Self:
        if not self.messages:
            raise invalid("messages is empty; give at least one", "messages")
        self.messages = merged_systems(message_of(given, n, self._images) for n, given in enumerate(self.messages))
        marks = sum(message["content"].count(MARK) for message in self.messages)
        if self.images and marks != len(self.images):
            raise invalid(f"beside images a text must not spell {MARK}", "messages")
        if self.tool_choice not in (None, "auto", "none"):
            raise unsupported(
                f"tool_choice={self.tool_choice!r:.80} would force a call, and calls are not constrained here; use "
                "'auto' or 'none', or response_format for an answer in JSON",
                "tool_choice",
            )
        if self.tool_choice == "none":
            self.tools = []
        if self.tools and self.response_format is not None:
            message = "response_format with tools would forbid their calls; give one of them"
            raise unsupported(message, "response_format")
        if self.likely and not self.logprobs:
            raise invalid("top_logprobs needs logprobs=true", "top_logprobs")
        if self.max_completion_tokens is not None:
            self.max_tokens = self.max_completion_tokens
        return self


class CompletionRequest(ApiRequest):
    """Request to `/v1/completions`.

    Attributes:
      prompt: Prompts; each is a text or token ids.
      logprobs: Number of likely tokens, in addition to the log-probabilities of the tokens; None gives neither.
      echo: Whether answers begin with their prompts.
    """

    prompt: Annotated[list[Any], BeforeValidator(_prompts)]
    max_tokens: _Count | None = None
    logprobs: _Likely | None = None
    echo: bool = False
    best_of: Any = None

    likely_field = "logprobs"

    @property
    def wants_scores(self) -> bool:
        return super().wants_scores or (self.wants_logprobs and self.echo)

    @model_validator(mode="after")
    def _check_completion(self) -> Self:
        if self.best_of not in (None, self.n):
            raise unsupported("best_of: choices are not ranked here; leave it out", "best_of")
        if self.echo and self.stream:
            raise unsupported("echo with stream: prompts are not streamed; give one of them", "echo")
        return self


def _first_error(error: ValidationError) -> ApiError:
    """Return the API's error for the first wrong field."""
    found = error.errors(include_url=False)[0]
    name, *path = found["loc"]
    if found["type"] == "missing":
        advice = "; /v1/models lists it" if name == "model" else ""
        return ApiError(f"{name} is missing{advice}", code="missing_required_parameter", param=str(name))
    place = "".join(f"[{step!r}]" for step in path if step != "[key]")
    return invalid(f"{name}{place}={found['input']!r:.80}: {found['msg']}", str(name))

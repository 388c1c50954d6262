"""Served model: samples choices of prompts with an engine's service, and streams their tokens."""

import asyncio
import hashlib
import json
import re
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import Any

from transformers import PreTrainedTokenizerBase

from jaxrlhf.batch import Diverged
from jaxrlhf.config import Refusal, Sampling
from jaxrlhf.config.serving import ServingLimits
from jaxrlhf.conversations import ChatFormat
from jaxrlhf.data.control_tokens import ControlTokens
from jaxrlhf.data.images import ImageReader
from jaxrlhf.data.tokenizer import TokenBytes
from jaxrlhf.engine import Completion, EngineService, Request
from jaxrlhf.engine.scoring import TokenScores
from jaxrlhf.serving.errors import ApiError, invalid, too_long, unsupported
from jaxrlhf.serving.grammars import JsonGrammars

_MAX_FORMS = 8
_CHARACTERS, _FEWEST_CHARACTERS = 16, 1 << 16
"""Largest number of characters of a prompt's texts for each token of the context, and for a small context. Texts have 2
to 6 characters a token, but chat templates may leave out texts, such as earlier reasoning."""
_SERVER_VARIABLES = {
    *("messages", "tools", "documents", "add_generation_prompt", "continue_final_message", "chat_template", "tokenize"),
    *("tokenizer", "chat", "conversation", "day", "padding", "truncation", "max_length", "return_tensors"),
    *("return_dict", "return_assistant_tokens_mask", "tokenizer_kwargs", "bos_token", "eos_token", "pad_token"),
}
"""Variables of chat templates that only the server sets."""


@dataclass(frozen=True)
class ServedModel:
    """Model that answers requests.

    Attributes:
      name: Name of the model in the API.
      stop_tokens: Token ids that end a response; a chat also ends at the stop tokens of its form.
      images: Reader of images in chats; None refuses images.
      today: Whether chat templates print today's date, instead of the fixed date of training.
    """

    name: str
    service: EngineService
    tokenizer: PreTrainedTokenizerBase
    stop_tokens: tuple[int, ...] = ()
    limits: ServingLimits = field(default_factory=ServingLimits)
    images: ImageReader | None = None
    today: bool = False

    @cached_property
    def form(self) -> ChatFormat:
        """Chat format of the model.

        Raises:
          ApiError: The tokenizer has no chat template.
        """
        try:
            return ChatFormat(self.tokenizer, self._day, self.images)
        except Refusal as error:
            raise ApiError(f"{self.name} has no chats: {error}", code="no_chat_template", param="model") from error

    def form_of(self, variables: Mapping[str, Any]) -> ChatFormat:
        """Return the chat format with further variables of the chat template, such as `enable_thinking`.

        Raises:
          ApiError: The template does not read a variable, or refuses its value.
        """
        if not variables:
            return self.form
        for name in variables:
            if name in _SERVER_VARIABLES or not re.search(rf"\b{re.escape(name)}\b", self.form.template.form.source):
                raise unsupported(
                    f"the chat template of {self.name} has no variable {name!r} to set; leave it out", name
                )
        key = json.dumps(dict(variables), sort_keys=True)
        try:
            return self._cached_form(key)
        except Refusal as error:
            raise invalid(f"with {key:.80} {error}", next(iter(variables))) from error

    @cached_property
    def _cached_form(self) -> Callable[[str], ChatFormat]:
        """Function of variables, as JSON, that returns a chat format; the last formats are kept."""
        day = self._day or {}
        return lru_cache(_MAX_FORMS)(lambda key: ChatFormat(self.tokenizer, json.loads(key) | day, self.images))

    @property
    def _day(self) -> dict[str, Any] | None:
        return {"day": None} if self.today else None

    @cached_property
    def token_bytes(self) -> TokenBytes:
        """Bytes of the tokenizer's tokens."""
        return TokenBytes(self.tokenizer)

    @cached_property
    def grammars(self) -> JsonGrammars:
        """Grammars of answers in JSON.

        Raises:
          ApiError: llguidance is not installed.
        """
        return JsonGrammars(self.tokenizer)

    @cached_property
    def control_ids(self) -> dict[str, int]:
        """Token ids of the control tokens, by their texts."""
        return ControlTokens(self.tokenizer).ids

    @property
    def max_characters(self) -> int:
        """Largest number of characters of the texts of a prompt."""
        return max(_FEWEST_CHARACTERS, _CHARACTERS * self.service.engine.context_tokens)

    def check_fits(self, values: Iterable[Any]) -> None:
        """Refuse values that together are too long for the context.

        Call this before they are rendered or tokenized, because megabytes would hold up other requests.

        Args:
          values: Texts, and other values, which count as the JSON that chat templates write of them.

        Raises:
          ApiError: The values are too long.
        """
        total = sum(len(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)) for value in values)
        if total > self.max_characters:
            context = self.service.engine.context_tokens
            raise too_long(
                f"texts of {total} characters, which cannot fit the context of {context} tokens; send at most "
                f"{self.max_characters} characters"
            )

    def tokens_of(self, text: str, *, specials: bool = True) -> tuple[int, ...]:
        """Return the token ids of a text; lone surrogates become question marks.

        Args:
          specials: True adds the control tokens that the tokenizer puts around a text.

        Raises:
          ApiError: The text is too long for the context.
        """
        self.check_fits([text])
        return tuple(self.tokenizer.encode(text.encode(errors="replace").decode(), add_special_tokens=specials))

    def response_limit(self, prompt: Sequence[int], wanted: int | None, *, most: int | None = None) -> int:
        """Return the largest number of tokens of a response to a prompt.

        Args:
          wanted: Limit of the request, refused if it does not fit; None is as many as fit.
          most: Further limit, lowered if it does not fit.

        Raises:
          ApiError: The prompt is empty, or prompt and response do not fit the context.
        """
        engine = self.service.engine
        if not prompt:
            raise ApiError("the prompt has no tokens; give at least one", code="empty_prompt", param="prompt")
        rest = engine.context_tokens - len(prompt)
        if rest < (wanted != 0):
            raise too_long(f"a prompt of {len(prompt)} tokens, and the context is {engine.context_tokens}; shorten it")
        if wanted is not None and wanted > min(rest, engine.response_tokens):
            raise too_long(
                f"a prompt of {len(prompt)} tokens and max_tokens={wanted}; the context is {engine.context_tokens} and "
                f"a response has {engine.response_tokens} at most"
            )
        return min(n for n in (rest, engine.response_tokens, wanted, most) if n is not None)


def check_model(model: ServedModel, wanted: str) -> None:
    """Raise `ApiError` if a request names another model."""
    if wanted != model.name:
        message = f"no model {wanted!r:.80}; this server has {model.name!r}"
        raise ApiError(message, status=404, code="model_not_found", param="model")


@dataclass(frozen=True)
class SampledPart:
    """Event of a choice: tokens that were sampled together, or at the end the completion.

    Attributes:
      index: Number of the choice.
    """

    index: int
    tokens: tuple[int, ...] = ()
    logps: tuple[float, ...] = ()
    completion: Completion | None = None


async def sample(
    model: ServedModel, choices: Sequence[Request], sampling: Sampling, *, seed: int, futures: list[Future[Completion]]
) -> AsyncGenerator[SampledPart, None]:
    """Sample choices together; closing the iterator cancels unfinished choices.

    Args:
      futures: List that receives the futures of the choices.

    Raises:
      ApiError: The time limit passed, the engine failed, or a choice was cancelled by other code.
    """
    loop = asyncio.get_running_loop()
    events: asyncio.Queue[SampledPart | Future[Completion]] = asyncio.Queue()

    def send(event: Any) -> None:
        if not loop.is_closed():
            loop.call_soon_threadsafe(events.put_nowait, event)

    try:
        async with _time_limit(model.limits):
            for index, choice in enumerate(choices):

                def on_tokens(tokens: Sequence[int], logps: Sequence[float], index: int = index) -> None:
                    send(SampledPart(index, tuple(tokens), tuple(logps)))

                futures.append(model.service.submit(choice, sampling, seed=seed, on_tokens=on_tokens))
                futures[-1].add_done_callback(send)
            unfinished = set(range(len(futures)))
            while unfinished:
                event = await events.get()
                if isinstance(event, SampledPart):
                    yield event
                    continue
                index = next(index for index in unfinished if futures[index] is event)
                unfinished.discard(index)
                completion = event.result()
                if completion.stop_text not in (choices[index].stop_texts or ()):
                    # A stop text of the engine that the request does not name is part of the response.
                    completion = replace(completion, stop_text=None)
                yield SampledPart(index, completion=completion)
    finally:
        for future in futures:
            future.cancel()


async def score(model: ServedModel, sequences: Sequence[Sequence[int]], *, temperature: float) -> list[TokenScores]:
    """Score sequences of tokens; raises the errors of `sample`."""
    async with _time_limit(model.limits):
        futures = [model.service.score(tokens, temperature=temperature) for tokens in sequences]
        return list(await asyncio.gather(*map(asyncio.wrap_future, futures)))


@asynccontextmanager
async def _time_limit(limits: ServingLimits) -> AsyncGenerator[None, None]:
    """Limit the time of an answer, and convert the engine's errors to `ApiError`."""
    try:
        async with asyncio.timeout(limits.request_s):
            yield
    except TimeoutError as error:
        raise ApiError(
            f"no answer within {limits.request_s:g} s; ask for fewer tokens or try again later",
            status=504,
            kind="timeout_error",
            code="timeout",
        ) from error
    except CancelledError as error:
        raise ApiError("the request was cancelled", status=409, code="cancelled") from error
    except Refusal as error:
        raise ApiError(str(error), code="refused") from error
    except Diverged as error:
        raise ApiError(str(error), status=500, kind="server_error", code="diverged") from error


def hash_of(*parts: Any) -> int:
    """Return a number in [0, 2**32), a hash of the parts."""
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:4], "big")

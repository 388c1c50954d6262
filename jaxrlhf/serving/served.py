"""Served model: samples choices of prompts with an engine's service, and streams their tokens."""

import asyncio
import hashlib
import json
import re
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from transformers import PreTrainedTokenizerBase

from jaxrlhf.batch import Diverged, Image
from jaxrlhf.config import Refusal
from jaxrlhf.config.serving import ServingLimits
from jaxrlhf.conversations import ChatFormat
from jaxrlhf.data.control_tokens import ControlTokens
from jaxrlhf.data.images import ImageReader
from jaxrlhf.data.tokenizer import TokenBytes
from jaxrlhf.engine import Completion, EngineService, Request
from jaxrlhf.engine.constraints import TokenConstraint
from jaxrlhf.engine.scoring import TokenScores
from jaxrlhf.serving.errors import ApiError, invalid, too_long, unsupported
from jaxrlhf.serving.grammars import JsonGrammars
from jaxrlhf.serving.wire import Wanted

_MOST_FORMS = 8
_OWN_VARIABLES = {
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
        key = json.dumps(dict(variables), sort_keys=True)
        if (found := self._forms.get(key)) is not None:
            return found
        for name in variables:
            if name in _OWN_VARIABLES or not re.search(rf"\b{re.escape(name)}\b", self.form.template.form.source):
                raise unsupported(
                    f"the chat template of {self.name} has no variable {name!r} to set; leave it out", name
                )
        try:
            made = ChatFormat(self.tokenizer, {**variables, **(self._day or {})}, self.images)
        except Refusal as error:
            raise invalid(f"with {key:.80} {error}", next(iter(variables))) from error
        self._forms[key] = made
        while len(self._forms) > _MOST_FORMS:
            self._forms.pop(next(iter(self._forms)), None)
        return made

    @cached_property
    def _forms(self) -> dict[str, ChatFormat]:
        return {}

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

    @cached_property
    def most_bytes(self) -> int:
        """Number of bytes of the longest text that may fit the context: as many of the longest tokens as fit."""
        longest = max(len(token.encode(errors="replace")) for token in self.tokenizer.get_vocab())
        return longest * self.service.engine.context_tokens

    def check_fits(self, texts: Iterable[str]) -> None:
        """Refuse texts that cannot fit the context in any tokens; tokenizing megabytes would hold up other requests.

        Raises:
          ApiError: The texts are too long.
        """
        total = sum(len(text) for text in texts)
        if total > self.most_bytes:
            context = self.service.engine.context_tokens
            raise too_long(
                f"texts of {total} characters, which cannot fit the context of {context} tokens; shorten them"
            )

    def tokens_of(self, text: str, *, specials: bool = True) -> tuple[int, ...]:
        """Return the token ids of a text; lone surrogates become question marks.

        Args:
          specials: True adds the control tokens that the tokenizer puts around a text.

        Raises:
          ApiError: The text cannot fit the context.
        """
        self.check_fits([text])
        return tuple(self.tokenizer.encode(text.encode(errors="replace").decode(), add_special_tokens=specials))

    def room(self, prompt: Sequence[int], wanted: int | None, *, most: int | None = None) -> int:
        """Return the number of tokens that a response to a prompt may have.

        Args:
          wanted: Number of tokens that the request asks for; None is as many as fit.
          most: Further upper limit; a larger limit than fits is lowered, while a larger `wanted` is refused.

        Raises:
          ApiError: The prompt is empty, or prompt and response do not fit the context.
        """
        engine = self.service.engine
        if not prompt:
            raise ApiError("the prompt has no tokens; give at least one", code="empty_prompt", param="prompt")
        left = engine.context_tokens - len(prompt)
        if left < (wanted != 0):
            raise too_long(f"a prompt of {len(prompt)} tokens, and the context is {engine.context_tokens}; shorten it")
        if wanted is not None and wanted > min(left, engine.response_tokens):
            raise too_long(
                f"a prompt of {len(prompt)} tokens and max_tokens={wanted}; the context is {engine.context_tokens} and "
                f"a response has {engine.response_tokens} at most"
            )
        return min(n for n in (left, engine.response_tokens, wanted, most) if n is not None)


def check_model(model: ServedModel, wanted: str) -> None:
    """Raise `ApiError` if a request names another model."""
    if wanted != model.name:
        message = f"no model {wanted!r:.80}; this server has {model.name!r}"
        raise ApiError(message, status=404, code="model_not_found", param="model")


@dataclass(frozen=True)
class Choice:
    """Response to sample.

    Attributes:
      seed, request_id: Integers that determine the response, together with the prompt.
      keep: Whether the KV cache is kept for a next turn.
      has_replies: Whether the prompt has earlier replies; see `Request`.
      constraint: Constraint of the response; None is free.
    """

    prompt: tuple[int, ...]
    max_tokens: int
    seed: int
    request_id: int
    stop_tokens: tuple[int, ...]
    keep: bool = False
    images: tuple[Image, ...] = ()
    has_replies: bool = False
    constraint: TokenConstraint | None = None


@dataclass(frozen=True)
class DrawnPart:
    """Event of a choice: tokens that were sampled together, or at the end the completion.

    Attributes:
      index: Number of the choice.
    """

    index: int
    tokens: tuple[int, ...] = ()
    logps: tuple[float, ...] = ()
    completion: Completion | None = None


async def draw(
    model: ServedModel, choices: Sequence[Choice], wanted: Wanted, futures: list[Future[Completion]]
) -> AsyncGenerator[DrawnPart, None]:
    """Sample choices together; closing the iterator cancels unfinished choices.

    Args:
      futures: List that receives the futures of the choices.

    Raises:
      ApiError: The time limit passed, the engine failed, or a choice was cancelled by other code.
    """
    loop = asyncio.get_running_loop()
    came: asyncio.Queue[DrawnPart | Future[Completion]] = asyncio.Queue()
    control = [model.control_ids[text] for text in wanted.stop if text in model.control_ids]
    texts = tuple(text for text in wanted.stop if text not in model.control_ids)

    def tell(event: Any) -> None:
        if not loop.is_closed():
            loop.call_soon_threadsafe(came.put_nowait, event)

    try:
        async with _in_time(model.limits):
            for index, choice in enumerate(choices):
                request = Request(
                    choice.request_id,
                    choice.prompt,
                    max_tokens=choice.max_tokens,
                    stop_tokens=tuple(dict.fromkeys((*choice.stop_tokens, *control))),
                    stop_texts=texts or None,
                    keep=choice.keep,
                    images=choice.images,
                    has_replies=choice.has_replies,
                    constraint=choice.constraint,
                )
                future = model.service.submit(
                    request,
                    wanted.sampling,
                    seed=choice.seed,
                    on_tokens=lambda tokens, logps, index=index: tell(DrawnPart(index, tuple(tokens), tuple(logps))),  # type: ignore[misc]
                )
                futures.append(future)
                future.add_done_callback(tell)
            left = set(range(len(futures)))
            while left:
                event = await came.get()
                if isinstance(event, DrawnPart):
                    yield event
                else:
                    index = next(index for index in left if futures[index] is event)
                    left.discard(index)
                    done = event.result()
                    # A stop text of the engine that the request does not name is part of the response.
                    yield DrawnPart(
                        index, completion=done if done.stop_text in texts else replace(done, stop_text=None)
                    )
    finally:
        for future in futures:
            future.cancel()


async def score(model: ServedModel, sequences: Sequence[Sequence[int]], *, temperature: float) -> list[TokenScores]:
    """Score sequences of tokens; raises the errors of `draw`."""
    async with _in_time(model.limits):
        futures = [model.service.score(tokens, temperature=temperature) for tokens in sequences]
        return list(await asyncio.gather(*map(asyncio.wrap_future, futures)))


@asynccontextmanager
async def _in_time(limits: ServingLimits) -> AsyncGenerator[None, None]:
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


def key_of(*parts: Any) -> int:
    """Return a number in [0, 2**32), a hash of the parts."""
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:4], "big")

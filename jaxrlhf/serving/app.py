"""Web application of a server: routes, authentication, and limits on requests."""

import asyncio
import hmac
import json
import re
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Coroutine, Iterator
from contextlib import ExitStack, aclosing, contextmanager
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from jaxrlhf.serving.answers import event
from jaxrlhf.serving.endpoints import ApiAnswer, chat_answer, completion_answer, events, whole
from jaxrlhf.serving.errors import ApiError, invalid, server_error, too_long
from jaxrlhf.serving.metrics import HttpCounts, prometheus
from jaxrlhf.serving.prompts import chat_prompt, chat_request
from jaxrlhf.serving.served import ServedModel, check_model
from jaxrlhf.serving.sessions import ServedSession, SessionBook
from jaxrlhf.serving.wire import CompletionRequest

Handler = Callable[[Request, ServedSession | None], Awaitable[Response]]

_HOST = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[^:\[\]]+)(:[0-9]*)?")
"""Host header: a name or an address in brackets, and a port."""


class WebApp:
    """Web application with the endpoints of one model, and below `/s/` the endpoints of its sessions.

    Args:
      token: API key; see `Server`.
      names: Host names that requests may be addressed to; None admits all names.
    """

    def __init__(
        self, model: ServedModel, *, token: str | None, book: SessionBook, names: Collection[str] | None = None
    ) -> None:
        self._model, self._token, self._book, self._names = model, token, book, names
        self._http = HttpCounts()
        self._sampling: set[asyncio.Future[Any]] = set()
        self._stopped = False
        paths: list[tuple[str, str, Handler]] = [
            ("/v1/models", "GET", self._models),
            ("/v1/models/{model:path}", "GET", self._model_card),
            ("/v1/chat/completions", "POST", self._chat),
            ("/v1/completions", "POST", self._completion),
            ("/tokenize", "POST", self._tokenize),
            ("/detokenize", "POST", self._detokenize),
            ("/tokenizer_info", "GET", self._tokenizer_info),
        ]
        paths += [("/s/{session}" + path, method, handler) for path, method, handler in paths]
        paths += [("/s/{session}/reward", "POST", self._reward), ("/metrics", "GET", self._metrics)]
        routes = [Route(path, self._served(path, handler), methods=[method]) for path, method, handler in paths]
        routes.append(Route("/health", self._health, methods=["GET"]))
        self.asgi = Starlette(routes=routes, exception_handlers={HTTPException: _not_found})

    def stop(self) -> None:
        """Answer open and new requests that the server is stopping; call this in the server's thread."""
        self._stopped = True
        for sampling in [*self._sampling]:
            sampling.cancel()

    def _served(self, path: str, handler: Handler) -> Callable[[Request], Awaitable[Response]]:
        path = path.replace("{session}", "*")

        async def serve(request: Request) -> Response:
            try:
                session = self._admitted(request)
                response = await handler(request, session)
            except ApiError as error:
                headers = {"Retry-After": "1"} if error.status == 429 else None
                response = JSONResponse(error.body, error.status, headers)
            except ClientDisconnect:
                response = Response(status_code=499)
            except Exception as error:
                response = JSONResponse(server_error(error).body, 500)
            self._http.answers[path, response.status_code] += 1
            return response

        return serve

    def _admitted(self, request: Request) -> ServedSession | None:
        """Return the session of a request; None for an admitted request outside sessions.

        Raises:
          ApiError: The request is not admitted.
        """
        host = request.headers.get("host", "")  # not `request.url`, which replaces an invalid host by the server's own
        named = _HOST.fullmatch(host)
        if self._names is not None and (named is None or named[1].strip("[]").lower() not in self._names):
            message = f"addressed to {host!r:.80}, and this server is {' or '.join(sorted(self._names))}"
            raise ApiError(message, status=421, code="misdirected_request")
        scheme, _, key = request.headers.get("authorization", "").partition(" ")
        key = key.strip() if scheme.lower() == "bearer" else ""
        for session_id in (request.path_params.get("session"), key.removeprefix("sk-")):
            if session_id and (session := self._book.find(session_id)) is not None:
                return session
        if "session" in request.path_params:
            raise ApiError("no such session", status=404, code="no_such_session")
        if self._token is not None and not hmac.compare_digest(key.encode(), self._token.encode()):
            message = "a wrong key" if key else "no key; send it as 'Authorization: Bearer KEY'"
            raise ApiError(message, status=401, kind="authentication_error", code="invalid_api_key")
        return None

    async def _chat(self, request: Request, session: ServedSession | None) -> Response:
        model = self._model
        return await self._answered(request, lambda body: chat_answer(model, chat_request(model, body), session))

    async def _completion(self, request: Request, session: ServedSession | None) -> Response:
        model, read = self._model, CompletionRequest.read
        return await self._answered(request, lambda body: completion_answer(model, read(body), session))

    async def _answered(self, request: Request, prepare: Callable[[Any], ApiAnswer]) -> Response:
        """Sample an answer; a closed connection cancels it."""
        with self._under_way() as place:
            answer = await self._read(request, prepare)
            if answer.request.stream:
                return _Events(self._stream(answer), place.pop_all())
            sampling = self._start(whole(answer))
            disconnected = asyncio.ensure_future(_disconnected(request))
            try:
                await asyncio.wait((sampling, disconnected), return_when=asyncio.FIRST_COMPLETED)
                if sampling.cancelled():
                    raise _stopping()
                if not sampling.done():
                    raise ClientDisconnect
                return JSONResponse(sampling.result())
            finally:
                disconnected.cancel()
                sampling.cancel()

    @contextmanager
    def _under_way(self) -> Iterator[ExitStack]:
        """Count a request as under way, from before its body is read; the yielded stack ends the count.

        Raises:
          ApiError: Too many requests are under way, or the server is stopping.
        """
        if self._stopped:
            raise _stopping()
        most = self._model.limits.requests
        if self._http.in_progress >= most:
            message = f"{most} requests are under way, which is the limit; try again later"
            raise ApiError(message, status=429, kind="rate_limit_error", code="too_many_requests")
        with ExitStack() as place:
            self._http.in_progress += 1
            place.callback(self._end)
            yield place

    def _end(self) -> None:
        self._http.in_progress -= 1

    def _start(self, sampling: Coroutine[Any, Any, Any]) -> asyncio.Future[Any]:
        """Start a task that is cancelled when the server stops."""
        if self._stopped:
            sampling.close()
            raise _stopping()
        task = asyncio.ensure_future(sampling)
        self._sampling.add(task)
        task.add_done_callback(self._sampling.discard)
        return task

    async def _stream(self, answer: ApiAnswer) -> AsyncGenerator[bytes, None]:
        """Yield the events of an answer, which a task samples."""
        queue: asyncio.Queue[bytes | None] = asyncio.Queue()

        async def sample() -> None:
            async with aclosing(events(answer)) as sampled:
                async for sent in sampled:
                    queue.put_nowait(sent)

        sampling = self._start(sample())
        sampling.add_done_callback(lambda _: queue.put_nowait(None))
        try:
            while (sent := await queue.get()) is not None:
                yield sent
            if sampling.cancelled():
                yield event(_stopping().body)
        finally:
            sampling.cancel()

    async def _read(self, request: Request, use: Callable[[Any], Any]) -> Any:
        """Return what `use` makes of the body of a request that counts as under way.

        JSON, templates and tokenizers are slow: a thread lets the server handle other requests meanwhile.
        """
        body = await self._body(request)
        return await asyncio.to_thread(lambda: use(_json(body)))

    async def _body(self, request: Request) -> bytearray:
        limits = self._model.limits
        if int(request.headers.get("content-length") or 0) > limits.body_bytes:
            raise _too_large(limits.body_bytes)
        body = bytearray()
        try:
            async with asyncio.timeout(limits.body_s):
                async for part in request.stream():
                    body += part
                    if len(body) > limits.body_bytes:
                        raise _too_large(limits.body_bytes)
        except TimeoutError as error:
            message = f"the request did not arrive within {limits.body_s:g} s"
            raise ApiError(message, status=408, kind="timeout_error", code="timeout") from error
        return body

    def _card(self) -> dict[str, Any]:
        engine = self._model.service.engine
        card = {"id": self._model.name, "object": "model", "created": 0, "owned_by": "jaxrlhf"}
        return {**card, "max_model_len": engine.context_tokens, "max_response_tokens": engine.response_tokens}

    async def _models(self, request: Request, session: ServedSession | None) -> Response:
        return JSONResponse({"object": "list", "data": [self._card()]})

    async def _model_card(self, request: Request, session: ServedSession | None) -> Response:
        check_model(self._model, request.path_params["model"])
        return JSONResponse(self._card())

    async def _tokenize(self, request: Request, session: ServedSession | None) -> Response:
        with self._under_way():
            tokens = await self._read(request, self._tokens_of)
        most = self._model.service.engine.context_tokens
        return JSONResponse({"tokens": list(tokens), "count": len(tokens), "max_model_len": most})

    def _tokens_of(self, body: Any) -> tuple[int, ...]:
        model = self._model
        if isinstance(body, dict) and "messages" in body:
            return chat_prompt(model, chat_request(model, {"model": model.name, **body}), None).tokens
        if isinstance(body, dict) and isinstance(body.get("prompt"), str):
            return model.tokens_of(body["prompt"], specials=bool(body.get("add_special_tokens", True)))
        raise invalid("give a text as prompt, or messages", "prompt")

    async def _detokenize(self, request: Request, session: ServedSession | None) -> Response:
        with self._under_way():
            return JSONResponse({"prompt": await self._read(request, self._text_of)})

    def _text_of(self, body: Any) -> str:
        tokens = body.get("tokens") if isinstance(body, dict) else None
        size, context = len(self._model.tokenizer), self._model.service.engine.context_tokens
        if not isinstance(tokens, list) or not all(type(token) is int and 0 <= token < size for token in tokens):
            raise invalid(f"tokens must be a list of token ids below {size}", "tokens")
        if len(tokens) > context:
            raise too_long(f"{len(tokens)} tokens, and the context is {context}; send fewer")
        return str(self._model.tokenizer.decode(tokens))

    async def _tokenizer_info(self, request: Request, session: ServedSession | None) -> Response:
        tokenizer = self._model.tokenizer
        names = "eos_token", "bos_token", "pad_token", "chat_template"
        return JSONResponse({"tokenizer_class": type(tokenizer).__name__} | {n: getattr(tokenizer, n) for n in names})

    async def _reward(self, request: Request, session: ServedSession | None) -> Response:
        assert session is not None, "the path names one"
        with self._under_way():
            await self._read(request, session.set_reward)
        return JSONResponse({})

    async def _metrics(self, request: Request, session: ServedSession | None) -> Response:
        text = prometheus(self._model.service, self._http)
        return PlainTextResponse(text, media_type="text/plain; version=0.0.4")

    async def _health(self, request: Request) -> Response:
        return JSONResponse({"status": "ok"})


class _Events(StreamingResponse):
    """Stream of events, which counts as under way until it ends or its client leaves.

    Args:
      place: Stack that ends the count.
    """

    def __init__(self, stream: AsyncGenerator[bytes, None], place: ExitStack) -> None:
        super().__init__(stream, media_type="text/event-stream")
        self._events, self._place = stream, place

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._place:
            async with aclosing(self._events):
                await super().__call__(scope, receive, send)


def _json(body: bytearray) -> Any:
    try:
        return json.loads(body)
    except (ValueError, RecursionError) as error:
        raise ApiError(f"the body is no JSON: {str(error)[:200]}", code="invalid_json") from error


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _not_found(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    known = (
        "/v1/models, /v1/models/NAME, /v1/chat/completions, /v1/completions, /tokenize, /detokenize, /tokenizer_info, "
        "/metrics, /health"
    )
    message = f"{request.method} {request.scope['path']}: {error.detail}; there are {known}"
    return JSONResponse(ApiError(message, code="not_found").body, error.status_code)


def _stopping() -> ApiError:
    return ApiError("the server is stopping; ask again later", status=503, kind="server_error", code="stopping")


def _too_large(most: int) -> ApiError:
    return ApiError(f"a body of more than {most} bytes; send less", status=413, code="body_too_large")

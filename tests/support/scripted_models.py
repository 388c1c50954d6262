"""A served model whose engine returns scripted tokens, behind the web application: no program is compiled."""

import asyncio
import json
from concurrent.futures import Future
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from transformers import PreTrainedTokenizerBase

from jaxrlhf.config.serving import ServingLimits
from jaxrlhf.engine import Completion
from jaxrlhf.serving.app import WebApp
from jaxrlhf.serving.served import ServedModel
from jaxrlhf.serving.sessions import SessionBook


@dataclass
class Answer:
    """Answer to a request."""

    status_code: int
    text: str

    def json(self) -> Any:
        return json.loads(self.text)


class Scripted:
    """Service that answers every request with the same tokens.

    Attributes:
      group: Number of tokens that are returned together.
      asked: Requests, in order.
    """

    def __init__(self, tokens: list[int], *, group: int, truncated: bool, stop_text: str | None) -> None:
        self.engine = SimpleNamespace(context_tokens=4096, response_tokens=1024)
        self.tokens, self.group = tuple(tokens), group
        self._end = {"truncated": truncated, "stop_text": stop_text}
        self.asked: list[Any] = []

    def submit(self, request: Any, sampling: Any, *, seed: int, on_tokens: Any) -> Future[Completion]:
        self.asked.append(request)
        for at in range(0, len(self.tokens), self.group):
            part = self.tokens[at : at + self.group]
            on_tokens(part, [-0.5] * len(part))
        logps = (-0.5,) * len(self.tokens)
        future: Future[Completion] = Future()
        future.set_result(Completion(request.request_id, self.tokens, logps, version=1, **self._end))
        return future

    def release(self, request_id: int) -> None:
        pass


class Api:
    """Client of a server whose engine returns scripted tokens.

    Attributes:
      book: Sessions of the server.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        said: str | list[int] = "",
        *,
        group: int = 1,
        truncated: bool = False,
        stop_text: str | None = None,
    ) -> None:
        tokens = tokenizer.encode(said, add_special_tokens=False) if isinstance(said, str) else said
        self.service = Scripted(tokens, group=group, truncated=truncated, stop_text=stop_text)
        self.model = ServedModel("org/tiny", self.service, tokenizer, (), ServingLimits())  # type: ignore[arg-type]
        self.book = SessionBook(self.model, "http://x", sampling=None)
        self._app = WebApp(self.model, token=None, book=self.book)

    def request(self, method: str, path: str, body: Any = None) -> "Answer":
        sent = [{"type": "http.request", "body": b"" if body is None else json.dumps(body).encode()}]
        told: list[Any] = []

        async def receive() -> Any:
            if not sent:
                await asyncio.Event().wait()  # the client stays
            return sent.pop()

        async def send(message: Any) -> None:
            told.append(message)

        scope = {
            "type": "http",
            "method": method,
            "path": path,
            "query_string": b"",
            "headers": [],
            "http_version": "1.1",
        }
        asyncio.run(self._app.asgi(scope, receive, send))
        return Answer(told[0]["status"], b"".join(message.get("body", b"") for message in told[1:]).decode())

    def chat(self, messages: Any = ({"role": "user", "content": "Hi"},), **options: Any) -> Answer:
        body = {"model": "org/tiny", "messages": list(messages), **options}
        return self.request("POST", "/v1/chat/completions", body)

    def choice(self, **options: Any) -> dict[str, Any]:
        """Return the choice of a chat."""
        answer = self.chat(**options)
        assert answer.status_code == 200, answer.text
        return answer.json()["choices"][0]

    def completion(self, **options: Any) -> dict[str, Any]:
        answer = self.request("POST", "/v1/completions", {"model": "org/tiny", "prompt": "Hello", **options})
        assert answer.status_code == 200, answer.text
        return answer.json()["choices"][0]

    def events(self, path: str = "/v1/chat/completions", **options: Any) -> list[dict[str, Any]]:
        """Return the choices of a stream's events."""
        own = {"messages": [{"role": "user", "content": "Hi"}]} if "chat" in path else {"prompt": "Hello"}
        answer = self.request("POST", path, {"model": "org/tiny", **own, "stream": True, **options})
        assert answer.status_code == 200, answer.text
        lines = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line]
        assert lines[-1] == "[DONE]", answer.text
        return [choice for line in lines[:-1] for choice in json.loads(line)["choices"]]

    def streamed(self, **options: Any) -> dict[str, str]:
        """Return all content and reasoning of a streamed chat."""
        said = {"content": "", "reasoning_content": ""}
        for choice in self.events(**options):
            for name in said:
                said[name] += choice["delta"].get(name) or ""
        return said

    def prompt(self) -> str:
        """Return the text of the last request's prompt."""
        return str(self.model.tokenizer.decode(self.service.asked[-1].prompt))

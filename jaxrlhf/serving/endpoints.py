"""Completion endpoints: from a request to its sampled choices, as one answer or as a stream of events."""

import secrets
import time
from collections.abc import AsyncGenerator, Sequence
from concurrent.futures import Future
from contextlib import aclosing, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from jaxrlhf.conversations import ChatFormat
from jaxrlhf.conversations.images import shown
from jaxrlhf.data.image_prompts import referred
from jaxrlhf.data.images import check_pixels
from jaxrlhf.engine import Completion
from jaxrlhf.engine.scoring import TokenScores
from jaxrlhf.episode import Reply, ToolSchema
from jaxrlhf.serving import answers
from jaxrlhf.serving.call_tree import Prompt
from jaxrlhf.serving.errors import TOO_LONG, ApiError, invalid, refusals, server_error, unsupported
from jaxrlhf.serving.served import Choice, DrawnPart, ServedModel, check_model, draw, key_of, score
from jaxrlhf.serving.sessions import ServedSession
from jaxrlhf.serving.texts import ReplyStream, TextStream
from jaxrlhf.serving.wire import ChatRequest, CompletionRequest, Wanted


@dataclass
class ApiAnswer:
    """Answer in progress: its prompts, and the choices sampled so far.

    Attributes:
      prompts: Prompt of each choice.
      tools, form: Tools and chat format of a chat; None for a text completion.
      one_call: Whether a reply has at most one tool call.
      scores: Scores of prompts and responses, by the number of the choice, if the request wants them.
      completions, replies: Completions and parsed replies of the finished choices, by the number of the choice.
    """

    model: ServedModel
    wanted: Wanted
    prompts: list[Prompt]
    choices: list[Choice]
    tools: Sequence[ToolSchema] | None
    session: ServedSession | None
    form: ChatFormat | None = None
    one_call: bool = False
    scores: list[TokenScores] = field(default_factory=list)
    answer_id: str = ""
    created: int = field(default_factory=lambda: int(time.time()))
    completions: dict[int, Completion] = field(default_factory=dict)
    replies: dict[int, Reply] = field(default_factory=dict)

    @property
    def usage(self) -> dict[str, int]:
        """Token counts; a prompt with several choices counts once."""
        asked = sum(len(prompt.tokens) for prompt in self.prompts[:: self.wanted.n])
        drawn = sum(len(completion.tokens) for completion in self.completions.values())
        return {"prompt_tokens": asked, "completion_tokens": drawn, "total_tokens": asked + drawn}

    def envelope(self, kind: str, choices: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Return the body of the answer, or of an event."""
        own = {"id": self.answer_id, "object": kind, "created": self.created, "model": self.model.name}
        return {**own, "choices": list(choices)}

    def opening(self, index: int) -> str:
        """Return the last text before a choice, which may have opened the reply's reasoning."""
        assert self.form is not None, "a chat has a form"
        return self.form.opening(self.prompts[index].tokens)

    def key(self, index: int) -> int:
        """Return the number that determines ids of a choice's tool calls; different in every turn of an episode."""
        return key_of(self.choices[index].request_id, self.choices[index].seed, self.prompts[index].tokens)

    async def drawn(self) -> AsyncGenerator[DrawnPart, None]:
        """Sample the choices; store finished choices in the answer, and record the choices in the session, if any."""
        if self.wanted.max_tokens == 0:
            for index, choice in enumerate(self.choices):
                self._ended(index, Completion(choice.request_id, (), (), truncated=True, version=0))
                yield DrawnPart(index, completion=self.completions[index])
            return
        futures: list[Future[Completion]] = []
        with self.session.under_way() if self.session is not None else nullcontext(futures) as futures:
            async with aclosing(draw(self.model, self.choices, self.wanted, futures)) as events:
                async for event in events:
                    if event.completion is not None:
                        self._ended(event.index, event.completion)
                    yield event
        if self.session is not None:
            self._record(self.session)

    def message(self, index: int) -> dict[str, Any]:
        """Return a choice as the assistant's message."""
        return answers.message(self.replies[index], self.completions[index].stop_text, self.key(index))

    def _ended(self, index: int, completion: Completion) -> None:
        self.completions[index] = completion
        if self.tools is not None and self.form is not None:
            reply = self.form.parse(completion.tokens, self.tools, opening=self.opening(index))
            self.replies[index] = replace(reply, calls=reply.calls[:1]) if self.one_call else reply

    async def score(self) -> None:
        """Score the prompts with the sampled responses."""
        done = [(*prompt.tokens, *self.completions[index].tokens) for index, prompt in enumerate(self.prompts)]
        self.scores = await score(self.model, done, temperature=self.wanted.sampling.temperature)

    def logprobs(self, index: int) -> dict[str, Any]:
        """Return the log-probabilities of a finished choice."""
        done, prompt, likely = self.completions[index], self.prompts[index].tokens, None
        tokens: Sequence[int] = done.tokens
        logps: Any = done.logps
        start = 0 if self.wanted.echo else len(prompt)
        if self.wanted.scores:
            tokens, scores = (*prompt, *done.tokens)[start:], self.scores[index]
            logps = [None if place == 0 else float(scores.logp_T[place]) for place in range(start, start + len(tokens))]
            likely = [scores.likely(place, self.wanted.likely) for place in range(start, start + len(tokens))]
        if self.tools is not None:
            return answers.chat_logprobs(self.model.token_bytes, tokens, logps, likely)
        return answers.TextLogprobs(self.model.token_bytes, prompt[:start]).add(tokens, logps, likely)

    def text(self, index: int) -> str:
        """Return the text of a finished choice, after its prompt with `echo`."""
        done, prompt = self.completions[index], self.prompts[index].tokens
        stream = TextStream(self.model.token_bytes, self.wanted.stop, prompt)
        text = stream.add(done.tokens) + stream.end(done.stop_text)
        return self.model.token_bytes.text(prompt) + text if self.wanted.echo else text

    def _record(self, session: ServedSession) -> None:
        with session.lock:
            session.check_open()
            calls = []
            for index, prompt in enumerate(self.prompts):
                done = self.completions[index]
                words: dict[str, Any] = {}
                if self.tools is not None:
                    words = {"reply": self.replies[index], "message": self.message(index)}
                calls.append(session.tree.drew(prompt, done.tokens, done.logps, done.version, **words))
            session.record(self.answer_id, calls, list(self.completions.values()))


def chat_prompt(model: ServedModel, request: ChatRequest, session: ServedSession | None) -> Prompt:
    """Return the prompt of a chat request, which may continue a call of the session.

    Raises:
      ApiError: The request makes no valid prompt.
    """
    if request.variables and session is not None:
        name = next(iter(request.variables))
        raise unsupported(f"{name}: the calls of a session are written by the run's own chat template", name)
    form = _form(model, request)
    model.check_fits(str(message.get("content", "")) for message in request.messages)
    with refusals("tools"):
        form.check_tools(request.tools)
        _check_shown(form, model.name, request)
    with refusals("messages"):
        if model.images is not None:
            check_pixels(request.images, place="messages")
        images = referred(request.images, model.images, place="messages") if request.images else ()
        if session is not None:
            with session.lock:
                return session.tree.chat(request.messages, request.tools, images)
        write = partial(form.prompt, request.messages, request.tools)
        tokens, images = shown(images, model.images, write, place="messages")
        return Prompt(tokens, None, images=images)


def _form(model: ServedModel, request: ChatRequest) -> ChatFormat:
    with refusals("chat_template_kwargs"):
        return model.form_of(request.variables)


def _check_shown(form: ChatFormat, name: str, request: ChatRequest) -> None:
    """Refuse tools that neither the chat template nor a message shows to the policy."""
    if not request.tools or form.family == "embedded" or form.synthetic.shows(request.tools):
        return  # the embedded tokenizer's calls are GSM8K's calculator calls, and its prompts show no tools
    said = form.template.render(form.template_messages(request.messages), request.tools, open_reply=True)
    hidden = [called for tool in request.tools if (called := str(tool["function"]["name"])) not in said]
    if hidden:
        raise unsupported(
            f"the chat template of {name} shows no tools, and no message names {', '.join(hidden)}; describe "
            "them in the system's message",
            "tools",
        )


def chat_answer(model: ServedModel, request: ChatRequest, session: ServedSession | None) -> ApiAnswer:
    """Prepare the answer to a chat request; nothing is sampled yet.

    Raises:
      ApiError: The request cannot be answered.
    """
    prompt = chat_prompt(model, request, session)
    form = _form(model, request)
    if request.wanted.likely and prompt.images:
        raise unsupported("top_logprobs: likely tokens beside images are not computed; leave it out", "top_logprobs")
    if request.one_call and request.tools and session is not None:
        raise unsupported(
            "parallel_tool_calls=false: a session trains on all calls that the policy wrote; leave it out",
            "parallel_tool_calls",
        )
    if request.wanted.schema is not None:
        opening = form.opening(prompt.tokens)
        if form.parse(form.tokenizer.encode("{}", add_special_tokens=False), opening=opening).content.strip() != "{}":
            raise unsupported(
                "response_format: the chat template opens an answer with other text than content; turn its reasoning "
                "off by chat_template_kwargs",
                "response_format",
            )
    stops = (*form.stop_tokens, *model.stop_tokens)
    answer = _answer(model, request.wanted, [prompt], stops, request.tools, session, "chatcmpl")
    return replace(answer, form=form, one_call=request.one_call)


def completion_answer(model: ServedModel, request: CompletionRequest, session: ServedSession | None) -> ApiAnswer:
    """Prepare the answer to a completion request; raises the errors of `chat_answer`."""
    prompts = []
    for given in request.prompts:
        tokens = model.tokens_of(given) if isinstance(given, str) else given
        if session is None:
            prompts.append(Prompt(tokens, None))
            continue
        with session.lock:
            prompts.append(session.tree.plain(tokens, given if isinstance(given, str) else None))
    return _answer(model, request.wanted, prompts, model.stop_tokens, None, session, "cmpl")


def _answer(
    model: ServedModel,
    wanted: Wanted,
    prompts: list[Prompt],
    stops: tuple[int, ...],
    tools: Sequence[ToolSchema] | None,
    session: ServedSession | None,
    prefix: str,
) -> ApiAnswer:
    check_model(model, wanted.model)
    if session is not None:
        _check_trains(wanted, "logprobs" if tools is None else "top_logprobs")
    count = len(prompts) * wanted.n
    if count > model.limits.choices:
        raise invalid(f"{count} choices; at most {model.limits.choices} in a request", "n")
    most = None if session is None else session.most_tokens(count)
    wanted_tokens = wanted.max_tokens if most is None else min(most, wanted.max_tokens or most)
    try:
        rooms = [
            model.room(prompt.tokens, wanted_tokens if most is None else None, most=wanted_tokens) for prompt in prompts
        ]
    except ApiError as error:
        if session is not None and error.code == TOO_LONG:
            session.refuse("context")
        raise
    stops = () if wanted.ignore_eos else tuple(dict.fromkeys(stops))
    seed = secrets.randbits(32) if wanted.seed is None else wanted.seed
    if session is not None and session.sampling is not None:
        wanted = replace(wanted, sampling=session.sampling)
    choices, each = [], []
    for prompt, room in zip(prompts, rooms, strict=True):
        keys = list(range(wanted.n)) if session is None else session.begin(prompt.seen, wanted.n)
        for key in keys:
            drawn_by = (seed, key) if session is None else (session.seed, key)
            goes_on = prompt.before is not None
            constraint = None if wanted.schema is None else model.grammars.constraint(wanted.schema, stops)
            choices.append(
                Choice(prompt.tokens, room, *drawn_by, stops, session is not None, prompt.images, goes_on, constraint)
            )
            each.append(prompt)
    answer_id = f"{prefix}-{secrets.token_hex(12)}"
    return ApiAnswer(model, wanted, each, choices, tools, session, answer_id=answer_id)


def _check_trains(wanted: Wanted, likely_name: str) -> None:
    """Refuse fields that a session cannot answer, because its calls become training sequences."""
    likely = "a session records the log-probabilities of its own tokens only"
    for name, given, reason in (
        ("response_format", wanted.schema is not None, "the masks of a grammar would be needed to train, and are not"),
        ("ignore_eos", wanted.ignore_eos, "a session's answers end as the run's settings say"),
        ("max_tokens", wanted.max_tokens == 0, "an answer of no token trains nothing"),
        ("echo", wanted.echo, likely),
        (likely_name, wanted.likely > 0, likely),
    ):
        if given:
            raise unsupported(f"{name}: {reason}; leave it out", name)


async def whole(answer: ApiAnswer) -> dict[str, Any]:
    """Sample all choices and return the complete answer."""
    async with aclosing(answer.drawn()) as events:
        async for _ in events:
            pass
    if answer.wanted.scores:
        await answer.score()
    choices = []
    for index in range(len(answer.choices)):
        done = answer.completions[index]
        choice: dict[str, Any] = {
            "index": index,
            "logprobs": answer.logprobs(index) if answer.wanted.logprobs else None,
        }
        if answer.tools is not None:
            choice["message"] = answer.message(index)
            choice["finish_reason"] = answers.finish_reason(done, answer.replies[index])
        else:
            choice |= {"text": answer.text(index), "finish_reason": answers.finish_reason(done)}
        if answer.wanted.token_ids:
            choice |= {"token_ids": list(done.tokens), "prompt_token_ids": list(answer.prompts[index].tokens)}
        choices.append(choice)
    body = answer.envelope(answers.TEXT if answer.tools is None else answers.CHAT, choices)
    return {**body, "usage": answer.usage}


async def events(answer: ApiAnswer) -> AsyncGenerator[bytes, None]:
    """Yield the answer as server-sent events; an error becomes the last event."""
    chat = answer.tools is not None
    kind = answers.CHUNK if chat else answers.TEXT
    try:
        said = [_Said(answer, index) for index in range(len(answer.choices))]
        if chat:
            for index in range(len(said)):
                first = {"index": index, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}
                yield answers.event(answer.envelope(kind, [first]))
        async with aclosing(answer.drawn()) as drawn:
            async for event in drawn:
                for choice in said[event.index].events(event):
                    yield answers.event(answer.envelope(kind, [choice]))
        if answer.wanted.usage:
            yield answers.event({**answer.envelope(kind, []), "usage": answer.usage})
        yield answers.DONE
    except ApiError as error:
        yield answers.event(error.body)
    except Exception as error:
        yield answers.event(server_error(error).body)


class _Said:
    """Stream state of a choice: converts sampled tokens to choices of events."""

    def __init__(self, answer: ApiAnswer, index: int) -> None:
        self._answer, self._index = answer, index
        stops = answer.wanted.stop
        self._bytes, prompt = answer.model.token_bytes, answer.prompts[index].tokens
        self._text, self._logprobs = TextStream(self._bytes, stops, prompt), answers.TextLogprobs(self._bytes, prompt)
        self._reply: ReplyStream | None = None
        if answer.tools is not None and answer.form is not None:
            self._reply = ReplyStream(answer.form, answer.tools, answer.opening(index), stops)
        self._first = True

    def events(self, event: DrawnPart) -> list[dict[str, Any]]:
        """Return the event choices for new tokens, or for the end of the choice."""
        made = [self._tokens(event)] if event.tokens else []
        return made + self._end(event.completion) if event.completion is not None else made

    def _tokens(self, event: DrawnPart) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": self._index, "finish_reason": None, "logprobs": None}
        if self._reply is None:
            choice["text"] = self._text.add(event.tokens)
            if self._answer.wanted.logprobs:
                choice["logprobs"] = self._logprobs.add(event.tokens, event.logps)
        else:
            choice["delta"] = _delta(self._reply.add(event.tokens))
            if self._answer.wanted.logprobs:
                first, self._first = self._first, False
                choice["logprobs"] = answers.chat_logprobs(self._bytes, event.tokens, event.logps, first=first)
        if self._answer.wanted.token_ids:
            choice["token_ids"] = list(event.tokens)
        return choice

    def _end(self, done: Completion) -> list[dict[str, Any]]:
        choice: dict[str, Any] = {"index": self._index, "logprobs": None}
        if self._answer.wanted.token_ids:
            choice["prompt_token_ids"] = list(self._answer.prompts[self._index].tokens)
        if self._reply is None:
            return [{**choice, "text": self._text.end(done.stop_text), "finish_reason": answers.finish_reason(done)}]
        reply = self._answer.replies[self._index]
        delta = _delta(self._reply.end(reply, done.stop_text))
        calls = answers.tool_calls(reply, self._answer.key(self._index), delta=True)
        if calls:
            delta["tool_calls"] = calls
        return [{**choice, "delta": delta, "finish_reason": answers.finish_reason(done, reply)}]


def _delta(said: dict[str, str]) -> dict[str, Any]:
    names = {"reasoning": "reasoning_content", "content": "content"}
    return {names[name]: text for name, text in said.items()}

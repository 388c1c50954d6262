"""Completion endpoints: from a request to its sampled choices, as one answer or as a stream of events."""

import secrets
import time
from collections.abc import AsyncGenerator, Sequence
from concurrent.futures import Future
from contextlib import aclosing, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

from jaxrlhf.config import Sampling
from jaxrlhf.conversations import ChatFormat
from jaxrlhf.engine import Completion, Request
from jaxrlhf.engine.scoring import TokenScores
from jaxrlhf.episode import Reply, ToolSchema
from jaxrlhf.serving import answers
from jaxrlhf.serving.call_tree import Prompt
from jaxrlhf.serving.errors import ApiError, invalid, server_error, unsupported
from jaxrlhf.serving.prompts import chat_form, chat_prompt, completion_prompts, counting_refusals
from jaxrlhf.serving.served import SampledPart, ServedModel, check_model, hash_of, sample, score
from jaxrlhf.serving.sessions import ServedSession
from jaxrlhf.serving.texts import ReplyStream, TextStream
from jaxrlhf.serving.wire import ChatRequest, CompletionRequest


@dataclass
class ApiAnswer:
    """Answer in progress: its prompts, and the choices sampled so far.

    Attributes:
      prompts, choices: Prompt and engine request of each choice.
      form, tools: Chat format and tools of a chat; the format of a text completion is None.
      completions, replies: Completions and parsed replies of the finished choices, by the number of the choice.
      scores: Scores of prompts and responses, by the number of the choice, if the request wants scores.
    """

    model: ServedModel
    request: ChatRequest | CompletionRequest
    prompts: list[Prompt]
    choices: list[Request]
    sampling: Sampling
    seed: int
    session: ServedSession | None
    answer_id: str
    form: ChatFormat | None
    tools: Sequence[ToolSchema]
    created: int = field(default_factory=lambda: int(time.time()))
    completions: dict[int, Completion] = field(default_factory=dict)
    replies: dict[int, Reply] = field(default_factory=dict)
    scores: list[TokenScores] = field(default_factory=list)

    @property
    def usage(self) -> dict[str, int]:
        """Token counts; a prompt with several choices counts once."""
        prompt = sum(len(prompt.tokens) for prompt in self.prompts[:: self.request.n])
        sampled = sum(len(completion.tokens) for completion in self.completions.values())
        return {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled}

    def envelope(self, kind: str, choices: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Return the body of the answer, or of an event."""
        header = {"id": self.answer_id, "object": kind, "created": self.created, "model": self.model.name}
        return {**header, "choices": list(choices)}

    def opening(self, index: int) -> str:
        """Return the last text before a choice, which may have opened the reply's reasoning."""
        assert self.form is not None, "a chat has a form"
        return self.form.opening(self.prompts[index].tokens)

    def key(self, index: int) -> int:
        """Return the number that determines ids of a choice's tool calls; different in every turn of an episode."""
        return hash_of(self.choices[index].request_id, self.seed, self.prompts[index].tokens)

    async def sampled(self) -> AsyncGenerator[SampledPart, None]:
        """Sample the choices; store finished choices in the answer, and record the choices in the session, if any."""
        if self.request.max_tokens == 0:
            for index, choice in enumerate(self.choices):
                self._finish(index, Completion(choice.request_id, (), (), truncated=True, version=0))
                yield SampledPart(index, completion=self.completions[index])
            return
        futures: list[Future[Completion]] = []
        with self.session.in_progress() if self.session is not None else nullcontext(futures) as futures:
            parts = sample(self.model, self.choices, self.sampling, seed=self.seed, futures=futures)
            async with aclosing(parts):
                async for part in parts:
                    if part.completion is not None:
                        self._finish(part.index, part.completion)
                    yield part
        if self.session is not None:
            self._record(self.session)

    def message(self, index: int) -> dict[str, Any]:
        """Return a choice as the assistant's message."""
        return answers.message(self.replies[index], self.completions[index].stop_text, self.key(index))

    def _finish(self, index: int, completion: Completion) -> None:
        self.completions[index] = completion
        if isinstance(self.request, ChatRequest) and self.form is not None:
            reply = self.form.parse(completion.tokens, self.tools, opening=self.opening(index))
            calls = reply.calls if self.request.parallel_tool_calls else reply.calls[:1]
            self.replies[index] = replace(reply, calls=calls)

    async def score(self) -> None:
        """Score the prompts with the sampled responses."""
        sequences = [(*prompt.tokens, *self.completions[index].tokens) for index, prompt in enumerate(self.prompts)]
        self.scores = await score(self.model, sequences, temperature=self.sampling.temperature)

    def logprobs(self, index: int) -> dict[str, Any]:
        """Return the log-probabilities of a finished choice."""
        completion, prompt, likely = self.completions[index], self.prompts[index].tokens, None
        tokens: Sequence[int] = completion.tokens
        logps: Any = completion.logps
        start = 0 if self.request.echo else len(prompt)
        if self.request.wants_scores:
            tokens, scores = (*prompt, *completion.tokens)[start:], self.scores[index]
            places = range(start, start + len(tokens))
            logps = [None if place == 0 else float(scores.logp_T[place]) for place in places]
            likely = [scores.likely(place, self.request.likely) for place in places]
        return self.logprobs_stream(prompt[:start]).add(tokens, logps, likely)

    def logprobs_stream(self, prompt: tuple[int, ...]) -> answers.ChatLogprobs | answers.TextLogprobs:
        """Return a new stream of log-probabilities of the tokens after a prompt."""
        tokens = self.model.token_bytes
        return answers.TextLogprobs(tokens, prompt) if self.form is None else answers.ChatLogprobs(tokens)

    def text(self, index: int) -> str:
        """Return the text of a finished choice, after its prompt with `echo`."""
        completion, prompt = self.completions[index], self.prompts[index].tokens
        stream = TextStream(self.model.token_bytes, self.request.stop, prompt)
        text = stream.add(completion.tokens) + stream.end(completion.stop_text)
        return self.model.token_bytes.text(prompt) + text if self.request.echo else text

    def _record(self, session: ServedSession) -> None:
        with session.lock:
            session.check_open()
            calls = []
            for index, prompt in enumerate(self.prompts):
                message = None if self.form is None else self.message(index)
                completion, reply = self.completions[index], self.replies.get(index)
                calls.append(session.tree.record(prompt, completion, reply=reply, message=message))
            session.record(self.answer_id, calls)


def chat_answer(model: ServedModel, request: ChatRequest, session: ServedSession | None) -> ApiAnswer:
    """Prepare the answer to a chat request; nothing is sampled yet.

    Raises:
      ApiError: The request cannot be answered.
    """
    _check_request(model, request, session, prompts=1)
    with counting_refusals(session):
        prompt = chat_prompt(model, request, session)
    form = chat_form(model, request)
    if request.likely and prompt.images:
        raise unsupported("top_logprobs: likely tokens beside images are not computed; leave it out", "top_logprobs")
    if request.tools and not request.parallel_tool_calls and session is not None:
        raise unsupported(
            "parallel_tool_calls=false: a session trains on all calls that the policy wrote; leave it out",
            "parallel_tool_calls",
        )
    if request.response_format is not None:
        opening = form.opening(prompt.tokens)
        if form.parse(form.tokenizer.encode("{}", add_special_tokens=False), opening=opening).content.strip() != "{}":
            raise unsupported(
                "response_format: the chat template opens an answer with other text than content; turn its reasoning "
                "off by chat_template_kwargs",
                "response_format",
            )
    return _answer(model, request, [prompt], session, form, request.tools)


def completion_answer(model: ServedModel, request: CompletionRequest, session: ServedSession | None) -> ApiAnswer:
    """Prepare the answer to a completion request; raises the errors of `chat_answer`."""
    _check_request(model, request, session, prompts=len(request.prompt))
    with counting_refusals(session):
        prompts = completion_prompts(model, request, session)
    return _answer(model, request, prompts, session)


def _check_request(
    model: ServedModel, request: ChatRequest | CompletionRequest, session: ServedSession | None, *, prompts: int
) -> None:
    """Refuse another model, fields that a session cannot answer, and too many choices; no prompt is tokenized yet."""
    check_model(model, request.model)
    if session is not None:
        _check_trainable(request)
    if (count := prompts * request.n) > model.limits.choices:
        raise invalid(f"{count} choices; at most {model.limits.choices} in a request", "n")


def _answer(
    model: ServedModel,
    request: ChatRequest | CompletionRequest,
    prompts: list[Prompt],
    session: ServedSession | None,
    form: ChatFormat | None = None,
    tools: Sequence[ToolSchema] = (),
) -> ApiAnswer:
    most = None if session is None else session.tokens_per_choice(len(prompts) * request.n)
    wanted = request.max_tokens if most is None else min(most, request.max_tokens or most)
    with counting_refusals(session):
        limits = [
            model.response_limit(prompt.tokens, wanted if most is None else None, most=wanted) for prompt in prompts
        ]
    stops = () if request.ignore_eos else (*(form.stop_tokens if form is not None else ()), *model.stop_tokens)
    control = [model.control_ids[text] for text in request.stop if text in model.control_ids]
    texts = tuple(text for text in request.stop if text not in model.control_ids)
    choices, each = [], []
    for prompt, limit in zip(prompts, limits, strict=True):
        for request_id in range(request.n) if session is None else session.start_choices(prompt.key, request.n):
            schema = request.response_format
            choice = Request(
                request_id,
                prompt.tokens,
                max_tokens=limit,
                stop_tokens=tuple(dict.fromkeys((*stops, *control))),
                stop_texts=texts or None,
                keep=session is not None,
                images=prompt.images,
                has_replies=prompt.before is not None,
                constraint=None if schema is None else model.grammars.constraint(schema, stops),
            )
            choices.append(choice)
            each.append(prompt)
    sampling, seed = request.sampling, secrets.randbits(32) if request.seed is None else request.seed % 2**32
    if session is not None:
        sampling, seed = session.sampling or sampling, session.seed
    answer_id = f"{'cmpl' if form is None else 'chatcmpl'}-{secrets.token_hex(12)}"
    return ApiAnswer(model, request, each, choices, sampling, seed, session, answer_id, form, tools)


def _check_trainable(request: ChatRequest | CompletionRequest) -> None:
    """Refuse fields that a session cannot answer, because its calls become training sequences."""
    likely = "a session records the log-probabilities of its own tokens only"
    masks = "the masks of a grammar would be needed to train, and are not recorded"
    for name, given, reason in (
        ("response_format", request.response_format is not None, masks),
        ("ignore_eos", request.ignore_eos, "a session's answers end as the run's settings say"),
        ("max_tokens", request.max_tokens == 0, "an answer of no token trains nothing"),
        ("echo", request.echo, likely),
        (request.likely_field, request.likely > 0, likely),
    ):
        if given:
            raise unsupported(f"{name}: {reason}; leave it out", name)


async def whole(answer: ApiAnswer) -> dict[str, Any]:
    """Sample all choices and return the complete answer."""
    async with aclosing(answer.sampled()) as parts:
        async for _ in parts:
            pass
    if answer.request.wants_scores:
        await answer.score()
    choices = []
    for index, completion in sorted(answer.completions.items()):
        logprobs = answer.logprobs(index) if answer.request.wants_logprobs else None
        choice: dict[str, Any] = {"index": index, "logprobs": logprobs}
        if answer.form is not None:
            choice["message"] = answer.message(index)
        else:
            choice["text"] = answer.text(index)
        choice["finish_reason"] = answers.finish_reason(completion, answer.replies.get(index))
        if answer.request.return_token_ids:
            choice |= {"token_ids": list(completion.tokens), "prompt_token_ids": list(answer.prompts[index].tokens)}
        choices.append(choice)
    body = answer.envelope(answers.TEXT if answer.form is None else answers.CHAT, choices)
    return {**body, "usage": answer.usage}


async def events(answer: ApiAnswer) -> AsyncGenerator[bytes, None]:
    """Yield the answer as server-sent events; an error becomes the last event."""
    kind = answers.TEXT if answer.form is None else answers.CHUNK
    try:
        streams = [_ChoiceStream(answer, index) for index in range(len(answer.choices))]
        if answer.form is not None:
            for index in range(len(streams)):
                first = {"index": index, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}
                yield answers.event(answer.envelope(kind, [first]))
        async with aclosing(answer.sampled()) as parts:
            async for part in parts:
                for choice in streams[part.index].events(part):
                    yield answers.event(answer.envelope(kind, [choice]))
        if answer.request.stream_options.get("include_usage"):
            yield answers.event({**answer.envelope(kind, []), "usage": answer.usage})
        yield answers.DONE
    except ApiError as error:
        yield answers.event(error.body)
    except Exception as error:
        yield answers.event(server_error(error).body)


class _ChoiceStream:
    """Stream state of a choice: converts sampled tokens to choices of events."""

    def __init__(self, answer: ApiAnswer, index: int) -> None:
        self._answer, self._request, self._index = answer, answer.request, index
        stops, prompt = answer.request.stop, answer.prompts[index].tokens
        self._text, self._logprobs = TextStream(answer.model.token_bytes, stops, prompt), answer.logprobs_stream(prompt)
        self._reply: ReplyStream | None = None
        if answer.form is not None:
            self._reply = ReplyStream(answer.form, answer.tools, answer.opening(index), stops)

    def events(self, part: SampledPart) -> list[dict[str, Any]]:
        """Return the event choices for new tokens, or for the end of the choice."""
        choices = [self._tokens(part)] if part.tokens else []
        return choices if part.completion is None else [*choices, self._end(part.completion)]

    def _tokens(self, part: SampledPart) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": self._index, "finish_reason": None, "logprobs": None}
        if self._reply is None:
            choice["text"] = self._text.add(part.tokens)
        else:
            choice["delta"] = _delta(self._reply.add(part.tokens))
        if self._request.wants_logprobs:
            choice["logprobs"] = self._logprobs.add(part.tokens, part.logps)
        if self._request.return_token_ids:
            choice["token_ids"] = list(part.tokens)
        return choice

    def _end(self, completion: Completion) -> dict[str, Any]:
        reply = self._answer.replies.get(self._index)
        finish_reason = answers.finish_reason(completion, reply)
        choice: dict[str, Any] = {"index": self._index, "logprobs": None, "finish_reason": finish_reason}
        if self._request.return_token_ids:
            choice["prompt_token_ids"] = list(self._answer.prompts[self._index].tokens)
        if self._reply is None or reply is None:
            return {**choice, "text": self._text.end(completion.stop_text)}
        delta = _delta(self._reply.end(reply, completion.stop_text))
        if calls := answers.tool_calls(reply, self._answer.key(self._index), delta=True):
            delta["tool_calls"] = calls
        return {**choice, "delta": delta}


def _delta(added: dict[str, str]) -> dict[str, Any]:
    return {"reasoning_content" if name == "reasoning" else name: text for name, text in added.items()}

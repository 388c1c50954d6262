"""Prompts of requests; limits are checked before anything is rendered or tokenized."""

import re
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

from jaxrlhf.conversations import ChatFormat
from jaxrlhf.conversations.images import tokenize_with_images
from jaxrlhf.data.image_prompts import referred
from jaxrlhf.data.images import check_pixels
from jaxrlhf.serving.call_tree import Prompt
from jaxrlhf.serving.errors import TOO_LONG, ApiError, refusals, too_long, unsupported
from jaxrlhf.serving.served import ServedModel
from jaxrlhf.serving.sessions import ServedSession
from jaxrlhf.serving.wire import ChatRequest, CompletionRequest


def chat_request(model: ServedModel, body: Any) -> ChatRequest:
    """Read the body of a chat request.

    Raises:
      ApiError: There are more messages than the context has tokens, or a field is wrong.
    """
    messages = body.get("messages") if isinstance(body, dict) else None
    context = model.service.engine.context_tokens
    if isinstance(messages, list) and len(messages) > context:
        raise too_long(f"{len(messages)} messages, which cannot fit the context of {context} tokens; send fewer")
    return ChatRequest.read(body)


def chat_prompt(model: ServedModel, request: ChatRequest, session: ServedSession | None) -> Prompt:
    """Return the prompt of a chat request, which may continue a call of the session.

    Raises:
      ApiError: The request makes no valid prompt.
    """
    if request.variables and session is not None:
        name = next(iter(request.variables))
        raise unsupported(f"{name}: the calls of a session are written by the run's own chat template", name)
    with refusals("messages"):
        texts = [text for message in request.messages for text in message.values()]
        model.check_fits([*texts, *request.tools, request.variables])
    form = chat_form(model, request)
    with refusals("tools"):
        form.check_tools(request.tools)
        _check_shown(form, model.name, request)
    with refusals("messages"):
        if model.images is not None:
            check_pixels(request.images, place="messages")
        images = referred(request.images, model.images, place="messages") if request.images else ()
        context = model.service.engine.context_tokens
        if (size := sum(image.tokens for image in images)) > context:
            raise too_long(f"images of {size} tokens, and the context is {context}; send fewer or smaller images")
        if session is not None:
            with session.lock:
                return session.tree.chat_prompt(request.messages, request.tools, images)
        write = partial(form.prompt, request.messages, request.tools)
        tokens, images = tokenize_with_images(images, model.images, write, place="messages")
        return Prompt(tokens, images=images)


def chat_form(model: ServedModel, request: ChatRequest) -> ChatFormat:
    """Return the chat format with the request's variables of the chat template."""
    with refusals("chat_template_kwargs"):
        return model.form_of(request.variables)


def _check_shown(form: ChatFormat, name: str, request: ChatRequest) -> None:
    """Refuse tools that neither the chat template nor a message shows to the policy."""
    if not request.tools or form.family == "embedded" or form.synthetic.shows(request.tools):
        return  # the embedded tokenizer's calls are GSM8K's calculator calls, and its prompts show no tools
    told = "\n".join(str(message.get("content", "")) for message in request.messages)
    names = [str(tool["function"]["name"]) for tool in request.tools]
    if hidden := [called for called in names if not re.search(rf"(?<!\w){re.escape(called)}(?!\w)", told)]:
        # A template that refuses the tools shows none; then its own reason says more.
        form.template.render(form.template_messages(request.messages), request.tools, open_reply=True)
        raise unsupported(
            f"the chat template of {name} shows no tools, and no message names {', '.join(hidden)}; describe "
            "them in the system's message",
            "tools",
        )


def completion_prompts(model: ServedModel, request: CompletionRequest, session: ServedSession | None) -> list[Prompt]:
    """Return the prompts of a completion request, which may continue calls of the session.

    Raises:
      ApiError: A prompt is empty or does not fit the context; the prompts after it are not tokenized.
    """
    for given in request.prompt:
        if isinstance(given, str):
            model.check_fits([given])
    prompts = []
    for given in request.prompt:
        text = given if isinstance(given, str) else None
        tokens = given if text is None else model.tokens_of(text)
        with nullcontext() if session is None else session.lock:
            prompts.append(Prompt(tokens) if session is None else session.tree.completion_prompt(tokens, text))
        model.response_limit(prompts[-1].tokens, 0 if request.max_tokens == 0 else None)
    return prompts


@contextmanager
def counting_refusals(session: ServedSession | None) -> Iterator[None]:
    """Count a prompt that is too long for the context as a refusal of its session."""
    try:
        yield
    except ApiError as error:
        if session is not None and error.code == TOO_LONG:
            session.count_refusal("context")
        raise

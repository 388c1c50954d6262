"""Costs of requests: limits that hold before anything is rendered, tokenized or stored, and work that stays linear."""

import json
import random
import socket
import time
from contextlib import ExitStack
from dataclasses import replace
from types import SimpleNamespace

import httpx2 as httpx
import numpy as np
import pytest
from chat_families import tokenizer_of
from scripted_models import Api
from tokenizers import AddedToken

from jaxrlhf.config.serving import ServingLimits
from jaxrlhf.conversations.chat_format import _check_shown
from jaxrlhf.data.chats.message_form import answers_as_users
from jaxrlhf.data.control_tokens import ControlTokens
from jaxrlhf.data.tokenizer import embedded_tokenizer
from jaxrlhf.episode import EnvironmentFailure
from jaxrlhf.serving.errors import ApiError
from jaxrlhf.serving.grammars import JsonGrammars
from jaxrlhf.serving.messages import merged_systems
from jaxrlhf.serving.server import Server

LONG = "a" * (3 << 20)
NUMBERS = [0] * (1 << 20)
USER = {"role": "user", "content": "Hi"}


def tool(**fields):
    schema = {"type": "object", "properties": {"x": {"type": "integer"}}}
    return {"type": "function", "function": {"name": "f", "parameters": schema, **fields}}


def calling(arguments):
    call = {"type": "function", "id": "abcdefghi", "function": {"name": "f", "arguments": json.dumps(arguments)}}
    return {"messages": [USER, {"role": "assistant", "content": "", "tool_calls": [call]}, USER]}


LONG_CHATS = {
    "content": {"messages": [{"role": "user", "content": LONG}]},
    "several contents": {"messages": [{"role": "user", "content": "a" * 30_000}] * 100},
    "reasoning": {"messages": [USER, {"role": "assistant", "content": "So.", "reasoning_content": LONG}, USER]},
    "text in arguments": calling({"x": LONG}),
    "numbers in arguments": calling({"x": NUMBERS}),
    "description of a tool": {"tools": [tool(description=LONG)]},
    "numbers in a tool": {"tools": [tool(parameters={"type": "object", "properties": {"x": {"enum": NUMBERS}}})]},
    "variable": {"chat_template_kwargs": {"enable_thinking": LONG}},
}


@pytest.fixture
def api(monkeypatch):
    """Client of a server with a context of 4096 tokens, which must neither render nor tokenize."""
    api = Api(tokenizer_of("qwen3"), "So.")
    assert api.chat().status_code == 200

    def used(*_, **__):
        pytest.fail("rendered or tokenized")

    monkeypatch.setattr("jaxrlhf.conversations.rendering.render_chat", used)
    monkeypatch.setattr(api.model.tokenizer, "encode", used)
    return api


def refusal(answer):
    error = answer.json()["error"]
    return answer.status_code, error["code"], error["message"]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/tokenize"])
@pytest.mark.parametrize("chat", LONG_CHATS.values(), ids=LONG_CHATS)
def test_long_chat_is_refused_before_it_is_rendered(api, chat, path):
    status, code, message = refusal(api.request("POST", path, {"model": "org/tiny", "messages": [USER], **chat}))
    assert (status, code) == (400, "context_length_exceeded")
    assert "cannot fit the context of 4096 tokens" in message


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/tokenize"])
def test_more_messages_than_tokens_are_refused_before_they_are_read(api, monkeypatch, path):
    monkeypatch.setattr("jaxrlhf.serving.wire.message_of", lambda *_: pytest.fail("read"))
    chat = {"model": "org/tiny", "messages": [{"role": "system"}] * 200_000}
    status, code, message = refusal(api.request("POST", path, chat))
    assert (status, code) == (400, "context_length_exceeded") and "200000 messages" in message


def test_chat_of_the_contexts_length_is_answered():
    api = Api(tokenizer_of("qwen3"), "So.")
    several = [{"role": "system", "content": "Be brief."}, *[{"role": "user", "content": "a"}] * 100]
    assert api.chat(several, tools=[tool()], chat_template_kwargs={"enable_thinking": False}).status_code == 200
    assert api.request("POST", "/tokenize", {"prompt": "a" * 65_536}).json()["count"] > 4096
    status, code, message = refusal(api.request("POST", "/tokenize", {"prompt": "a" * 65_537}))
    assert (status, code) == (400, "context_length_exceeded") and "send at most 65536 characters" in message
    status, code, message = refusal(api.chat([{"role": "user", "content": "a" * 60_000}]))
    assert (status, code) == (400, "context_length_exceeded") and "a prompt of" in message


@pytest.mark.parametrize("fields", [{"prompt": ["Hello"] * 65}, {"prompt": ["Hello"] * 33, "n": 2}])
def test_choices_are_counted_before_prompts_are_tokenized(api, fields):
    status, code, message = refusal(api.request("POST", "/v1/completions", {"model": "org/tiny", **fields}))
    assert (status, code) == (400, "invalid_value") and "at most 64 in a request" in message


def test_prompts_are_tokenized_up_to_the_first_that_is_too_long(monkeypatch):
    api, tokenized = Api(tokenizer_of("qwen3"), "So."), []
    assert api.completion()["text"] == "So."
    encode = api.model.tokenizer.encode

    def counted(text, **options):
        tokenized.append(text)
        return encode(text, **options)

    monkeypatch.setattr(api.model.tokenizer, "encode", counted)

    def asked(*prompts):
        tokenized.clear()
        answer = api.request("POST", "/v1/completions", {"model": "org/tiny", "prompt": prompts, "max_tokens": 4})
        return answer.status_code if answer.status_code == 200 else refusal(answer)[:2]

    assert asked("Hello", "there") == 200 and tokenized == ["Hello", "there"]
    long = "a b " * 5000
    assert asked("Hello", long, "there") == (400, "context_length_exceeded") and tokenized == ["Hello", long]
    assert asked("Hello", LONG) == (400, "context_length_exceeded") and tokenized == []


def test_more_tokens_than_the_context_are_not_decoded():
    api = Api(tokenizer_of("qwen3"))
    [token] = api.model.tokenizer.encode("a", add_special_tokens=False)
    assert api.request("POST", "/detokenize", {"tokens": [token] * 4096}).json()["prompt"] == "a" * 4096
    status, code, message = refusal(api.request("POST", "/detokenize", {"tokens": [token] * 4097}))
    assert (status, code) == (400, "context_length_exceeded") and "4097 tokens" in message


def test_large_schema_is_refused_before_it_is_compiled():
    pytest.importorskip("llguidance")
    with pytest.raises(ApiError, match="expected at most 131072"):
        JsonGrammars.constraint(SimpleNamespace(), {"enum": ["a" * 1000 for _ in range(200)]}, ())


def test_schema_without_an_end_ends_its_response_with_one_line_of_log(caplog):
    pytest.importorskip("llguidance")
    tokenizer = embedded_tokenizer()
    nested = {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}
    stop, [token] = tokenizer.eos_token_id, tokenizer.encode("{", add_special_tokens=False)
    constraint = JsonGrammars(tokenizer).constraint(nested, (stop,))
    assert constraint.allowed().any()
    constraint.take(token)
    assert np.flatnonzero(np.unpackbits(constraint.allowed().view(np.uint8), bitorder="little")).tolist() == [stop]
    [line] = caplog.messages
    assert line.startswith("a grammar ended its response early: ") and "\n" not in line


# Many messages


def took_s(call, *args) -> float:
    """Seconds of this thread's work, whatever else runs on the machine."""
    start = time.thread_time()
    call(*args)
    return time.thread_time() - start


def test_work_on_many_messages_is_linear():
    """Quadratic work on these would copy or search hundreds of gigabytes."""
    count, content = 60_000, "a" * 100
    joined = "\n\n".join([content] * count)
    systems = [{"role": "system", "content": content}] * count
    assert merged_systems(systems) == [{"role": "system", "content": joined}]
    assert took_s(merged_systems, systems) < 5
    answers = [{"role": "tool", "content": content}] * count
    assert answers_as_users(answers) == [{"role": "user", "content": joined}]
    assert took_s(answers_as_users, answers) < 5
    named = [{"role": "system", "content": f"{n:020}"} for n in range(2 * count)]
    assert took_s(_check_shown, named, "".join(message["content"] for message in named)) < 5
    tokenizer = embedded_tokenizer()
    tokenizer.add_tokens([AddedToken("<|end|>", rstrip=True, special=True)], special_tokens=True)
    control = ControlTokens(tokenizer)
    assert control.in_parts("<|end|> \n <|end|>a") == tokenizer.encode("<|end|> \n <|end|>a", add_special_tokens=False)
    assert took_s(control.in_parts, "<|end|>" * 400_000) < 5


def folded(chat):
    """The messages, joined one by one."""

    def parts(content):
        return content if isinstance(content, list) else [{"type": "text", "text": content or ""}]

    turned, answered = [], False
    for message in chat:
        answer = message["role"] == "tool"
        if (answer or (answered and message["role"] == "user")) and turned and turned[-1]["role"] == "user":
            one, other = turned[-1]["content"], message["content"]
            with_parts = isinstance(one, list) or isinstance(other, list)
            whole = [*parts(one), *parts("\n\n"), *parts(other)] if with_parts else f"{one or ''}\n\n{other or ''}"
            turned[-1] = {"role": "user", "content": whole}
        else:
            turned.append({"role": "user", "content": message["content"]} if answer else message)
        answered = answer
    return turned


def test_answers_are_joined_as_one_by_one():
    dice = random.Random(0)
    contents = ["a", "", None, [], [{"type": "text", "text": "b"}]]
    for _ in range(500):
        roles = dice.choices(["user", "tool", "tool", "assistant", "system"], k=dice.randrange(8))
        chat = [{"role": role, "content": dice.choice(contents), "name": "f"} for role in roles]
        assert answers_as_users(chat) == folded(chat), chat


def test_system_message_is_found_anywhere_in_the_text():
    def system(content):
        return {"role": "system", "content": content}

    _check_shown([system("b"), system(" a "), USER, system("b"), system("")], "a b")
    with pytest.raises(EnvironmentFailure, match="'c' at place 1"):
        _check_shown([system("b"), system("c")], "a b")


# Bodies and headers


def started(address, path):
    """Connection whose client has sent headers and the beginning of a body."""
    host, port = address.removeprefix("http://").split(":")
    one = socket.create_connection((host, int(port)), timeout=30)
    one.sendall(f"POST {path} HTTP/1.1\r\nHost: {host}\r\nContent-Length: 1000\r\n\r\n{{".encode())
    return one


def test_requests_count_before_their_bodies_are_read():
    api = Api(tokenizer_of("qwen3"), "So.")
    model = replace(api.model, limits=ServingLimits(requests=2, body_s=60.0))
    bodies = {
        "/tokenize": {"prompt": "Hi"},
        "/detokenize": {"tokens": [1]},
        "/v1/completions": {"model": "org/tiny", "prompt": "Hi", "max_tokens": 4},
        "/v1/chat/completions": {"model": "org/tiny", "messages": [USER], "stream": True},
    }
    with Server(model, token=None) as server, ExitStack() as slow:

        def statuses():
            answers = [httpx.post(server.address + path, json=body, timeout=30) for path, body in bodies.items()]
            return {answer.status_code for answer in answers}

        def wait_for(expected):
            end = time.monotonic() + 30
            while statuses() != expected:
                assert time.monotonic() < end
                time.sleep(0.05)

        assert statuses() == {200}
        slow.enter_context(started(server.address, "/tokenize"))
        slow.enter_context(started(server.address, "/detokenize"))
        wait_for({429})
        assert httpx.get(f"{server.address}/v1/models").status_code == 200
        slow.close()
        wait_for({200})


def test_headers_of_any_size_are_not_stored():
    api = Api(tokenizer_of("qwen3"), "So.")
    with Server(api.model, token=None) as server:
        host, port = server.address.removeprefix("http://").split(":")
        head = f"GET /health HTTP/1.1\r\nHost: {host}\r\nX: ".encode()
        for sent, status in ((head.ljust(60_000, b"a") + b"\r\n\r\n", b"200"), (head.ljust(65_537, b"a"), b"400")):
            with socket.create_connection((host, int(port)), timeout=30) as one:
                one.sendall(sent)
                assert one.recv(1000).split()[1] == status

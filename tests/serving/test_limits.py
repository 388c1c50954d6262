"""Requests that are wrong, too many, too large, too slow or abandoned."""

import contextlib
import json
import socket
import sys
import threading
import time

import httpx2 as httpx
import pytest
from served_models import TOKEN, build_engine, served

from jaxrlhf.config import Refusal
from jaxrlhf.config.serving import ServingLimits
from jaxrlhf.conversations import ChatFormat
from jaxrlhf.data.tokenizer import embedded_tokenizer
from jaxrlhf.episode import EnvironmentFailure
from jaxrlhf.processes.connections import ConnectionLimits

LIMITS = ServingLimits(requests=2, body_bytes=4096, body_s=1.0, request_s=300.0)
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "Tom has"}], "max_tokens": 8}
ASKED = {"model": "tiny", "prompt": "Tom has", "max_tokens": 8}
pytestmark = pytest.mark.usefixtures("programs")


@pytest.fixture(scope="module")
def serving():
    with served(LIMITS, engine=build_engine(embedded_tokenizer())) as pair:
        yield pair


@pytest.fixture(scope="module")
def client(serving):
    with httpx.Client(base_url=serving[0].address, headers={"Authorization": f"Bearer {TOKEN}"}, timeout=300) as client:
        yield client


def error(answer):
    return answer.status_code, answer.json()["error"]["code"]


def settled(model, timeout_s=10.0) -> bool:
    """Wait until no request is in progress; return whether that happened."""
    obeyed = threading.Event()
    end = time.monotonic() + timeout_s
    model.service._enqueue(obeyed.set)
    while (model.service.waiting or not obeyed.is_set()) and time.monotonic() < end:
        time.sleep(0.02)
    return obeyed.is_set() and not model.service.waiting


def test_requests_without_the_key_are_rejected(client):
    for key in ("", "Bearer", "Bearer wrong", "Basic " + TOKEN, "Bearer sk-" + TOKEN, "Bearer \u00e4"):
        headers = {"Authorization": key.encode()}
        assert error(client.post("/v1/completions", json=ASKED, headers=headers)) == (401, "invalid_api_key")
        assert error(client.get("/metrics", headers=headers)) == (401, "invalid_api_key")
    assert client.get("/health", headers={"Authorization": ""}).json() == {"status": "ok"}
    assert client.post("/v1/completions", json=ASKED).status_code == 200


def test_invalid_bodies_are_rejected(client):
    for body in (
        b"",
        b"{",
        b"[]",
        b"null",
        b"\xff\xfe",
        b"[" * 3000,
        b'{"model": "tiny"}',
        b'{"prompt": 1, "model": "tiny"}',
        b'{"prompt": "a", "model": "tiny", "stop": "\\ud83d"}',
        b'{"prompt": [-1], "model": "tiny"}',
        b'{"prompt": [1, 9999999999], "model": "tiny"}',
    ):
        status, code = error(client.post("/v1/completions", content=body))
        assert status == 400, body
        assert code in ("invalid_json", "invalid_value", "missing_required_parameter"), body
    big = {**ASKED, "prompt": "apples " * 4096}
    assert error(client.post("/v1/completions", json=big)) == (413, "body_too_large")
    assert error(client.post("/v1/completions", content=iter([b"{" * 1024] * 8))) == (413, "body_too_large")
    ids = {**ASKED, "prompt": [10**9]}
    assert error(client.post("/v1/completions", json=ids)) == (400, "refused")
    assert error(client.get("/v1/nothing")) == (404, "not_found")
    assert error(client.get("/v1/completions")) == (405, "not_found")


def test_incomplete_request_times_out(serving):
    host, port = serving[0].address.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=20) as slow:
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer {TOKEN}\r\nContent-Length: 99\r\n\r\n"
        )
        slow.sendall(head.encode() + b"{")
        assert slow.recv(4096).startswith(b"HTTP/1.1 408")


def test_too_many_requests_get_429_and_closed_connections_free_slots(serving, client):
    address, model = serving[0].address, serving[1]
    long = {**ASKED, "max_tokens": 128, "min_tokens": 128, "stream": True, "n": 4}
    cancelled, gate = model.service.counts.cancelled, threading.Event()
    model.service._enqueue(lambda: gate.wait(60))  # keeps requests in progress
    with (
        httpx.Client(base_url=address, headers=client.headers) as other,
        other.stream("POST", "/v1/completions", json=long),
        other.stream("POST", "/v1/completions", json=long),
    ):
        refused = client.post("/v1/completions", json=ASKED)
        assert error(refused) == (429, "too_many_requests")
        assert refused.headers["retry-after"] == "1"
    # Both connections are cut here.
    while "jaxrlhf_http_under_way 0" not in client.get("/metrics").text:
        time.sleep(0.02)
    gate.set()
    assert settled(model)
    assert model.service.counts.cancelled - cancelled > 0
    with pytest.raises(httpx.ReadTimeout):
        client.post("/v1/completions", json={**long, "stream": False}, timeout=0.02)
    assert settled(model)
    assert client.post("/v1/completions", json=ASKED).status_code == 200


def test_slow_answer_times_out(serving, client, monkeypatch):
    import asyncio

    async def never(*_):
        await asyncio.sleep(60)

    monkeypatch.setattr("jaxrlhf.serving.served.asyncio.Queue.get", never)
    object.__setattr__(serving[1].limits, "request_s", 0.1)
    answer = client.post("/v1/completions", json=ASKED)
    object.__setattr__(serving[1].limits, "request_s", 300.0)
    assert error(answer) == (504, "timeout")


def test_messages_that_the_template_refuses_are_rejected(client, monkeypatch):
    def refuses(*_, **__):
        raise EnvironmentFailure("wrong-type", "roles must alternate")

    monkeypatch.setattr(ChatFormat, "prompt", refuses)
    for path in ("/v1/chat/completions", "/tokenize"):
        answer = client.post(path, json=CHAT)
        assert error(answer) == (400, "invalid_value") and "roles must alternate" in answer.text


def test_invalid_message_parts_are_rejected(client):
    def calls(arguments):
        call = {"id": "a", "type": "function", "function": {"name": "add", "arguments": arguments}}
        return {"role": "assistant", "tool_calls": [call]}

    # From Python 3.12 on, json writes values of this depth, and the prompt is too long.
    written = sys.version_info >= (3, 12)
    deep = ("context_length_exceeded", "context") if written else ("invalid_value", "too deep")
    for message, (code, words) in (
        ({"role": "user", "content": [{"type": "text"}]}, ("invalid_value", "without a text")),
        ({"role": "user", "content": [{"type": "text", "text": 5}]}, ("invalid_value", "without a text")),
        (calls("[" * 2000), ("invalid_value", "no JSON")),
        (calls('{"a": ' + "[" * 700 + "]" * 700 + "}"), deep),
    ):
        answer = client.post("/v1/chat/completions", json={**CHAT, "messages": [*CHAT["messages"], message]})
        assert error(answer) == (400, code) and words in answer.text


def test_lone_surrogates_in_a_prompt_become_question_marks(client):
    tokens = [client.post("/tokenize", content=f'{{"prompt": "a{half}"}}').json() for half in ("\\ud83d", "?")]
    assert tokens[0] == tokens[1]


def test_internal_errors_have_the_apis_form(client, monkeypatch, caplog):
    def fails(*_, **__):
        raise KeyError("a secret")

    monkeypatch.setattr(ChatFormat, "parse", fails)
    assert error(client.post("/v1/chat/completions", json=CHAT)) == (500, "internal_error")
    stream = client.post("/v1/chat/completions", json={**CHAT, "stream": True})
    last = json.loads(stream.text.strip().splitlines()[-1].removeprefix("data: "))
    assert (last["error"]["type"], stream.status_code) == ("server_error", 200)
    assert "secret" not in stream.text and caplog.text.count("KeyError: 'a secret'") == 2


def test_metrics_hide_session_ids(client):
    paths = [f"/s/{name}/v1/models" for name in ("a", "b", "c%3F", "%22", "d%0A")]
    assert {client.get(path).status_code for path in paths} == {404}
    lines = [line for line in client.get("/metrics").text.splitlines() if "/s/" in line]
    assert lines == [f'jaxrlhf_http_answers_total{{path="/s/*/v1/models",status="404"}} {len(paths)}']


def test_metrics_count_requests_and_tokens(client, serving):
    before = client.get("/metrics").text
    client.post("/v1/completions", json=ASKED)
    rows = [line.rsplit(" ", 1) for line in client.get("/metrics").text.splitlines() if not line.startswith("#")]
    values = {name: float(value) for name, value in rows}
    was = dict(line.rsplit(" ", 1) for line in before.splitlines() if not line.startswith("#"))
    assert values["jaxrlhf_completed_total"] == float(was["jaxrlhf_completed_total"]) + 1
    assert values["jaxrlhf_sampled_tokens_total"] > float(was["jaxrlhf_sampled_tokens_total"])
    assert values['jaxrlhf_http_answers_total{path="/v1/completions",status="200"}'] >= 1
    assert values["jaxrlhf_waiting"] == 0
    assert values["jaxrlhf_busy_slots_total"] <= values["jaxrlhf_slots_total"]


def test_idle_connections_do_not_block_other_clients():
    """300 half-open connections without a key, where 16 are allowed, and one client with requests."""
    limits = ServingLimits(connections=16, headers_s=1.0, requests=4)
    with served(limits, engine=build_engine(embedded_tokenizer())) as (server, _):
        host, port = server.address.removeprefix("http://").split(":")
        silent = [socket.create_connection((host, int(port))) for _ in range(300)]
        for number, one in enumerate(silent):
            if number % 2:
                with contextlib.suppress(ConnectionError):
                    one.sendall(b"GET /v1/models HTTP/1.1\r\nHost: x\r\n")
        start = time.monotonic()
        headers = {"Authorization": f"Bearer {TOKEN}"}
        for _ in range(4):
            assert httpx.get(f"{server.address}/v1/models", headers=headers, timeout=30).status_code == 200
        for one in silent:  # closed, by the number of connections or by the time for the headers
            one.settimeout(30)
            with contextlib.suppress(ConnectionError):
                assert one.recv(1000) == b""
            one.close()
        assert time.monotonic() - start < 20


def flooding(address: str) -> socket.socket:
    """Connection whose client sends requests until the server accepts no more, and reads no answer."""
    host, port = address.removeprefix("http://").split(":")
    one = socket.socket()
    one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    one.connect((host, int(port)))
    one.settimeout(0.3)
    with contextlib.suppress(OSError):
        while True:
            one.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n" * 1000)
    return one


def test_flooding_connections_do_not_block_other_clients(monkeypatch):
    with (
        served(ServingLimits(connections=16), engine=build_engine(embedded_tokenizer())) as (server, _),
        contextlib.ExitStack() as greedy,
    ):
        for _ in range(20):
            greedy.enter_context(flooding(server.address))
        for _ in range(4):
            assert httpx.get(f"{server.address}/health", timeout=30).status_code == 200
        greedy.close()
        monkeypatch.setattr("jaxrlhf.processes.connections.UNREAD_S", 0.5)
        end = time.monotonic() + 60
        with flooding(server.address) as one, pytest.raises(ConnectionError):  # it is closed before long
            while time.monotonic() < end:
                with contextlib.suppress(TimeoutError):
                    one.sendall(b"GET /health HTTP/1.1\r\n")


def test_header_time_limit_does_not_apply_between_requests():
    with served(ServingLimits(headers_s=0.5), engine=build_engine(embedded_tokenizer())) as (server, _):
        host, port = server.address.removeprefix("http://").split(":")
        ask = f"GET /health HTTP/1.1\r\nHost: {host}\r\n\r\n".encode()
        with socket.create_connection((host, int(port))) as one:
            one.settimeout(30)
            for _ in range(2):
                one.sendall(ask)
                answer = b""
                while b"ok" not in answer:
                    answer += one.recv(1000)
                assert answer.startswith(b"HTTP/1.1 200")
                time.sleep(1.0)
            one.sendall(ask[:20])
            with contextlib.suppress(ConnectionError):
                assert one.recv(1000) == b""


def test_without_a_key_only_local_host_names_are_served():
    with served(token=None, engine=build_engine(embedded_tokenizer())) as (server, _):
        port = server.address.rpartition(":")[2]
        for name in (f"127.0.0.1:{port}", f"localhost:{port}", f"[::1]:{port}"):
            assert httpx.get(f"{server.address}/v1/models", headers={"Host": name}).status_code == 200
        named = ("evil.example", f"evil.example:{port}", "127.0.0.1.evil.example")
        for name in (*named, "evil.example:99999", "evil.example:x", "evil.example@127.0.0.1", "[", "[evil.example]"):
            answer = httpx.get(f"{server.address}/v1/models", headers={"Host": name})
            assert error(answer) == (421, "misdirected_request")


def test_connection_limit_depends_on_open_files(monkeypatch):
    monkeypatch.setattr("resource.getrlimit", lambda _: (40, 40))
    with pytest.raises(Refusal, match=r"this process may have 40; raise the limit"):
        ConnectionLimits()
    monkeypatch.setattr("resource.getrlimit", lambda _: (160, 160))
    assert ConnectionLimits(1000)._most == 32

"""A server that stops: open requests get an error, and the terminal shows no traceback."""

import contextlib
import json
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from jaxrlhf.processes.http_server import HttpServer

SUPPORT = Path(__file__).parents[1] / "support"
SERVE = """
    import time

    server = HttpServer(host="127.0.0.1", port=0, flags="--port")
    server.answer_by(app, timeout_graceful_shutdown=4)
    try:
        with server:
            print(server.address, flush=True)
            server.wait()
    except KeyboardInterrupt:
        time.sleep(1.0)  # the application ends slowly
        print("ended", flush=True)
"""
PLAIN = """
    import asyncio
    from jaxrlhf.processes.http_server import HttpServer

    async def app(scope, receive, send):
        print("asked", flush=True)
        await asyncio.sleep(0.8)
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"whole"})
"""
SLOW = """
    import sys
    sys.path.insert(0, TESTS)
    from concurrent.futures import Future
    from scripted_models import Api
    from chat_families import tokenizer_of
    from jaxrlhf.serving.server import Server

    api = Api(tokenizer_of("qwen3"), "Hello there.")

    def submit(request, sampling, *, seed, on_tokens):
        on_tokens(api.service.tokens[:1], [-0.5])
        print("asked", flush=True)
        return Future()  # never done

    api.service.submit = submit
    try:
        with Server(api.model, token=None) as server:
            print(server.address, flush=True)
            server.wait()
    except KeyboardInterrupt:
        print("ended", flush=True)
"""

ODD = """
    from jaxrlhf.processes.http_server import HttpServer

    async def app(scope, receive, send):
        if scope["path"] == "/fails":
            raise RuntimeError("of the application")
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
        await send({"type": "http.response.body", "body": b"ok"})
"""
UPGRADE = "GET / HTTP/1.1\r\nHost: a\r\nConnection: Upgrade, close\r\nUpgrade: {}\r\n{}\r\n"
KEY = "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n"
ODD_REQUESTS = {
    "no request": (["x\r\n\r\n"], "400"),
    "HTTP/2": ([UPGRADE.format("h2c", "")], "200"),
    "WebSocket": ([UPGRADE.format("websocket", KEY)], "200"),
    "invalid body after the answer": (
        ["POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n", "no size\r\n"],
        "200",
    ),
}
"""Parts of a request, each but the first sent after an answer, and the status of the first answer."""


def started(program):
    code = textwrap.dedent(program).replace("TESTS", repr(str(SUPPORT)))
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen([sys.executable, "-c", code], **pipes)
    return process, process.stdout.readline().strip()


def asking(address, path="/", body=None):
    """Start a thread that sends a request; return the thread, and the list for answer, status and seconds."""
    found = []

    def ask():
        began = time.monotonic()
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(address + path, data, {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                found[:] = [answer.status, answer.read().decode()]
        except urllib.error.HTTPError as error:
            found[:] = [error.code, error.read().decode()]
        found.append(time.monotonic() - began)

    thread = threading.Thread(target=ask)
    thread.start()
    return thread, found


def stopped(process):
    """Return output and errors of a process after Ctrl-C."""
    process.send_signal(signal.SIGINT)
    try:
        return process.communicate(timeout=60)
    finally:
        process.kill()


@pytest.mark.parametrize("asks", [0, 1])
def test_a_stopped_server_prints_nothing_and_ends_open_requests(asks):
    process, address = started(PLAIN + SERVE)
    threads = [asking(address) for _ in range(asks)]
    for _ in threads:
        assert process.stdout.readline() == "asked\n"
    assert stopped(process) == ("ended\n", "")
    for thread, found in threads:
        thread.join()
        assert found[:2] == [200, "whole"]


def test_unfinished_answers_report_that_the_server_stops():
    process, address = started(SLOW)
    body = {"model": "org/tiny", "messages": [{"role": "user", "content": "Hi"}]}
    threads = [asking(address, "/v1/chat/completions", {**body, "stream": stream}) for stream in (False, True)]
    for _ in threads:
        assert process.stdout.readline() == "asked\n"
    assert stopped(process) == ("ended\n", "")
    for thread, _ in threads:
        thread.join()
    (status, whole, seconds), (streamed, events, also) = (found for _, found in threads)
    assert (status, json.loads(whole)["error"]["code"]) == (503, "stopping")
    *_, last = [line for line in events.split("\n\n") if line]
    assert (streamed, json.loads(last.removeprefix("data: "))["error"]["code"]) == (200, "stopping")
    assert 1.5 < seconds < 30 and 1.5 < also < 30


def sent(address, parts):
    """Return the status of the first answer to the parts of a request; wait until the server closes the connection."""
    host, port = address.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=60) as one:
        answer = b""
        for part in parts:
            one.sendall(part.encode())
            answer = answer or one.recv(4096)
        with contextlib.suppress(ConnectionError):
            while one.recv(4096):
                pass
    return answer.split()[1].decode()


@pytest.mark.parametrize("name", ODD_REQUESTS)
def test_invalid_requests_do_not_fill_the_log(name):
    process, address = started(ODD + SERVE)
    parts, status = ODD_REQUESTS[name]
    assert {sent(address, parts) for _ in range(300)} == {status}
    assert stopped(process) == ("ended\n", "")


def test_failures_of_the_application_are_logged():
    process, address = started(ODD + SERVE)
    assert sent(address, ["GET /fails HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n"]) == "500"
    assert "RuntimeError: of the application" in stopped(process)[1]


def test_headers_are_bounded_where_httptools_is_installed():
    code = """
    import uvicorn.protocols.http.auto as auto
    from uvicorn.protocols.http.h11_impl import H11Protocol
    auto.AutoHTTPProtocol = type("HttpToolsProtocol", (), {})
    from jaxrlhf.processes.connections import ConnectionLimits
    print(issubclass(ConnectionLimits().protocol, H11Protocol))
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=True)
    assert done.stdout == "True\n"


async def counts(scope, receive, send):
    """Answer with the size of the body; `/unread` answers without reading it."""
    size, more = 0, scope["path"] != "/unread"
    while more:
        message = await receive()
        size, more = size + len(message.get("body", b"")), message.get("more_body", False)
    body = str(size).encode()
    length = (b"content-length", str(len(body)).encode())
    await send({"type": "http.response.start", "status": 200, "headers": [length]})
    await send({"type": "http.response.body", "body": body})


def answered(address, path, size, count):
    """Return the last line of the answer to `count` chunks of a size, and whether the server closed the connection."""
    host, port = address.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=60) as one:
        answer, closed = b"", False
        try:
            one.sendall(f"POST {path} HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n".encode())
            for start in range(0, count, 1000):
                one.sendall(f"{size:x}\r\n{size * 'x'}\r\n".encode() * min(1000, count - start))
            one.sendall(b"0\r\n\r\n")
            while not answer.endswith(str(size * count).encode()) and (part := one.recv(4096)):
                answer += part
        except ConnectionError:
            closed = True
        return answer.rpartition(b"\r\n")[2].decode(), closed


@pytest.mark.parametrize("path", ["/", "/unread"])
def test_body_in_tiny_pieces_is_cut(path):
    """Each piece holds up all connections for some microseconds."""
    server = HttpServer(host="127.0.0.1", port=0, flags="--port")
    server.answer_by(counts)
    with server:
        assert answered(server.address, path, 1, 100_000)[1]
        assert answered(server.address, "/", 1024, 4000) == ("4096000", False)
        assert answered(server.address, "/", 1, 500) == ("500", False)


def test_body_that_nobody_reads_is_cut(monkeypatch):
    monkeypatch.setattr("jaxrlhf.processes.connections.LARGEST_BODY", 1 << 20)
    server = HttpServer(host="127.0.0.1", port=0, flags="--port")
    server.answer_by(counts)
    with server:
        assert answered(server.address, "/unread", 1 << 16, 1000)[1]

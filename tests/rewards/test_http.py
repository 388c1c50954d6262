"""Judges and remote rewards, on servers that misbehave."""

import json
import os
import threading
import time
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace

import pytest

from jaxrlhf import config
from jaxrlhf.config import to_json
from jaxrlhf.rewards import endpoint
from jaxrlhf.rewards.endpoint import Rejected, Unreachable, Unreadable, post_json
from jaxrlhf.rewards.parts import reward_function
from jaxrlhf.rewards.scorer import Scorer

KEY = "a-key-that-nobody-may-read"


class Server(ThreadingHTTPServer):
    """Answers each POST with what `answer(body, number of the request)` gives: a status and a JSON value or bytes.

    The body of a GET is None.
    """

    daemon_threads = True
    block_on_close = False

    def __init__(self, answer) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.answer, self.requests, self.headers, self.paths = answer, 0, [], []
        self.open = self.most_open = 0
        self.lock = threading.Lock()
        self.url = f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        server = self.server
        body = json.loads(self.rfile.read(int(self.headers.get("Content-Length", 0))) or "null")
        with server.lock:
            server.requests += 1
            number = server.requests
            server.headers.append(dict(self.headers))
            server.paths.append(self.path)
            server.open += 1
            server.most_open = max(server.most_open, server.open)
        try:
            status, reply, *headers = server.answer(body, number)
        finally:
            with server.lock:
                server.open -= 1
        if isinstance(reply, float):  # byte by byte
            self.send_response(status)
            self.end_headers()
            try:
                while True:
                    self.wfile.write(b" ")
                    time.sleep(reply)
            except OSError:
                return
        text = reply if isinstance(reply, bytes) else json.dumps(reply).encode()
        self.send_response(status)
        for name, value in headers:
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        try:
            self.wfile.write(text)
        except OSError:
            return

    do_GET = do_POST

    def log_message(self, *_) -> None: ...


@pytest.fixture
def serve(monkeypatch):
    """Function that starts a server with an answer."""
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.setattr(endpoint, "FIRST_PAUSE_S", 0.02)
    servers = []

    def start(answer) -> Server:
        servers.append(Server(answer))
        threading.Thread(target=servers[-1].serve_forever, args=(0.02,), daemon=True).start()
        return servers[-1]

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def post(server: Server, body=None, *, attempt_s=0.4, total_s=2.0, api_key_env=None):
    return post_json(server.url, body, attempt_s=attempt_s, total_s=total_s, api_key_env=api_key_env)


def test_json_is_posted_with_the_key(serve, monkeypatch):
    monkeypatch.setenv("THE_KEY", KEY + "\n")
    server = serve(lambda body, number: (200, {"got": body}))
    assert post(server, {"ä": [1, None]}, api_key_env="THE_KEY") == {"got": {"ä": [1, None]}}
    assert server.headers[0]["Authorization"] == f"Bearer {KEY}"
    post(server)
    assert "Authorization" not in server.headers[1]


@pytest.mark.parametrize("status", [408, 429, 500, 503])
def test_temporary_errors_are_retried(serve, status):
    server = serve(lambda body, number: (status, {}) if number < 3 else (200, number))
    assert post(server) == 3


def test_slow_attempts_are_retried(serve):
    def answer(body, number):
        if number == 1:
            time.sleep(1.0)
        return 200, number

    started = time.monotonic()
    assert post(serve(answer)) == 2 and time.monotonic() - started < 0.9


@pytest.mark.parametrize("answer", [lambda body, number: (503, {}), lambda body, number: (200, 0.05)])
def test_the_total_time_is_bounded(serve, answer):
    """The server is always busy, or sends byte by byte without end."""
    started = time.monotonic()
    with pytest.raises(Unreachable, match=r"no answer within 0.7 s in \d+ attempts; the last: (503|TimeoutError)"):
        post(serve(answer), attempt_s=0.2, total_s=0.7)
    assert time.monotonic() - started < 1.6


def test_pauses_double_and_are_random(serve, monkeypatch):
    pauses = []
    monkeypatch.setattr(endpoint, "FIRST_PAUSE_S", 0.5)
    # Patched in the module, because threads of other tests may sleep too.
    monkeypatch.setattr(endpoint, "time", SimpleNamespace(sleep=pauses.append, monotonic=time.monotonic))
    server = serve(lambda body, number: (503, {}) if number < 9 else (200, {}))
    post(server, total_s=100.0)
    for pause, full in zip(pauses, [0.5, 1, 2, 4, 8, 8, 8, 8], strict=True):
        assert full / 2 <= pause <= full
    assert len({pause / full for pause, full in zip(pauses[-4:], [8] * 4, strict=True)}) == 4


def test_retry_after_is_respected(serve):
    server = serve(lambda body, number: (429, {}, ("Retry-After", "1")) if number == 1 else (200, {}))
    started = time.monotonic()
    post(server)
    assert time.monotonic() - started >= 1.0
    with pytest.raises(Unreachable, match="in 1 attempt; the last: 429"):
        post(serve(lambda body, number: (429, {}, ("Retry-After", "60"))))


@pytest.mark.parametrize("status", [400, 401, 404, 422, 302])
def test_final_errors_are_not_retried(serve, status):
    elsewhere = serve(lambda body, number: (200, {}))
    server = serve(lambda body, number: (status, b"no such model", ("Location", elsewhere.url)))
    with pytest.raises(Rejected, match=rf"{status} .*no such model"):
        post(server)
    assert (server.requests, elsewhere.requests) == (1, 0)


def test_an_answer_that_is_not_json_is_an_error(serve):
    with pytest.raises(Unreadable, match=r"not JSON: b'<html>'"):
        post(serve(lambda body, number: (200, b"<html>")))
    with pytest.raises(ValueError, match="Out of range"):
        post(serve(lambda body, number: (200, {})), float("nan"))


@pytest.mark.parametrize("overslept_s", [0.0, 0.3])
def test_a_closed_port_is_unreachable(overslept_s, serve, monkeypatch):
    own = SimpleNamespace(sleep=lambda pause_s: time.sleep(pause_s + overslept_s), monotonic=time.monotonic)
    monkeypatch.setattr(endpoint, "time", own)
    server = serve(lambda body, number: (200, {}))
    server.shutdown()
    server.server_close()
    with pytest.raises(Unreachable, match="refused"):
        post(server, total_s=0.3)


@pytest.mark.parametrize(("key", "message"), [("", "THE_KEY, which is not set"), ("se\x07cret", "cannot be sent")])
def test_a_key_that_cannot_be_sent_is_refused_without_showing_it(monkeypatch, key, message):
    monkeypatch.setenv("THE_KEY", key)
    for part in (
        config.JudgeReward("http://127.0.0.1:1/v1", "m", api_key_env="THE_KEY"),
        config.RemoteReward("http://127.0.0.1:1", api_key_env="THE_KEY"),
    ):
        with pytest.raises(ValueError, match=message) as caught:
            Scorer(config.Rewards(parts=(part,)))
        assert "cret" not in str(caught.value)


def said(text) -> tuple:
    return 200, {"choices": [{"message": {"role": "assistant", "content": text}}]}


JUDGEMENTS = {
    "good": "It is right.\nScore: 10",
    "bad": "Score: 1",
    "half": "Score: **5.5**",
    "quoted": "It says 'Score: 10', which I ignore.\n**Score:** 1",
    "vague": "Rather nice.",
    "huge": "Score: 11",
    "empty": None,
}


def judge_answer(body, number):
    asked = body["messages"][0]["content"].partition("[Response]\n")[2].partition("\n")[0]
    if asked == "refused":
        return 400, {"error": "content"}
    return said(JUDGEMENTS[asked])


def score(part, responses, records=None, **rewards):
    """Return the scores of the part, and its failures."""
    with Scorer(config.Rewards(parts=(part,), **{"workers": 1} | rewards)) as scorer:
        rows = len(responses)
        scores = scorer.score([f"p{n}" for n in range(rows)], responses, ["7"] * rows, records or [{}] * rows)
        return [float(value) for value in scores.parts[scorer.names[0]]], scorer.failures


def test_responses_without_a_judges_score_are_unscorable(serve, monkeypatch):
    monkeypatch.setenv("THE_KEY", KEY)
    server = serve(judge_answer)
    part = config.JudgeReward(f"{server.url}/v1", "judge-7b", api_key_env="THE_KEY", total_s=5.0)
    responses = [*JUDGEMENTS, "refused"]
    values, failures = score(part, responses)
    assert values[:4] == [1.0, 0.0, 0.5, 0.0] and all(value != value for value in values[4:])
    assert [(failure.part, failure.index, failure.cause) for failure in failures] == [
        ("judge", n, "exception") for n in (4, 5, 6, 7)
    ]
    for failure, reason in zip(failures, ["no score that matches", "not in [1, 10]", "no text", "400"], strict=True):
        assert reason in failure.detail and KEY not in failure.detail
    assert set(server.paths) == {"/v1/chat/completions"}
    assert {headers["Authorization"] for headers in server.headers} == {f"Bearer {KEY}"}


def test_the_request_to_the_judge(serve):
    bodies = []
    server = serve(lambda body, number: (bodies.append(body), said("**3**"))[1])
    part = config.JudgeReward(
        *(server.url, "m"),
        template="{{}} {prompt} | {response} | {answer}",
        pattern=r"\*\*(\d)\*\*",
        lowest=0.0,
        highest=6.0,
        temperature=None,
        max_tokens=9,
    )
    assert score(part, ["{r}"])[0] == [0.5]
    assert bodies == [{"model": "m", "messages": [{"role": "user", "content": "{} p0 | {r} | 7"}], "max_tokens": 9}]


def test_no_more_requests_are_open_than_allowed(serve):
    concurrency, workers = 4, 2

    def answer(body, number):
        time.sleep(0.2)
        return said("Score: 10")

    server = serve(answer)
    part = config.JudgeReward(server.url, "m", concurrency=concurrency)
    values, _ = score(part, ["r"] * 3 * concurrency, workers=workers)
    assert values == [1.0] * 3 * concurrency and server.most_open == concurrency


def test_the_key_is_not_in_the_record_of_the_configuration(monkeypatch):
    monkeypatch.setenv("THE_KEY", KEY)
    parts = (config.JudgeReward("http://h/v1", "m", api_key_env="THE_KEY"), config.RemoteReward("http://h"))
    recorded = json.dumps(to_json(config.override(config.load("grpo_gsm8k"), {"rewards": config.Rewards(parts)})))
    assert "THE_KEY" in recorded and os.environ["THE_KEY"] not in recorded


def lengths(body, number):
    return 200, {"scores": [len(example["response"]) + example["record"]["n"] for example in body["examples"]]}


def remote(server: Server, responses, **settings):
    settings = {"attempt_s": 0.4, "total_s": 2.0} | settings
    records = [{"n": 10 * n} for n in range(len(responses))]
    return score(config.RemoteReward(server.url, **settings), responses, records)


def test_a_service_gets_batches(serve):
    seen = []
    server = serve(lambda body, number: (seen.append(body["examples"]), lengths(body, number))[1])
    values, failures = remote(server, ["a", "bb", "ccc", "", "e"], batch_size=2)
    assert values == [1.0, 12.0, 23.0, 30.0, 41.0] and failures == []
    assert max(map(len, seen)) == 2
    asked = sorted((example for batch in seen for example in batch), key=lambda example: example["prompt"])
    assert asked[1] == {"prompt": "p1", "response": "bb", "answer": "7", "record": {"n": 10}}


def test_a_service_may_be_slow_and_fail_twice(serve):
    def answer(body, number):
        if number == 1:
            time.sleep(0.8)
        return (500, {}) if number == 2 else lengths(body, number)

    assert remote(serve(answer), ["a"] * 4, batch_size=4, total_s=9.0)[0] == [1.0, 11.0, 21.0, 31.0]


def test_only_examples_that_a_service_cannot_score_are_lost(serve):
    def answer(body, number):
        responses = [example["response"] for example in body["examples"]]
        if "poison" in responses:
            return 422, {"error": "cannot score"}
        if "nonsense" in responses:
            return 200, {"scores": ["high"]}
        return 200, {"scores": [None if response == "null" else 1 for response in responses]}

    values, failures = remote(serve(answer), ["a", "poison", "null", "b", "nonsense"], batch_size=8)
    assert [value == 1.0 for value in values] == [True, False, False, True, False]
    assert [(f.part, f.index, f.cause) for f in failures] == [
        ("remote", 1, "exception"),
        ("remote", 2, "none"),
        ("remote", 4, "not-a-number"),
    ]
    assert "Rejected" in failures[0].detail and "cannot score" in failures[0].detail


def test_an_unreachable_service_takes_one_total_time(serve):
    server = serve(lambda body, number: (503, {}))
    started = time.monotonic()
    values, failures = remote(server, ["a"] * 8, total_s=1.0, batch_size=8)
    assert all(value != value for value in values) and time.monotonic() - started < 4.0
    assert {failure.cause for failure in failures} == {"exception"} and len(failures) == 8
    assert "Unreachable" in failures[0].detail and "503" in failures[0].detail


def test_each_process_may_have_at_least_one_open_request():
    assert reward_function("a", config.JudgeReward("http://h/v1", "m", concurrency=1), workers=2).at_once == 1


def with_own(part):
    """Return a configuration with a part for one evaluation set."""
    run = config.load("ppo_gsm8k")
    own = config.EvaluationSet(name="a", data=config.PromptFile("a.jsonl", evaluation="a.jsonl"), rewards=(part,))
    return config.checked(replace(run, rewards=config.Rewards(), evaluation=replace(run.evaluation, sets=(own,))))


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: config.RemoteReward("localhost:8000"), "address that starts with http"),
        (lambda: config.JudgeReward("http://h/v1/", "m"), "does not end with a slash"),
        (lambda: config.JudgeReward("http://h/v1", "m", template="{prompt}"), "has no {response}"),
        (lambda: config.JudgeReward("http://h/v1", "m", template="{response} {score}"), "KeyError"),
        (lambda: config.JudgeReward("http://h/v1", "m", template="{response} {"), "ValueError"),
        (lambda: config.JudgeReward("http://h/v1", "m", pattern="("), "not a regular expression"),
        (lambda: config.JudgeReward("http://h/v1", "m", pattern=r"\d"), "no group"),
        (lambda: config.JudgeReward("http://h/v1", "m", lowest=1.0, highest=1.0), "must be below"),
        (lambda: config.Rewards((config.JudgeReward("http://h/v1", "m", concurrency=1),)), "below Rewards.workers=2"),
        (lambda: config.Rewards((config.RemoteReward("http://h", total_s=30.0),)), "must be below Rewards.timeout_s"),
        (lambda: with_own(config.JudgeReward("http://h/v1", "m", concurrency=1)), "below Rewards.workers=2"),
        (lambda: with_own(config.RemoteReward("http://h", total_s=30.0)), "must be below Rewards.timeout_s"),
    ],
)
def test_settings_that_cannot_work_are_refused(build, message):
    with pytest.raises(ValueError, match=message):
        build()

"""JSON over HTTP to an endpoint that may be slow, busy or broken; every question ends in bounded time.

What may pass (no connection, a time-out, 408, 425, 429, 5xx) is tried again, after a pause that
doubles each time and is drawn at random from its upper half, so that many clients do not come
back together.
"""

import http.client
import itertools
import json
import os
import random
import time
import urllib.error
import urllib.request
from collections.abc import Collection
from contextlib import suppress
from typing import Any

from jaxrlhf.config import Refusal

FIRST_PAUSE_S = 0.5
LONGEST_PAUSE_S = 8.0
LEAST_ATTEMPT_S = 0.05
"""Limit of an attempt before which a busy machine slept until the end; sockets take none of 0 or less."""
LARGEST_REPLY_BYTES = 1 << 26
PASSING = {408, 425, 429}  # and all from 500


class EndpointError(RuntimeError):
    """An endpoint gave no usable answer."""


class Unreachable(EndpointError):
    """It did not answer in time, or only with errors that may pass."""


class Rejected(EndpointError):
    """It refuses the request as it is, or sends it elsewhere."""


class Unreadable(EndpointError):
    """It answered with something else than was asked for."""


class _Passing(Exception):
    def __init__(self, what: str, retry_after_s: float = 0.0) -> None:
        super().__init__(what)
        self.retry_after_s = retry_after_s


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """A redirected POST would become a GET, and might carry the key to another host."""

    def redirect_request(self, *_: Any) -> None:
        return None


_opener = urllib.request.build_opener(_NoRedirect)


def post_json(
    url: str,
    body: Any,
    *,
    api_key_env: str | None,
    attempt_s: float,
    total_s: float,
    final: Collection[int] = (),
) -> Any:
    """The JSON that `url` answers to `body`; None if it answers nothing.

    Args:
      api_key_env: Environment variable with the key that is sent as bearer token; None sends none.
      attempt_s: Limit of one attempt.
      total_s: Limit of all attempts and the pauses between them.
      final: Statuses of errors that do not pass here.

    Raises:
      EndpointError: One of its kinds above.
      Refusal: If the body is no JSON or there is no key in the environment.
    """
    data = json.dumps(body, allow_nan=False).encode()
    headers = {"Content-Type": "application/json", **_headers(api_key_env)}
    return _asked(urllib.request.Request(url, data, headers), attempt_s, total_s, final)


def get_json(url: str, *, api_key_env: str | None, total_s: float) -> Any:
    """The JSON that is at `url`; see `post_json`."""
    return _asked(urllib.request.Request(url, headers=_headers(api_key_env)), total_s, total_s)


def _headers(api_key_env: str | None) -> dict[str, str]:
    named = {"User-Agent": "jaxrlhf"}
    return named if api_key_env is None else {**named, "Authorization": f"Bearer {api_key(api_key_env)}"}


def _asked(request: urllib.request.Request, attempt_s: float, total_s: float, final: Collection[int] = ()) -> Any:
    end = time.monotonic() + total_s
    for attempt in itertools.count(1):
        try:
            left_s = max(end - time.monotonic(), LEAST_ATTEMPT_S)
            text = _post(request, min(attempt_s, left_s), final)
            return _parsed(request.full_url, text) if text else None
        except _Passing as error:
            pause_s = min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2 ** (attempt - 1)) * random.uniform(0.5, 1.0)
            pause_s = max(pause_s, error.retry_after_s)
            if time.monotonic() + pause_s >= end:
                tries = f"{attempt} attempt{'s' if attempt > 1 else ''}"
                url = request.full_url
                raise Unreachable(f"{url} gave no answer within {total_s:g} s in {tries}; the last: {error}") from error
        time.sleep(pause_s)


def api_key(variable: str) -> str:
    """The key in an environment variable; errors name the variable and never show the key."""
    key = os.environ.get(variable, "").strip()
    if not key:
        raise Refusal(f"api_key_env names {variable}, which is not set in the environment of the process that asks")
    if not (key.isascii() and key.isprintable()):
        raise Refusal(f"the key in {variable} has characters that cannot be sent in a header")
    return key


def check_health(url: str, *, limit_s: float = 10.0) -> None:
    """Raise `Refusal` if a server does not answer at its `/health`."""
    try:
        with _opener.open(f"{url}/health", timeout=limit_s):
            return
    except (OSError, http.client.HTTPException) as error:
        raise Refusal(f"{url}/health does not answer: {error}; start the server first, or mend its address") from error


def _post(request: urllib.request.Request, limit_s: float, final: Collection[int]) -> bytes:
    end = time.monotonic() + limit_s
    try:
        with _opener.open(request, timeout=limit_s) as reply:
            return _read(reply, end)
    except urllib.error.HTTPError as error:
        what = f"{error.code} {error.reason}"
        with error:  # its connection
            if error.code not in final and (error.code in PASSING or error.code >= 500):
                raise _Passing(what, _retry_after_s(error)) from error
            with suppress(OSError, http.client.HTTPException):
                what += f": {error.read(500).decode(errors='replace')}"
            raise Rejected(f"{request.full_url} answers {what}") from error
    except (OSError, http.client.HTTPException) as error:
        raise _Passing(f"{type(error).__name__}: {error}") from error


def _parsed(url: str, text: bytes) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise Unreadable(f"{url} answers with something that is not JSON: {text[:200]!r}") from error


def _read(reply: http.client.HTTPResponse, end: float) -> bytes:
    """The body; a time-out of sockets alone would wait for one byte after the other."""
    parts, size = [], 0
    while part := reply.read1(1 << 16):
        parts.append(part)
        size += len(part)
        if size > LARGEST_REPLY_BYTES:
            raise Unreadable(f"{reply.url} answers with more than {LARGEST_REPLY_BYTES} bytes")
        if time.monotonic() > end:
            raise TimeoutError("the answer did not end in time")
    return b"".join(parts)


def _retry_after_s(error: urllib.error.HTTPError) -> float:
    """Seconds that the endpoint asks to wait; 0 where it does not, or gives a date."""
    asked = error.headers.get("Retry-After", "")
    return float(asked) if asked.isdecimal() else 0.0

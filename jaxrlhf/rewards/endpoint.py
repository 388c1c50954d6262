"""HTTP client for JSON endpoints that may be slow, busy or broken; every request ends in bounded time.

Temporary errors (no connection, a timeout, 408, 425, 429, 5xx) are retried after a pause. The pause doubles each time
and is randomized within its upper half, so that many clients do not come back at the same time.
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
"""Time limit of an attempt if a busy machine woke up too late from the pause; sockets reject limits of 0 or less."""
LARGEST_REPLY_BYTES = 1 << 26
TEMPORARY = {408, 425, 429}  # statuses of temporary errors, in addition to all from 500


class EndpointError(RuntimeError):
    """Error: an endpoint gave no usable answer."""


class Unreachable(EndpointError):
    """Error: the endpoint did not answer in time, or only with temporary errors."""


class Rejected(EndpointError):
    """Error: the endpoint refuses the request, or redirects it."""


class Unreadable(EndpointError):
    """Error: the endpoint's answer does not have the expected form."""


class _Temporary(Exception):
    def __init__(self, what: str, retry_after_s: float = 0.0) -> None:
        super().__init__(what)
        self.retry_after_s = retry_after_s


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Handler without redirects: a redirected POST would become a GET, and could send the key to another host."""

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
    """Send `body` to `url` by POST and return the JSON of the answer; None if the answer is empty.

    Args:
      api_key_env: Environment variable with the key that is sent as bearer token; None sends no key.
      attempt_s: Time limit of one attempt in seconds.
      total_s: Time limit of all attempts and the pauses between them in seconds.
      final: Error statuses that are not retried.

    Raises:
      EndpointError: One of the subclasses above.
      Refusal: The environment has no usable key.
      TypeError, ValueError: The body cannot be written as JSON.
    """
    data = json.dumps(body, allow_nan=False).encode()
    headers = {"Content-Type": "application/json", **_headers(api_key_env)}
    return _retried(urllib.request.Request(url, data, headers), attempt_s, total_s, final)


def get_json(url: str, *, api_key_env: str | None, total_s: float) -> Any:
    """Return the JSON at `url`; see `post_json`."""
    return _retried(urllib.request.Request(url, headers=_headers(api_key_env)), total_s, total_s)


def _headers(api_key_env: str | None) -> dict[str, str]:
    named = {"User-Agent": "jaxrlhf"}
    return named if api_key_env is None else {**named, "Authorization": f"Bearer {api_key(api_key_env)}"}


def _retried(request: urllib.request.Request, attempt_s: float, total_s: float, final: Collection[int] = ()) -> Any:
    end = time.monotonic() + total_s
    for attempt in itertools.count(1):
        try:
            left_s = max(end - time.monotonic(), LEAST_ATTEMPT_S)
            text = _post(request, min(attempt_s, left_s), final)
            return _parsed(request.full_url, text) if text else None
        except _Temporary as error:
            pause_s = min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2 ** (attempt - 1)) * random.uniform(0.5, 1.0)
            pause_s = max(pause_s, error.retry_after_s)
            if time.monotonic() + pause_s >= end:
                tries = f"{attempt} attempt{'s' if attempt > 1 else ''}"
                url = request.full_url
                raise Unreachable(f"{url} gave no answer within {total_s:g} s in {tries}; the last: {error}") from error
        time.sleep(pause_s)


def api_key(variable: str) -> str:
    """Return the key in an environment variable; errors name the variable and never show the key."""
    key = os.environ.get(variable, "").strip()
    if not key:
        raise Refusal(
            f"api_key_env names {variable}, which is not set in the environment of this process; set the variable"
        )
    if not (key.isascii() and key.isprintable()):
        raise Refusal(f"the key in {variable} has characters that cannot be sent in a header")
    return key


def check_health(url: str, *, limit_s: float = 10.0) -> None:
    """Raise `Refusal` if a server does not answer at its `/health`."""
    try:
        with _opener.open(f"{url}/health", timeout=limit_s):
            return
    except (OSError, http.client.HTTPException) as error:
        raise Refusal(
            f"{url}/health does not answer: {error}; start the server first, or correct its address"
        ) from error


def _post(request: urllib.request.Request, limit_s: float, final: Collection[int]) -> bytes:
    end = time.monotonic() + limit_s
    try:
        with _opener.open(request, timeout=limit_s) as reply:
            return _read(reply, end)
    except urllib.error.HTTPError as error:
        what = f"{error.code} {error.reason}"
        with error:  # closes the connection
            if error.code not in final and (error.code in TEMPORARY or error.code >= 500):
                raise _Temporary(what, _retry_after_s(error)) from error
            with suppress(OSError, http.client.HTTPException):
                what += f": {error.read(500).decode(errors='replace')}"
            raise Rejected(f"{request.full_url} answers {what}") from error
    except (OSError, http.client.HTTPException) as error:
        raise _Temporary(f"{type(error).__name__}: {error}") from error


def _parsed(url: str, text: bytes) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise Unreadable(f"{url} answers with something that is not JSON: {text[:200]!r}") from error


def _read(reply: http.client.HTTPResponse, end: float) -> bytes:
    """Read the body within a time limit; the socket timeout alone restarts with every byte that arrives."""
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
    """Return the seconds of the `Retry-After` header; 0 if there is no header or it gives a date."""
    seconds = error.headers.get("Retry-After", "")
    return float(seconds) if seconds.isdecimal() else 0.0

"""Judge reward: a model behind an OpenAI-compatible endpoint scores a response."""

import asyncio
import functools
import re
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from jaxrlhf.rewards.endpoint import Unreadable, post_json

_threads = ThreadPoolExecutor(max_workers=1024, thread_name_prefix="judge")  # threads only wait; the pool limits calls


async def judged(
    prompt: str,
    response: str,
    answer: str | None,
    record: Mapping[str, Any],
    *,
    question: str,
    url: str,
    model: str,
    template: str,
    pattern: str,
    lowest: float,
    highest: float,
    temperature: float | None,
    max_tokens: int,
    api_key_env: str | None,
    attempt_s: float,
    total_s: float,
) -> float:
    """Return the judge's score, scaled to 0 for `lowest` and 1 for `highest`.

    The score is the first group of the last match of `pattern`. The last match counts because a judge may first quote a
    response that contains a score for itself.

    Raises:
      EndpointError: The judge does not answer, or its answer holds no score in the range.
      ValueError: The template shows the reference answer and the record has none.
      KeyError: The template shows a field that the record does not have.
    """
    if answer is None and "{answer" in template:
        raise ValueError("the judge's template shows the reference answer, and the record has none")
    content = template.format(prompt=question, response=response, answer=answer, record=record)
    body = {"model": model, "messages": [{"role": "user", "content": content}], "max_tokens": max_tokens}
    if temperature is not None:
        body["temperature"] = temperature
    ask = functools.partial(post_json, api_key_env=api_key_env, attempt_s=attempt_s, total_s=total_s)
    reply = await asyncio.get_running_loop().run_in_executor(_threads, ask, f"{url}/chat/completions", body)
    match reply:
        case {"choices": [{"message": {"content": str(text)}}, *_]}:
            return (_score(text, pattern, lowest, highest) - lowest) / (highest - lowest)
    raise Unreadable(f"the judge's answer has no text at choices[0].message.content: {reply!r:.200}")


def _score(text: str, pattern: str, lowest: float, highest: float) -> float:
    found = list(re.finditer(pattern, text))
    if not found:
        raise Unreadable(f"the judge gives no score that matches {pattern!r}; it ends with {text[-100:]!r}")
    last = found[-1]
    try:
        score = _whole_number(text, last, highest)
    except ValueError as error:
        raise Unreadable(f"the judge's score {text[last.start(1) : last.end(1) + 20]!r} is not a number") from error
    if not lowest <= score <= highest:
        raise Unreadable(f"the judge's score {score:g} is not in [{lowest:g}, {highest:g}]")
    return score


def _whole_number(text: str, found: re.Match[str], highest: float) -> float:
    """Return the matched number, including characters after the match that belong to it: `1e-1`, `7,5`, `8/10`.

    Raises:
      ValueError: The number continues in a form that cannot be read, such as a fraction whose denominator is not
        `highest`; if `highest` is 1, any denominator is read.
    """
    digits, behind = found[1], text[found.end(1) :]
    exponent = re.match(r"[eE][-+]?\d+", behind)
    if exponent is not None:
        digits, behind = digits + exponent[0], behind[exponent.end() :]
    decimals = re.match(r",(\d{1,2})(?!\d)", behind)
    if decimals is not None and "." not in digits:
        digits, behind = f"{digits}.{decimals[1]}", behind[decimals.end() :]
    whole = re.match(r"\s*\(?(?:/|out\s+of|of)\s*(\d+(?:\.\d+)?)", behind)
    if whole is not None:
        behind = behind[whole.end() :]
        if float(whole[1]) != highest:
            if highest != 1 or float(whole[1]) == 0:
                raise ValueError("a share of another whole")
            return float(digits) / float(whole[1])
    if re.match(r"[.,/:\-\u2013]?\d|\s*[%+\xb1\xbc-\xbe]|[eE]|\s+to\s+\d|\s+\d+/\d", behind):
        raise ValueError("more digits")
    return float(digits)

"""Remote reward: scores from a user's own HTTP service.

The service receives `{"examples": [{"prompt": ..., "response": ..., "answer": ..., "record": {...}}, ...]}` by POST. It
answers `{"scores": [0.5, null, ...]}`, one score per example in the order of the examples; null is unscorable.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from jaxrlhf.rewards.endpoint import Unreachable, Unreadable, post_json
from jaxrlhf.rewards.protocol import Number, batched


@batched
def scored(
    prompts: Sequence[str],
    responses: Sequence[str],
    answers: Sequence[str | None],
    records: Sequence[Mapping[str, Any]],
    *,
    url: str,
    api_key_env: str | None,
    attempt_s: float,
    total_s: float,
) -> Sequence[Number | Exception]:
    """Return the service's scores; if the service cannot be reached, return the error in place of each score.

    Raises:
      EndpointError: The service rejects the examples or its answer cannot be read. The pool then sends the examples one
        by one, so that only examples that the service cannot score are lost.
    """
    rows = zip(prompts, responses, answers, records, strict=True)
    examples = [dict(zip(("prompt", "response", "answer", "record"), row, strict=True)) for row in rows]
    try:
        reply = post_json(url, {"examples": examples}, api_key_env=api_key_env, attempt_s=attempt_s, total_s=total_s)
    except Unreachable as error:
        return [error] * len(examples)
    match reply:
        case {"scores": [*scores]} if len(scores) == len(examples):
            return scores
    raise Unreadable(f"{url} must answer {{'scores': [...]}} with {len(examples)} scores, got {reply!r:.200}")

"""Conversion of problems to requests, and of completions to the arrays of a rollout."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from jaxrlhf.batch import Problem, RolloutBatch, images_of_problems
from jaxrlhf.batching.partial_rollouts import append, prompts_alone
from jaxrlhf.engine import Completion, Request


def requests_of(problems: Sequence[Problem], copies: int) -> tuple[list[Request], list[Problem]]:
    """Return `copies` requests for each problem, prompt-major, and the problem of each request."""
    requests = [
        Request(problem.prompt_id * copies + copy, problem.prompt_tokens, images=problem.images)
        for problem in problems
        for copy in range(copies)
    ]
    return requests, [problem for problem in problems for _ in range(copies)]


def request_to_go_on(problem: Problem, rollout: RolloutBatch, row: int, *, copy: int, copies: int) -> Request:
    """Return the request for the rest of a response.

    Args:
      row: Row of the response in the rollout.
      copy, copies: Index of the response among the responses to the problem, and their number.
    """
    length = int(rollout.sequences.length_B[row])
    tokens, sampled = rollout.sequences.token_BT[row, :length], length - len(problem.prompt_tokens)
    number = problem.prompt_id * copies + copy
    return Request(number, tuple(tokens.tolist()), images=problem.images, drawn=sampled)


def to_rollout(prompts: Sequence[Problem], completions: Sequence[Completion], *, width: int) -> RolloutBatch:
    """Convert completions to a rollout with left-aligned arrays of `width` columns."""
    rollout = prompts_alone(prompts, width=width)
    for row, completion in enumerate(completions):
        append(rollout, row, completion.tokens, completion.logps, version=completion.version)
    starts = [len(problem.prompt_tokens) for problem in prompts]
    sequences = replace(
        rollout.sequences,
        choice_BTLk=_padded([completion.choice_TLk for completion in completions], [0] * len(starts), width=width),
        images_B=images_of_problems(prompts),
        kept_BTK=_padded([completion.kept_TK for completion in completions], starts, width=width),
    )
    return replace(rollout, sequences=sequences, truncated_B=np.array([c.truncated for c in completions]))


def _padded(recorded: Sequence[np.ndarray | None], starts: Sequence[int], *, width: int) -> np.ndarray | None:
    """Pad the recorded values of each response to `[B, T, ...]` with -1; `starts` are their first columns."""
    if not recorded or recorded[0] is None:
        return None
    padded = np.full((len(recorded), width, *recorded[0].shape[1:]), -1, recorded[0].dtype)
    for row, (start, own) in enumerate(zip(starts, recorded, strict=True)):
        assert own is not None
        padded[row, start : start + len(own)] = own
    return padded

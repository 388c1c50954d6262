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


def continued_request(problem: Problem, rollout: RolloutBatch, row: int, *, copy: int, copies: int) -> Request:
    """Return the request for the rest of a response.

    Args:
      row: Row of the response in the rollout.
      copy, copies: Index of the response among the responses to the problem, and their number.
    """
    length = int(rollout.sequences.length_B[row])
    tokens, sampled = rollout.sequences.token_BT[row, :length], length - len(problem.prompt_tokens)
    number = problem.prompt_id * copies + copy
    return Request(number, tuple(tokens.tolist()), images=problem.images, sampled=sampled)


def to_rollout(prompts: Sequence[Problem], completions: Sequence[Completion], *, width: int) -> RolloutBatch:
    """Convert completions to a rollout with left-aligned arrays of `width` columns."""
    rollout = prompts_alone(prompts, width=width)
    for row, completion in enumerate(completions):
        append(rollout, row, completion.tokens, completion.logps, version=completion.version)
    names = completions[0].recorded if completions else ()
    recorded = {name: _padded([completion.recorded[name] for completion in completions], width=width) for name in names}
    sequences = replace(rollout.sequences, images_B=images_of_problems(prompts), recorded=recorded)
    return replace(rollout, sequences=sequences, truncated_B=np.array([c.truncated for c in completions]))


def _padded(recorded: Sequence[tuple[int, np.ndarray]], *, width: int) -> np.ndarray:
    """Pad the recorded values of each response, which start at a token, to `[B, T, ...]` with -1."""
    values = recorded[0][1]
    padded = np.full((len(recorded), width, *values.shape[1:]), -1, values.dtype)
    for row, (start, own) in enumerate(recorded):
        padded[row, start : start + len(own)] = own
    return padded

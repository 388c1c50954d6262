"""Supervised fine-tuning on worked solutions."""

from collections.abc import Sequence

import numpy as np

from jaxrlhf.algos import nll_objective, token_weights
from jaxrlhf.batch import Experience, Problem, Sequences
from jaxrlhf.controller.step import StepInput, StepResult, merged
from jaxrlhf.workers import Roles


def step(roles: Roles, work: StepInput) -> StepResult:
    """One update on `-log pi(solution | prompt)`, averaged over solution tokens."""
    settings, rollout = work.config.algorithm, work.config.rollout
    batch = supervised_batch(work.problems, width=rollout.max_prompt_tokens + rollout.max_response_tokens)
    actor = roles.actor.update_actor([batch], objective=nll_objective, settings=settings, temperature=1.0)
    return StepResult(merged(actor))


def supervised_batch(problems: Sequence[Problem], *, width: int) -> Experience:
    """Prompts followed by their solutions; the solutions are trained on."""
    count = len(problems)
    token_BT, mask_BT = np.zeros((count, width), np.int32), np.zeros((count, width), bool)
    for row, problem in enumerate(problems):
        start, end = len(problem.prompt_tokens), len(problem.prompt_tokens) + len(problem.solution_tokens)
        token_BT[row, :end] = (*problem.prompt_tokens, *problem.solution_tokens)
        mask_BT[row, start:end] = True
    length_B = np.array([len(p.prompt_tokens) + len(p.solution_tokens) for p in problems], np.int32)
    prompt_id_B = np.array([problem.prompt_id for problem in problems], np.int64)
    weight_BT = np.asarray(token_weights(mask_BT, prompt_id_B, aggregation="token-mean"))
    return Experience(Sequences(token_BT, length_B, mask_BT, prompt_id_B), weight_BT, {})

"""Supervised fine-tuning on worked solutions."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from jaxrlhf.algos import nll_objective, token_weights
from jaxrlhf.batch import Array, Experience, Problem, Sequences, images_of_problems
from jaxrlhf.batching.transfer_protocol import join
from jaxrlhf.config import SFT, Config
from jaxrlhf.dataflows.step import Metrics, Roles, StepInput, StepResult, merged, value_of


def learn(roles: Roles, work: StepInput[SFT], problems: Sequence[Problem]) -> StepResult:
    """Make one update on `-log pi(solution | prompt)`, averaged over solution tokens."""
    batch = supervised_batch(problems, width=work.config.rollout.width)
    actor = roles.actor.update_actor([batch], objective=nll_objective, settings=work.settings, temperature=1.0)
    return StepResult(merged(actor))


def evaluate(roles: Roles, config: Config, problems: Sequence[Problem]) -> Metrics:
    """Return `eval/loss`: `-log pi(solution | prompt)`, averaged over the tokens of held-out solutions that fit."""
    most = config.rollout.max_response_tokens
    batch = supervised_batch(
        [problem for problem in problems if 0 < len(problem.solution_tokens) <= most], width=config.rollout.width
    )
    mask_BT = np.asarray(batch.sequences.mask_BT)
    if not mask_BT.any():
        return {}
    logp_BT = np.asarray(value_of(roles.actor.compute_log_prob(batch.sequences, temperature=1.0)))
    return {"eval/loss": -float(logp_BT[mask_BT].mean())}


def supervised_batch(problems: Sequence[Problem], *, width: int) -> Experience:
    """Build prompts followed by their solutions; the solutions are trained on."""
    count = len(problems)
    token_BT, mask_BT = np.zeros((count, width), np.int32), np.zeros((count, width), bool)
    for row, problem in enumerate(problems):
        start, end = len(problem.prompt_tokens), len(problem.prompt_tokens) + len(problem.solution_tokens)
        token_BT[row, :end] = (*problem.prompt_tokens, *problem.solution_tokens)
        mask_BT[row, start:end] = problem.solution_mask or True
    length_B = np.array([len(p.prompt_tokens) + len(p.solution_tokens) for p in problems], np.int32)
    prompt_id_B = np.array([problem.prompt_id for problem in problems], np.int64)
    weight_BT = np.asarray(token_weights(mask_BT, prompt_id_B, aggregation="token-mean"))
    images_B = images_of_problems(problems)
    return Experience(Sequences(token_BT, length_B, mask_BT, prompt_id_B, images_B=images_B), weight_BT, {})


def with_examples(
    batches: Sequence[Experience], problems: Sequence[Problem], *, each: int, coefficient: float
) -> list[Experience]:
    """Append the solutions of the next `each` problems to each minibatch of responses.

    The responses' fields are 0 in rows of solutions. `mixed_objective` imitates the solutions.
    """
    assert each * len(batches) <= len(problems)  # minibatches without a token to train on were left out
    parts = [problems[index * each : (index + 1) * each] for index in range(len(batches))]
    return [_with_examples(batch, part, coefficient) for batch, part in zip(batches, parts, strict=True)]


def _with_examples(batch: Experience, problems: Sequence[Problem], coefficient: float) -> Experience:
    examples = supervised_batch(problems, width=batch.sequences.token_BT.shape[1])
    # The prompts are from another data set, so their ids must not coincide with the responses' ids.
    prompt_id_B = -1 - np.asarray(examples.sequences.prompt_id_B)
    solutions = replace(unsampled(examples.sequences, batch.sequences), prompt_id_B=prompt_id_B)
    tokens = [np.sum(part.mask_BT) for part in (batch.sequences, solutions)]
    sampled, taught = (
        np.full_like(part.weight_BT, sum(tokens) / max(count, 1))
        for part, count in zip((batch, examples), tokens, strict=True)
    )
    zeros = np.zeros_like(taught)
    fields: dict[str, Array] = {name: np.concatenate([value, zeros]) for name, value in batch.fields.items()}
    fields["example_weight"] = np.concatenate([np.zeros_like(sampled), coefficient * examples.weight_BT])
    fields["metric_weight"] = np.concatenate([sampled, taught])
    return Experience(join([batch.sequences, solutions]), np.concatenate([batch.weight_BT, zeros]), fields)


def unsampled(sequences: Sequences, beside: Sequences) -> Sequences:
    """Give sequences that no policy sampled the recorded columns of `beside`, with nothing recorded (-1)."""
    rows = len(sequences.token_BT)
    empty = {name: np.full((rows, *of.shape[1:]), -1, np.asarray(of).dtype) for name, of in beside.recorded.items()}
    return replace(sequences, recorded=empty)

"""Supervised fine-tuning on worked solutions."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from jaxrlhf.algos import nll_objective, token_weights
from jaxrlhf.batch import Array, Problem, Sequences, images_of_problems
from jaxrlhf.batching.ragged import Experience
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
    fitting = [problem for problem in problems if 0 < len(problem.solution_tokens) <= most]
    sequences = with_solutions(fitting, width=config.rollout.width)
    if not np.any(sequences.mask_BT):
        return {}
    logp_BT = np.asarray(value_of(roles.actor.compute_log_prob(sequences, temperature=1.0)))
    return {"eval/loss": -float(logp_BT[sequences.mask_BT].mean())}


def supervised_batch(problems: Sequence[Problem], *, width: int) -> Experience:
    """Build the update on prompts followed by their solutions, averaged over solution tokens."""
    sequences = with_solutions(problems, width=width)
    weight_BT = token_weights(sequences.mask_BT, sequences.prompt_id_B, aggregation="token-mean")
    return Experience.of(sequences, weight_BT, {})


def with_solutions(problems: Sequence[Problem], *, width: int) -> Sequences:
    """Return prompts followed by their solutions; the solutions are trained on."""
    tokens = [(*problem.prompt_tokens, *problem.solution_tokens) for problem in problems]
    masks = [
        [False] * len(problem.prompt_tokens) + list(problem.solution_mask or [True] * len(problem.solution_tokens))
        for problem in problems
    ]
    ids = [problem.prompt_id for problem in problems]
    return Sequences.of(tokens, masks, ids, width=width, images_B=images_of_problems(problems))


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
    responses, weight_BT = batch.sequences, batch.weight_BT
    examples = supervised_batch(problems, width=batch.batch.width)
    # The prompts are from another data set, so their ids must not coincide with the responses' ids.
    solutions = unsampled(examples.sequences, responses)
    solutions = replace(solutions, prompt_id_B=-1 - np.asarray(solutions.prompt_id_B))
    tokens = [np.sum(part.mask_BT) for part in (responses, solutions)]
    sampled, taught = (
        np.full(np.shape(part.mask_BT), sum(tokens) / max(count, 1), weight_BT.dtype)
        for part, count in zip((responses, solutions), tokens, strict=True)
    )
    zeros = np.zeros_like(taught)
    fields: dict[str, Array] = {name: np.concatenate([value, zeros]) for name, value in batch.fields.items()}
    fields["example_weight"] = np.concatenate([np.zeros_like(sampled), coefficient * examples.weight_BT])
    fields["metric_weight"] = np.concatenate([sampled, taught])
    return Experience.of(join([responses, solutions]), np.concatenate([weight_BT, zeros]), fields)


def unsampled(sequences: Sequences, beside: Sequences) -> Sequences:
    """Give sequences that no policy sampled the recorded columns of `beside`, with nothing recorded (-1)."""
    rows = len(sequences.token_BT)
    empty = {name: np.full((rows, *of.shape[1:]), -1, np.asarray(of).dtype) for name, of in beside.recorded.items()}
    return replace(sequences, recorded=empty)

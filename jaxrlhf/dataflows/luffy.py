"""LUFFY: GRPO on groups of sampled responses and the data's worked solutions.

Source: Yan et al. 2025 (Learning to reason under off-policy guidance, arXiv:2504.14945).
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from jaxrlhf import algos
from jaxrlhf.batch import Array, Problem, RolloutBatch, Scores
from jaxrlhf.batching.transfer_protocol import join
from jaxrlhf.config import LUFFY, Config, Refusal
from jaxrlhf.dataflows.batches.estimate import next_state, old_log_prob, ref_log_prob, scorable
from jaxrlhf.dataflows.batches.minibatches import Minibatches, policy_minibatches
from jaxrlhf.dataflows.batches.rollout_metrics import flat_groups, rollout_metrics
from jaxrlhf.dataflows.batches.scored import ScoredRollout
from jaxrlhf.dataflows.collect import respond
from jaxrlhf.dataflows.sft import supervised_batch, unsampled
from jaxrlhf.dataflows.step import Roles, StepInput, StepResult, call, value_of


def collect(roles: Roles, work: StepInput[LUFFY]) -> ScoredRollout:
    """Sample responses, and score the worked solutions that complete each group, returned as `beside`.

    Raises:
      Refusal: A problem has too few solutions.
    """
    copies = work.config.rollout.responses_per_prompt - work.settings.solutions
    sampled = respond(roles, work, work.problems, responses_per_prompt=copies)
    solutions = solutions_of(sampled.problems, work.config, each=work.settings.solutions)
    scores = roles.reward.compute_reward(sampled.problems, solutions)
    return replace(sampled, beside=ScoredRollout(sampled.problems, solutions, scores))


def learn(roles: Roles, work: StepInput[LUFFY], batch: ScoredRollout) -> StepResult:
    """Compute advantages over responses and solutions, and update the actor on both."""
    old_logp, ref_logp = old_log_prob(roles, work, batch.rollout), ref_log_prob(roles, work, batch.rollout)
    # `beside` is None when programs are lowered.
    taught = () if batch.beside is None else (batch.beside.rollout, batch.beside.scores)
    prepared = call(partial(prepare, work), batch.rollout, batch.scores, old_logp, ref_logp, *taught)
    actor = roles.actor.update_actor(prepared.policy, objective=algos.guided_objective, settings=work.settings)
    return StepResult(prepared.metrics | batch.metrics, prepared.state, value_of(old_logp), updates=(actor,))


def solutions_of(problems: Sequence[Problem], config: Config, *, each: int) -> RolloutBatch:
    """Return the first `each` solutions of each problem as responses, prompt-major.

    Their version is -1, and their log-probabilities are 0: the author counts as certain of every token.
    """
    own = [[*filter(None, (problem.solution_tokens, *problem.further_solutions))] for problem in problems]
    missing = [problem for problem, solutions in zip(problems, own, strict=True) if len(solutions) < each]
    if missing:
        source = f" of source {missing[0].source!r}" if missing[0].source else ""
        wanted, fewer = ("a worked solution", "none") if each == 1 else (f"{each} worked solutions", "fewer")
        raise Refusal(
            f"LUFFY learns from {wanted} to each prompt, and {len(missing)} of {len(problems)} prompts of the step "
            f"have {fewer}, first record {missing[0].prompt_id}{source}; name data.solution_key, or leave those out"
        )
    problems = [
        replace(problem, solution_tokens=one)
        for problem, solutions in zip(problems, own, strict=True)
        for one in solutions[:each]
    ]
    width = config.rollout.max_prompt_tokens + config.rollout.max_response_tokens
    sequences = supervised_batch(problems, width=width).sequences
    zeros = np.zeros(sequences.mask_BT.shape, np.float32)
    return RolloutBatch(sequences, zeros, np.zeros(len(problems), bool), np.full(zeros.shape, -1, np.int32))


def prepare(
    work: StepInput[LUFFY],
    rollout: RolloutBatch,
    scores: Scores,
    old_logp_BT: Array | None,
    ref_logp_BT: Array | None,
    solutions: RolloutBatch | None = None,
    solution_scores: Scores | None = None,
) -> Minibatches:
    """Compute advantages over whole groups and build the minibatches; rollout metrics cover sampled responses alone."""
    metrics, sampled = rollout_metrics(rollout, scores, old_logp_BT, ref_logp_BT), len(scores.score_B)
    if solutions is not None and solution_scores is not None:
        metrics["luffy/solution_score"] = _mean_score(solution_scores)
        certain_BT = solutions.sampler_logp_BT
        solutions = replace(solutions, sequences=unsampled(solutions.sequences, rollout.sequences))
        rollout, scores = join([rollout, solutions]), join([scores, solution_scores])
        old_logp_BT, ref_logp_BT = (None if x is None else join([x, certain_BT]) for x in (old_logp_BT, ref_logp_BT))
    sequences = scorable(rollout.sequences, scores)
    mask_BT, prompt_id_B = np.asarray(sequences.mask_BT), np.asarray(sequences.prompt_id_B)
    normalize = work.settings.normalize_std
    advantage_B = algos.group_relative(scores.score_B, scores.scorable_B, prompt_id_B, normalize_std=normalize)
    advantage_BT = algos.to_tokens(advantage_B, mask_BT)
    metrics |= {"kl/coefficient": work.state["kl_coefficient"], **flat_groups(advantage_BT, prompt_id_B)}
    solution_BT = mask_BT & (np.arange(len(mask_BT)) >= sampled)[:, None]
    tokens_BT = np.where(solution_BT, solution_BT.sum(), (mask_BT & ~solution_BT).sum())
    marks = {"off_policy": solution_BT, "metric_weight": mask_BT.sum() / np.maximum(tokens_BT, 1)}
    policy, corrected = policy_minibatches(work, sequences, rollout, advantage_BT, old_logp_BT, ref_logp_BT, marks)
    return Minibatches(policy, [], metrics | corrected, next_state(work, metrics, sequences=sampled))


def _mean_score(scores: Scores) -> float:
    known = np.asarray(scores.score_B)[np.asarray(scores.scorable_B)]
    return float(known.mean()) if len(known) else float("nan")

"""Learning from preference pairs: DPO and its kin, reward models and cost models.

A step reads the log-probabilities or the scores of its pairs, takes the derivative of the loss by
them, and makes one update with those derivatives as weights; see `jaxrlhf.algos.preference`.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from jaxrlhf import algos
from jaxrlhf.algos import PairLoss, linear_objective, masked_sum
from jaxrlhf.batch import Array, Experience, Pair, Problem, Sequences
from jaxrlhf.config import DPO, IPO, RPO, Config, CostModel, Preference, RewardModel
from jaxrlhf.dataflows.step import Metrics, StepInput, StepResult, call, merged, value_of
from jaxrlhf.single_controller.pools import Roles


class Judged(NamedTuple):
    """What is made of pairs.

    Attributes:
      loss: Of each pair.
      chosen_P: Reward of the chosen answer: implicit in the policy, or a score, or minus a cost.
      rejected_P: The same of the rejected answer.
    """

    loss: PairLoss
    chosen_P: Array
    rejected_P: Array


def policy_step(roles: Roles, work: StepInput) -> StepResult:
    """One update of DPO, IPO or RPO."""
    sequences = pair_sequences(work.problems, work.config)
    logp = roles.actor.compute_log_prob(sequences, temperature=1.0)
    ref_logp = roles.reference.compute_ref_log_prob(sequences, temperature=1.0)
    judged = call(judge_by_policy, work.config.algorithm, sequences, logp, ref_logp)
    batch = pair_experience(sequences, judged.loss)
    actor = roles.actor.update_actor([batch], objective=linear_objective, settings=None, temperature=1.0)
    return StepResult(merged(pair_metrics(judged), actor))


def score_step(roles: Roles, work: StepInput) -> StepResult:
    """One update of a reward model or a cost model."""
    sequences = pair_sequences(work.problems, work.config)
    values = roles.critic.compute_values(sequences)
    judged = call(judge_by_score, work.config.algorithm, work.problems, sequences, values)
    batch = pair_experience(sequences, judged.loss)
    critic = roles.critic.update_critic([batch], objective=linear_objective, settings=None)
    return StepResult(merged(pair_metrics(judged), critic))


def evaluate(roles: Roles, config: Config, problems: Sequence[Problem]) -> Metrics:
    """How held-out pairs are ranked; `eval/accuracy` is the share that is ranked as labelled."""
    sequences, settings = pair_sequences(problems, config), config.algorithm
    if isinstance(settings, RewardModel):
        judged = judge_by_score(settings, problems, sequences, value_of(roles.critic.compute_values(sequences)))
    else:
        logp = roles.actor.compute_log_prob(sequences, temperature=1.0)
        ref_logp = roles.reference.compute_ref_log_prob(sequences, temperature=1.0)
        judged = call(judge_by_policy, settings, sequences, logp, ref_logp)
    ranked = pair_metrics(judged)
    wanted = {f"eval/{name}": ranked[f"preference/{name}"] for name in ("accuracy", "loss", "margin")}
    return {**wanted, "eval/problems": float(len(problems))}


def pair_sequences(problems: Sequence[Problem], config: Config) -> Sequences:
    """Prompts followed by their chosen, then by their rejected answers; the mask marks what is read.

    That is each token of the answers for a policy. A critic values the prefix before a token, so
    the score of a whole sequence is read at the place after it, which any token fills.
    """
    settings, rollout = config.algorithm, config.rollout
    assert isinstance(settings, Preference)
    count, after = 2 * len(problems), settings.places_after
    width = rollout.max_prompt_tokens + rollout.max_response_tokens
    token_BT, mask_BT, length_B = np.zeros((count, width), np.int32), np.zeros((count, width), bool), []
    for index, pair in enumerate(problems):
        assert isinstance(pair, Pair), "the configuration lets no other problems through"
        for row, answer in enumerate((pair.solution_tokens, pair.rejected_tokens), start=2 * index):
            start, end = len(pair.prompt_tokens), len(pair.prompt_tokens) + len(answer)
            token_BT[row, :end] = (*pair.prompt_tokens, *answer)
            mask_BT[row, end if after else start : end + after] = True
            length_B.append(end + after)
    prompt_id_B = np.repeat(np.array([problem.prompt_id for problem in problems], np.int64), 2)
    return Sequences(token_BT, np.array(length_B, np.int32), mask_BT, prompt_id_B)


def judge_by_policy(settings: DPO | IPO, sequences: Sequences, logp_BT: Array, ref_logp_BT: Array) -> Judged:
    """Pairs by how much likelier the policy makes each answer than the reference does."""
    mask_BT = sequences.mask_BT
    logp_B = np.asarray(masked_sum(logp_BT, mask_BT, axis=1))
    chosen_P, rejected_P = _pairs(logp_B - np.asarray(masked_sum(ref_logp_BT, mask_BT, axis=1)))
    if isinstance(settings, IPO):
        loss = algos.ipo(chosen_P, rejected_P, beta=settings.beta)
    else:
        loss = algos.dpo(chosen_P, rejected_P, beta=settings.beta, label_smoothing=settings.label_smoothing)
    if isinstance(settings, RPO):
        tokens_P = np.asarray(mask_BT).sum(axis=1)[::2]
        loss = algos.with_likelihood(loss, logp_B[::2], tokens_P, coefficient=settings.nll_coefficient)
    return Judged(loss, settings.beta * chosen_P, settings.beta * rejected_P)


def judge_by_score(settings: RewardModel, problems: Sequence[Problem], sequences: Sequences, value_BT: Array) -> Judged:
    """Pairs by the score of each answer."""
    chosen_P, rejected_P = _pairs(np.asarray(masked_sum(value_BT, sequences.mask_BT, axis=1)))
    pairs = [problem for problem in problems if isinstance(problem, Pair)]
    if isinstance(settings, CostModel):
        safe_PA = np.array([pair.safe for pair in pairs])
        return Judged(algos.pair_cost(chosen_P, rejected_P, safe_PA[:, 0], safe_PA[:, 1]), -chosen_P, -rejected_P)
    margin_P = np.array([pair.margin for pair in pairs], np.float32)
    return Judged(algos.bradley_terry(chosen_P, rejected_P, margin_P), chosen_P, rejected_P)


def _pairs(value_B: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    return value_B[::2], value_B[1::2]


def pair_experience(sequences: Sequences, loss: PairLoss) -> Experience:
    """The update on the mean of a loss over pairs."""
    slope_PA = np.stack([np.asarray(loss.chosen_P), np.asarray(loss.rejected_P)], axis=1)
    weight_B = (slope_PA / len(slope_PA)).reshape(-1).astype(np.float32)
    return Experience(sequences, np.where(sequences.mask_BT, weight_B[:, None], np.float32(0)), {})


def pair_metrics(judged: Judged) -> Metrics:
    """What one looks at first; a pair of equal rewards counts as half right."""
    margin_P = np.asarray(judged.chosen_P - judged.rejected_P)
    return {
        "preference/loss": float(np.mean(judged.loss.loss_P)),
        "preference/accuracy": float(np.mean((margin_P > 0) + 0.5 * (margin_P == 0))),
        "preference/margin": float(margin_P.mean()),
        "preference/chosen_reward": float(np.mean(judged.chosen_P)),
        "preference/rejected_reward": float(np.mean(judged.rejected_P)),
    }

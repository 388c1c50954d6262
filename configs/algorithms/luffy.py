"""LUFFY: GRPO with worked solutions of the data in each group, on generated arithmetic word problems.

    python -m jaxrlhf.train --config luffy.py

A group of eight has seven sampled responses and one solution. The cold start imitates demonstrations that mostly stop
one step early, as in `grpo_arithmetic.py`; the solutions of the groups are complete.

Source: Yan et al. 2025 (Learning to reason under off-policy guidance, arXiv:2504.14945).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

import jax.numpy as jnp
import numpy as np

from jaxrlhf import algos
from jaxrlhf.batch import Array, Problem, RolloutBatch, Scores
from jaxrlhf.batching.transfer_protocol import join
from jaxrlhf.config import GRPO, Arithmetic, Config, KLInReward, Refusal, load
from jaxrlhf.config.refusal import require
from jaxrlhf.config.settings import Positive
from jaxrlhf.dataflows.batches.estimate import next_state, old_log_prob, ref_log_prob, scorable
from jaxrlhf.dataflows.batches.minibatches import Minibatches, policy_minibatches
from jaxrlhf.dataflows.batches.rollout_metrics import flat_groups, rollout_metrics
from jaxrlhf.dataflows.batches.scored import ScoredRollout
from jaxrlhf.dataflows.collect import respond
from jaxrlhf.dataflows.sft import unsampled, with_solutions
from jaxrlhf.dataflows.step import Roles, StepInput, StepResult, call, value_of


def guided_objective(
    output: algos.TokenOutput, mask: Array, weight: Array, fields: Mapping[str, Any], settings: "LUFFY"
) -> algos.ObjectiveTerms:
    """Compute `policy_objective` on sampled responses, and a shaped-probability loss on off-policy solutions.

        weight * -A * p / (p + gamma)    with p = exp(logp) of a solution's token

    The policy that wrote the solutions is assumed to have probability 1 for each token, so the importance ratio is p
    itself, and nothing is clipped. The derivative with respect to logp, -A * gamma * p / (p + gamma)^2, is largest at
    p = gamma. Without shaping it would be -A * p, so shaping makes unlikely tokens teach more.

    Args:
      fields: In addition `off_policy`, 1 at the tokens of solutions and 0 elsewhere; and `metric_weight`, the factor
        that turns means over the mask into means over the responses, or over the solutions.
      settings: `shaping` is gamma; the other settings are those of `policy_objective`.

    Source: Yan et al. 2025 (LUFFY, arXiv:2504.14945), sections 3.1 (mixed-policy GRPO) and 3.2 (policy shaping).
    """
    solution = mask & (algos.selected(fields["off_policy"], mask) > 0)
    sampled = algos.policy_objective(output, mask & ~solution, weight, fields, settings)
    chance = algos.selected(jnp.exp(algos.selected(output.logp, solution)), solution)
    shaped = chance / (chance + settings.shaping)
    loss = -algos.selected(weight, solution) * algos.selected(fields["advantage"], solution) * shaped
    scale = algos.selected(fields["metric_weight"], mask)
    metrics = {**sampled.metrics, "luffy/solution_probability": chance}
    return algos.ObjectiveTerms(sampled.loss + loss, {name: scale * value for name, value in metrics.items()})


def collect(roles: Roles, work: StepInput["LUFFY"]) -> ScoredRollout:
    """Sample responses, and score the worked solutions that complete each group, returned as `beside`.

    Raises:
      Refusal: A problem has too few solutions.
    """
    copies = work.config.rollout.responses_per_prompt - work.settings.solutions
    sampled = respond(roles, work, work.problems, responses_per_prompt=copies)
    solutions = solutions_of(sampled.problems, work.config, each=work.settings.solutions)
    scores = roles.reward.compute_reward(sampled.problems, solutions)
    return replace(sampled, beside=ScoredRollout(sampled.problems, solutions, scores))


def learn(roles: Roles, work: StepInput["LUFFY"], batch: ScoredRollout) -> StepResult:
    """Compute advantages over responses and solutions, and update the actor on both."""
    old_logp, ref_logp = old_log_prob(roles, work, batch.rollout), ref_log_prob(roles, work, batch.rollout)
    # `beside` is None when programs are lowered.
    solutions = () if batch.beside is None else (batch.beside.rollout, batch.beside.scores)
    prepared = call(partial(prepare, work), batch.rollout, batch.scores, old_logp, ref_logp, *solutions)
    actor = roles.actor.update_actor(prepared.policy, objective=guided_objective, settings=work.settings)
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
            f"LUFFY requires {wanted} for each prompt, but {len(missing)} of {len(problems)} prompts of the step have "
            f"{fewer}, first record {missing[0].prompt_id}{source}; set data.solution_key, or remove these records"
        )
    problems = [
        replace(problem, solution_tokens=one)
        for problem, solutions in zip(problems, own, strict=True)
        for one in solutions[:each]
    ]
    return RolloutBatch.unsampled(with_solutions(problems, width=config.rollout.width))


def prepare(
    work: StepInput["LUFFY"],
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


@dataclass(frozen=True)
class LUFFY(GRPO):
    """GRPO with worked solutions of the data in each group, as off-policy guidance.

    The last responses of each group of `rollout.responses_per_prompt` are the record's worked solutions; the others are
    sampled. Rewards score all of them, and advantages are relative to the whole group. Tokens of solutions have a loss
    without a clip that emphasizes tokens which the policy finds unlikely; `policy`, `kl` and the entropy bonus apply to
    sampled tokens only.

    Attributes:
      solutions: Number of worked solutions in a group: the first solutions of the record.
      shaping: Shaping parameter gamma: the loss of a solution token of probability p has the factor p / (p + gamma).
    """

    collect = collect
    learn = learn
    takes_several_sequences: ClassVar[bool] = False
    reads_solutions: ClassVar[bool] = True

    solutions: Positive[int] = 1
    shaping: Positive[float] = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            not isinstance(self.kl, KLInReward),
            f"LUFFY also scores solutions, which the policy did not sample, but kl={self.kl} penalizes each of their "
            "tokens; use KLInLoss",
        )

    def check(self, config: Config) -> None:
        require(
            config.rollout.responses_per_prompt > self.solutions,
            f"LUFFY.solutions={self.solutions} leaves none of the {config.rollout.responses_per_prompt} responses of "
            "a group to sample; raise rollout.responses_per_prompt",
        )
        require(
            config.environment is None,
            "LUFFY adds worked solutions to the responses to a prompt, but environment has episodes; set "
            "environment=None",
        )
        require(
            config.rollout.over_provision == 1,
            f"LUFFY samples only a part of each group, but over_provision={config.rollout.over_provision} continues "
            "whole groups in later steps; set rollout.over_provision=1",
        )


def get_config() -> Config:
    """Return the configuration of the run."""
    base = load("grpo_arithmetic")
    assert base.cold_start is not None
    return replace(
        base,
        name="luffy",
        data=Arithmetic(difficulty=2, train_problems=12_800),
        cold_start=replace(base.cold_start, data=base.data),
        algorithm=LUFFY(responses_per_update=64),
    )

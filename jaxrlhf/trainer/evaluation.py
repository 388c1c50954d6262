"""Accuracy on held-out problems."""

from collections.abc import Sequence

import numpy as np

from jaxrlhf.batch import Problem
from jaxrlhf.config import Config, Sampling
from jaxrlhf.dataflows.batches.scored import ScoredRollout
from jaxrlhf.dataflows.collect import answered
from jaxrlhf.dataflows.step import Metrics, value_of
from jaxrlhf.rewards.parts import first_part
from jaxrlhf.single_controller.pools import Roles

_SEED = 20_000_003
"""Seed of evaluation samples, the same at every step so that steps can be compared."""


def evaluate(
    roles: Roles, config: Config, problems: Sequence[Problem], *, sampling: Sampling | None = None, samples: int = 1
) -> tuple[Metrics, ScoredRollout]:
    """Answer every problem and score the answers by the first reward; with an environment, in an episode each.

    Args:
      sampling: None decodes greedily.
      samples: Answers per problem; with more than one, pass@k is estimated for k up to it.

    Returns:
      `eval/accuracy` (mean score of the first reward over scorable answers), lengths and
      counts, `eval/pass@k` where `samples` is above 1; and the answers with their scores.
    """
    sampling = sampling or Sampling(greedy=True)
    answers = answered(roles, config, problems, sampling, responses_per_prompt=samples, seed=_SEED)
    rollout, scores = value_of(answers.rollout), value_of(answers.scores)
    # By name: scores joined from several processes have their parts in another order.
    first = np.asarray(scores.parts[first_part(config.rewards)])
    finite = np.isfinite(first)
    length_B = rollout.sequences.mask_BT.sum(axis=1)
    metrics = {
        "eval/accuracy": float(first[finite].mean()) if finite.any() else float("nan"),
        "eval/problems": float(len(problems)),
        "eval/unscorable": float((~finite).sum()),
        "eval/length_mean": float(length_B.mean()),
        "eval/truncated_fraction": float(np.mean(rollout.truncated_B)),
    }
    if samples > 1:
        score_PG = first.reshape(len(problems), samples)
        for k in [k for k in (1, 2, 4, 8, 16, 32, 64, 128, 256) if k < samples] + [samples]:
            metrics[f"eval/pass@{k}"] = _mean_pass_at_k(score_PG, k)
    metrics |= {f"eval/{name}": value for name, value in answers.metrics.items() if not name.startswith("time/")}
    return metrics, answers


def _mean_pass_at_k(score_PG: np.ndarray, k: int) -> float:
    """Mean of pass@k over the problems with at least k scorable answers; an unscorable one is not a wrong one."""
    counts = [(int(np.isfinite(row).sum()), int((row[np.isfinite(row)] >= 1.0).sum())) for row in score_PG]
    chances = [pass_at_k(scorable, correct, k) for scorable, correct in counts if scorable >= k]
    return float(np.mean(chances)) if chances else float("nan")


def pass_at_k(samples: int, correct: int, k: int) -> float:
    """Unbiased chance that at least one of k answers drawn from `samples` is correct.

        1 - C(n - c, k) / C(n, k)

    Source: Chen et al. 2021 (arXiv:2107.03374), eq. 1.
    """
    if samples - correct < k:
        return 1.0
    return float(1.0 - np.prod(1.0 - k / np.arange(samples - correct + 1, samples + 1)))

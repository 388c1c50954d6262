"""Evaluation: accuracy, pass@k and maj@k on held-out problems."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from jaxrlhf.batch import Problem, Scores
from jaxrlhf.config import Config, EvaluationSet, Sampling
from jaxrlhf.dataflows.batches.episode_rows import sampled_lengths
from jaxrlhf.dataflows.batches.scored import ScoredRollout
from jaxrlhf.dataflows.collect import generate_and_score
from jaxrlhf.dataflows.step import Metrics, value_of
from jaxrlhf.rewards.final_text import answered
from jaxrlhf.rewards.mathematics import same_text
from jaxrlhf.rewards.mathematics.stated import stated_answer
from jaxrlhf.rewards.parts import first_part, part_names
from jaxrlhf.single_controller.pools import Roles
from jaxrlhf.trainer.samples import texts_of

Decode = Callable[[Sequence[int]], str]

_SEED = 20_000_003
"""Seed of evaluation samples, the same at every step so that steps can be compared."""


@dataclass(frozen=True)
class HeldOutSet:
    """Evaluation set, tokenized."""

    settings: EvaluationSet
    problems: Sequence[Problem]


def evaluations(
    roles: Roles, config: Config, held_out: Sequence[Problem], sets: Sequence[HeldOutSet], decode: Decode
) -> Iterator[tuple[Metrics, ScoredRollout]]:
    """Yield metrics and answers of the held-out problems, then of each further set, with the set's name as prefix."""
    if held_out:
        yield evaluate(roles, config, held_out, decode)
    for one in sets:
        settings = one.settings
        yield evaluate(
            roles,
            config,
            one.problems,
            decode,
            sampling=settings.sampling if settings.samples > 1 else None,
            samples=settings.samples,
            prefix=f"eval/{settings.name}",
        )


def evaluate(
    roles: Roles,
    config: Config,
    problems: Sequence[Problem],
    decode: Decode,
    *,
    sampling: Sampling | None = None,
    samples: int = 1,
    prefix: str = "eval",
) -> tuple[Metrics, ScoredRollout]:
    """Answer every problem, in an episode if there is an environment, and score the answers by the first reward.

    Args:
      decode: Token ids to text.
      sampling: None decodes greedily.
      samples: Answers per problem; above 1, pass@k is estimated for k up to `samples`.
      prefix: First part of the metrics' names.

    Returns:
      Metrics, and the answers with their scores. Metrics are `eval/accuracy` (mean score of the first reward over
      scorable answers), lengths and counts; the accuracy of each source if there are several; and `eval/pass@k`,
      `eval/maj@k` and `eval/avg@k` if `samples` is above 1.
    """
    sampling = sampling or Sampling(greedy=True)
    answers = generate_and_score(roles, config, problems, sampling, responses_per_prompt=samples, seed=_SEED)
    rollout, scores = value_of(answers.rollout), value_of(answers.scores)
    first = _first_scores(config, scores, [problem.source for problem in problems for _ in range(samples)])
    length_B, truncated_B = sampled_lengths(rollout)
    metrics = {
        f"{prefix}/accuracy": _mean(first),
        f"{prefix}/problems": float(len(problems)),
        f"{prefix}/unscorable": float((~np.isfinite(first)).sum()),
        f"{prefix}/length_mean": float(length_B.mean()),
        f"{prefix}/truncated_fraction": float(np.mean(truncated_B)),
    }
    score_PG = first.reshape(len(problems), samples)
    for source in sorted({problem.source for problem in problems} - {prefix.removeprefix("eval/"), ""}):
        own = np.array([problem.source == source for problem in problems])
        metrics[f"{prefix}/{source}/accuracy"] = _mean(score_PG[own])
    if samples > 1:
        for k in [k for k in (1, 2, 4, 8, 16, 32, 64, 128, 256) if k < samples] + [samples]:
            metrics[f"{prefix}/pass@{k}"] = _mean_pass_at_k(score_PG, k)
        stated = _stated_answers(config, problems, texts_of(answers, decode))
        metrics[f"{prefix}/maj@{samples}"] = majority(stated, score_PG)
        metrics[f"{prefix}/avg@{samples}"] = metrics[f"{prefix}/accuracy"]
    metrics |= {f"{prefix}/{name}": value for name, value in answers.metrics.items() if not name.startswith("time/")}
    return metrics, answers


def _stated_answers(config: Config, problems: Sequence[Problem], texts: Sequence[str]) -> list[str | None]:
    """Return the final answer of each response, where its source's first reward looks for it; None without one."""
    stated, samples = [], len(texts) // len(problems)
    for problem, text in zip((one for one in problems for _ in range(samples)), texts, strict=True):
        part = next(iter(config.source_rewards.get(problem.source) or config.rewards.parts), None)
        inside = getattr(getattr(part, "correct", part), "in_thinking", False)
        prompt = problem.prompt if config.environment is None else ""
        stated.append(answered(prompt, text, stated_answer, in_thinking=inside))
    return stated


def majority(answers: Sequence[str | None], score_PG: np.ndarray) -> float:
    """Compute maj@k: the mean over problems of the score of the most frequent final answer; ties go to the earliest.

    Answers are grouped as `MathReward` compares them. A response without an answer, or without a score, does not vote.
    A problem whose scored responses state no answer scores 0. A problem without a scored response is left out.

    Source: Wang et al. 2022 (arXiv:2203.11171).

    Args:
      answers: Final answers, problem by problem, an equal number for each problem; None without an answer.
    """
    won = []
    for group, score_G in enumerate(score_PG):
        if not np.isfinite(score_G).any():
            continue
        own = answers[group * len(score_G) : (group + 1) * len(score_G)]
        votes: list[tuple[str, list[float]]] = []
        for answer, score in zip(own, score_G.tolist(), strict=True):
            if answer is None or not np.isfinite(score):
                continue
            alike = next((scores for stated, scores in votes if same_text(answer, stated)), None)
            if alike is None:
                votes.append((answer, [score]))
            else:
                alike.append(score)
        won.append(max((scores for _, scores in votes), key=len, default=[0.0])[0])
    return float(np.mean(won)) if won else float("nan")


def _first_scores(config: Config, scores: Scores, sources: Sequence[str]) -> np.ndarray:
    """Return each row's score by its source's first reward, else by the run's first reward, `[B]`; NaN if it failed."""
    # By name: scores joined from several processes have their parts in a different order.
    own = {source: f"{source}/{part_names(parts)[0]}" for source, parts in config.source_rewards.items()}
    default = first_part(config.rewards)
    names = [own.get(source, default) for source in sources]
    return np.array([float(scores.parts[name][row]) for row, name in enumerate(names)])


def _mean(scores: np.ndarray) -> float:
    finite = scores[np.isfinite(scores)]
    return float(finite.mean()) if finite.size else float("nan")


def _mean_pass_at_k(score_PG: np.ndarray, k: int) -> float:
    """Return the mean pass@k over problems with at least k scorable answers; unscorable answers are not wrong ones."""
    counts = [(int(np.isfinite(row).sum()), int((row[np.isfinite(row)] >= 1.0).sum())) for row in score_PG]
    chances = [pass_at_k(scorable, correct, k) for scorable, correct in counts if scorable >= k]
    return float(np.mean(chances)) if chances else float("nan")


def pass_at_k(samples: int, correct: int, k: int) -> float:
    """Estimate, without bias, the probability that at least one of k answers out of `samples` is correct.

        1 - C(n - c, k) / C(n, k)

    Source: Chen et al. 2021 (arXiv:2107.03374), eq. 1.
    """
    if samples - correct < k:
        return 1.0
    return float(1.0 - np.prod(1.0 - k / np.arange(samples - correct + 1, samples + 1)))

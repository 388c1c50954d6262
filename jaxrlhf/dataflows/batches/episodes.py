"""Scores and metrics of a step's episodes; the environment's settings say how truncated episodes are scored."""

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from jaxrlhf.batch import Problem, RolloutBatch, Scores
from jaxrlhf.config import AnyEnvironment
from jaxrlhf.config.environments import choices
from jaxrlhf.dataflows.batches.scored import ScoredRollout
from jaxrlhf.dataflows.step import Metrics
from jaxrlhf.episode import STOP_CAUSES, TRUNCATIONS, EpisodeRecord


def scored_episodes(
    environment: AnyEnvironment, problems: Sequence[Problem], rollout: RolloutBatch, scores: Scores
) -> ScoredRollout:
    """Combine episodes and scores; a truncated episode is scored, gets 0 or is not trained on, by its environment."""
    episodes, scorable_E = rollout.episodes, np.asarray(scores.scorable_B)
    assert episodes is not None, "an environment makes episodes"
    records = episodes.records
    zero_E, left_out_E = (truncated_with(environment, records, how) for how in ("zero", "leave_out"))
    if zero_E.any():
        zero_B = np.repeat(zero_E, episodes.rows_E)
        paid_BT = np.where(zero_B[:, None], 0, episodes.reward_BT).astype(np.float32)
        rollout = replace(rollout, episodes=replace(episodes, reward_BT=paid_BT))
        scores = replace(scores, score_B=np.where(zero_E, 0, scores.score_B).astype(np.float32))
    trained_E = ~left_out_E if left_out_E.any() else None
    return ScoredRollout(problems, rollout, scores, trained_E, episode_metrics(records, scorable_E))


def truncated_with(environment: AnyEnvironment, records: Sequence[EpisodeRecord], how: str) -> np.ndarray:
    """Return bool `[E]`: truncated episodes whose environment's setting `truncated` is `how`."""
    settings = [choices(environment)[record.environment] for record in records]
    ended = zip(records, settings, strict=True)
    return np.array([record.stop in TRUNCATIONS and one.truncated == how for record, one in ended], bool)


def episode_metrics(records: Sequence[EpisodeRecord], scorable_E: np.ndarray) -> Metrics:
    """Return metrics of a step's episodes: turns, stop causes, tool calls, seconds, and the environments' own."""
    turns = np.array([len(record.turns) for record in records])
    stops = Counter(record.stop for record in records)
    every = [turn for record in records for turn in record.turns]
    malformed = sum(bool(turn.reply.malformed) for turn in every)
    environment_s = sum(turn.environment_s for turn in every)
    known_s = environment_s + sum(turn.policy_s for turn in every)  # agent programs report neither
    metrics = {
        "episode/turns_mean": float(turns.mean()),
        "episode/turns_max": float(turns.max()),
        "episode/unscorable": float((~scorable_E).sum()),
        "episode/sequences_mean": 1.0 + sum(sum(record.forks.values()) for record in records) / len(records),
        "episode/malformed_turns": malformed / max(len(every), 1),
        **({"time/environment_share": environment_s / known_s} if known_s else {}),
        **{f"episode/ended_{cause}": stops[cause] / len(records) for cause in STOP_CAUSES if stops[cause]},
        **_call_metrics(records),
    }
    own: dict[str, list[float]] = defaultdict(list)
    for record in records:
        for name, value in record.metrics.items():
            own[name].append(value)
    return metrics | {f"environment/{name}": float(np.mean(values)) for name, values in own.items()}


def _call_metrics(records: Sequence[EpisodeRecord]) -> Metrics:
    by_name = defaultdict(list)
    for record in records:
        for turn in record.turns:
            for call in turn.calls:
                by_name[call.name].append(call)
    calls = [call for some in by_name.values() for call in some]
    asked = [sum(len(turn.calls or turn.reply.calls) for turn in record.turns) for record in records]
    metrics = {"tool/calls_mean": float(np.mean(asked))}
    if any(asked):
        metrics["tool/episodes_share"] = float(np.mean([count > 0 for count in asked]))
    if calls:  # an agent program makes its own calls, which are not recorded
        metrics["tool/failed_share"] = float(np.mean([call.failure is not None for call in calls]))
    for name, some in by_name.items():
        metrics[f"tool/{name}/calls"] = float(len(some))
        metrics[f"tool/{name}/failures"] = float(sum(call.failure is not None for call in some))
        metrics[f"time/tool_{name}_p95_s"] = float(np.percentile([call.seconds for call in some], 95))
    return metrics

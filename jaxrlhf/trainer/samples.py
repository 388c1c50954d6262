"""Samples of a step: human-readable records for `samples.jsonl` and the console."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from jaxrlhf.batch import Array, RolloutBatch
from jaxrlhf.conversations.images import as_readable_text
from jaxrlhf.data.tokenizer import pieces_of
from jaxrlhf.dataflows.batches.episode_rows import sampled_lengths
from jaxrlhf.dataflows.batches.scored import ScoredRollout
from jaxrlhf.dataflows.step import value_of
from jaxrlhf.episode import EpisodeRecord
from jaxrlhf.tracking import Sample
from jaxrlhf.workers.reward import response_texts


def to_samples(
    step: int,
    collected: ScoredRollout,
    decode: Callable[[Sequence[int]], str],
    *,
    logp_BT: Array | None = None,
    entropy_BT: Array | None = None,
    with_tokens: int = 0,
) -> list[Sample]:
    """Make one record for each response or episode, prompt-major.

    Args:
      decode: Token ids to text.
      logp_BT: The trainer's log-probabilities of the rollout's rows, to compare with the sampler's.
      entropy_BT: Entropies of the rollout's first rows.
      with_tokens: Number of responses or episodes, from the first, whose tokens are recorded one by one.
    """
    rollout, scores, problems = value_of(collected.rollout), value_of(collected.scores), collected.problems
    mask_BT = np.asarray(rollout.sequences.mask_BT)
    gap_BT = np.zeros(mask_BT.shape)
    if logp_BT is not None:
        gap_BT = np.where(mask_BT, np.abs(np.asarray(logp_BT) - rollout.sampler_logp_BT), 0.0)
    episodes, texts = rollout.episodes, texts_of(collected, decode)
    start_E = np.arange(len(mask_BT)) if episodes is None else episodes.start_E
    records: list[EpisodeRecord | None] = [None] * len(mask_BT) if episodes is None else episodes.records
    (length_E, truncated_E), gap_E = sampled_lengths(rollout), np.add.reduceat(gap_BT.sum(axis=1), start_E)
    copies = len(texts) // len(problems)
    cuts = [slice(*cut) for cut in zip(start_E, [*start_E[1:], len(mask_BT)], strict=True)]
    tokens: list[dict[str, list[Any]] | None] = [None] * len(texts)
    tokens[:with_tokens] = [_tokens(rollout, cut, decode, logp_BT, entropy_BT) for cut in cuts[:with_tokens]]
    return [
        Sample(
            step=step,
            prompt=problems[row // copies].prompt,
            answer=problems[row // copies].answer,
            response=text,
            score=float(scores.score_B[row]) if scores.scorable_B[row] else None,
            parts={name: _or_none(part[row]) for name, part in scores.parts.items()},
            prompt_length=len(problems[row // copies].prompt_tokens),
            response_length=int(length_E[row]),
            truncated=bool(truncated_E[row]),
            logp_gap=None if logp_BT is None else float(gap_E[row] / max(length_E[row], 1)),
            episode=None if record is None else _episode(record),
            tokens=tokens[row],
        )
        for row, (text, record) in enumerate(zip(texts, records, strict=True))
    ]


def texts_of(collected: ScoredRollout, decode: Callable[[Sequence[int]], str]) -> list[str]:
    """Return the text of each response, or of the last reply of each episode."""
    rollout = value_of(collected.rollout)
    if rollout.episodes is not None:
        return [record.answer for record in rollout.episodes.records]
    return response_texts(rollout, decode)


def _tokens(
    rollout: RolloutBatch,
    rows: slice,
    decode: Callable[[Sequence[int]], str],
    logp_BT: Array | None,
    entropy_BT: Array | None,
) -> dict[str, list[Any]]:
    """Return the sampled tokens of some rows one by one: text, log-probability, gap to the sampler and entropy."""
    mask_BT = np.asarray(rollout.sequences.mask_BT)[rows]

    def chosen(array_BT: Array) -> np.ndarray:
        return np.asarray(array_BT)[rows][mask_BT]

    sampled = chosen(rollout.sampler_logp_BT)
    kept = {"logp": sampled}
    if logp_BT is not None:
        kept |= {"logp": chosen(logp_BT), "gap": chosen(logp_BT) - sampled}
    if entropy_BT is not None:
        kept["entropy"] = chosen(entropy_BT)
    text = pieces_of(chosen(rollout.sequences.token_BT).tolist(), decode)
    return {"text": text, **{name: [_brief(value) for value in values] for name, values in kept.items()}}


def _brief(value: float) -> float | None:
    """Round a number to three significant digits; None if it is not finite."""
    return float(f"{value:.3g}") if np.isfinite(value) else None


def _episode(record: EpisodeRecord) -> dict[str, Any]:
    """Return an episode's record for the file: messages, outcome of each turn, and stop cause."""
    turns = [
        {
            "reward": turn.reward,
            "policy_s": round(turn.policy_s, 3),
            "environment_s": round(turn.environment_s, 3),
            "calls": [{"name": call.name, "seconds": call.seconds, "failure": call.failure} for call in turn.calls],
            "malformed": [malformed.kind for malformed in turn.reply.malformed],
        }
        for turn in record.turns
    ]
    messages = [as_readable_text(message) for message in record.messages]
    return {"messages": messages, "turns": turns, "stop": record.stop, "failure": record.failure}


def _or_none(value: Any) -> float | None:
    return float(value) if np.isfinite(value) else None

"""Runs that are killed and resumed, beside runs that are not."""

from dataclasses import replace

from jaxrlhf.config import GRPO, Checkpointing, Config, KLInLoss
from scripts.real_model.runs import (
    Figures,
    Given,
    config_of,
    curve,
    digests,
    numbers,
    requests,
    rollout,
    scored_by_vowels,
    train,
)

STEPS, SAVED = 4, 2


def _config(given: Given, name: str, staleness: int) -> Config:
    return config_of(
        given,
        name,
        GRPO(responses_per_update=8, kl=KLInLoss(coefficient=0.01)),
        data=requests(given),
        rollout=rollout(4, 4, 16, staleness=staleness),
        rewards=scored_by_vowels(),
        checkpoint=Checkpointing(every_steps=SAVED, keep_last=3, keep_best=0),
        steps=STEPS,
    )


def _compare(given: Given, staleness: int) -> tuple[Config, Figures]:
    whole, cut = (_config(given, name, staleness) for name in ("whole", "cut"))
    train(whole)
    left = train(cut, killed_at=SAVED)
    train(replace(cut, resume=True))
    mine, theirs = digests(cut), digests(whole)
    samples = [(each.folder / "samples.jsonl").read_bytes() for each in (cut, whole)]
    return whole, {
        "steps": STEPS,
        "steps_before_kill": left,
        "metrics_equal": numbers(cut) == numbers(whole),
        "samples_equal": samples[0] == samples[1],
        "arrays": len(theirs),
        "arrays_equal": sum(mine.get(name) == digest for name, digest in theirs.items()),
        "weights_moved": curve(whole, "kl/ref")[-1],
    }


def killed(given: Given) -> Figures:
    """Kill a run of GRPO as it works, resume it, and compare all bits with a whole run's."""
    return _compare(given, 0)[1]


def stale(given: Given) -> Figures:
    """Do the same where each step learns from responses of the policy before."""
    whole, found = _compare(given, 1)
    return found | {
        "ages": curve(whole, "staleness/age_mean"),
        "sampler_kl": curve(whole, "sampler/kl"),
        "largest_weight": max(record.get("correction/weight_max", 1.0) for record in numbers(whole)),
    }

"""Mapping from the reward parts of the configuration to their functions and names."""

import dataclasses
import itertools
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from jaxrlhf import config
from jaxrlhf.rewards.endpoint import api_key
from jaxrlhf.rewards.formats import check_pattern
from jaxrlhf.rewards.protocol import Function
from jaxrlhf.rewards.sandbox.sandbox import Limits, check_sandbox

SCORE_METRICS = ("mean", "std")
"""Metrics of the total score, logged as `score/mean` and `score/std`; a part is logged as `score/<its name>`."""

ENVIRONMENT = "environment"
"""Name of the part that holds the rewards of an episode's environment."""


FUNCTIONS = {
    config.Gsm8kReward: "jaxrlhf.rewards.answers:gsm8k",
    config.ArithmeticReward: "jaxrlhf.rewards.answers:gsm8k",
    config.MathReward: "jaxrlhf.rewards.mathematics:same_answer",
    config.CodeReward: "jaxrlhf.rewards.sandbox.programs:passes",
    config.FormatReward: "jaxrlhf.rewards.formats:matches",
    config.TagsReward: "jaxrlhf.rewards.formats:tags",
    config.RepetitionReward: "jaxrlhf.rewards.lengths:repetition",
    config.CosineLengthReward: "jaxrlhf.rewards.lengths:cosine_length",
    config.JudgeReward: "jaxrlhf.rewards.judges:judged",
    config.RemoteReward: "jaxrlhf.rewards.remote:scored",
}
"""Reward function of each settings class; its keyword arguments have the names of the class's fields."""


def reward_function(name: str, part: config.RewardPart, *, workers: int) -> Function:
    """Return the function that computes a part of the configuration in `workers` processes.

    Raises:
      Refusal: The part cannot work on this machine, or its settings are invalid.
    """
    if isinstance(part, config.FunctionReward):
        return Function(name, part.function)
    settings = {field.name: getattr(part, field.name) for field in dataclasses.fields(part) if field.name != "weight"}
    if settings.get("api_key_env"):
        api_key(settings["api_key_env"])
    at_once = 1
    match part:
        case config.CodeReward():
            check_sandbox(Limits(part.time_limit_s, part.memory_bytes, part.output_bytes, part.allow_unsandboxed))
        case config.FormatReward():
            check_pattern(part.pattern)
        case config.CosineLengthReward():
            settings["correct"] = reward_function(name, part.correct, workers=workers)
        case config.JudgeReward():
            at_once = max(1, settings.pop("concurrency") // workers)
        case config.RemoteReward():
            at_once = settings.pop("batch_size")
    return Function(name, FUNCTIONS[type(part)], settings, at_once)


def part_names(parts: Sequence[config.RewardPart]) -> list[str]:
    """Return a short name for each part; repeated names, and names of the total score's metrics, get a number."""
    names: list[str] = []
    for part in parts:
        match part:
            case config.FunctionReward(function=reference):
                name = reference.rpartition(":")[2]
            case config.ModelReward(path=path):
                name = Path(path).name
            case _:
                name = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", type(part).__name__.removesuffix("Reward")).lower()
        numbered = (f"{name}_{n}" for n in itertools.count(2))
        taken = {*names, *SCORE_METRICS}
        names.append(name if name not in taken else next(other for other in numbered if other not in taken))
    return names


class NamedPart(NamedTuple):
    """Reward part with its name, and the only data source that the part scores; None scores the run's other sources."""

    name: str
    part: config.RewardPart
    source: str | None


def source_parts(
    parts: Sequence[config.RewardPart], sources: Mapping[str, Sequence[config.RewardPart]]
) -> list[NamedPart]:
    """Return all parts with their names; the name of a source's part is `<source>/<part>`."""
    named = [NamedPart(name, part, None) for name, part in zip(part_names(parts), parts, strict=True)]
    for source, own in sources.items():
        named += [NamedPart(f"{source}/{name}", part, source) for name, part in zip(part_names(own), own, strict=True)]
    return named


def first_part(rewards: config.Rewards) -> str:
    """Return the name of the part that defines accuracy: the first part, or without parts the environment's reward."""
    return part_names(rewards.parts)[0] if rewards.parts else ENVIRONMENT

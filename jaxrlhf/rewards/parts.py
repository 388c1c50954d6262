"""From a part of the configuration to the function that computes it, and to its name."""

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
"""Names of the whole score, logged as `score/mean` and `score/std`; a part is logged as `score/<its name>`."""

ENVIRONMENT = "environment"
"""Name of the part that an episode's environment pays."""


FUNCTIONS = {
    config.Gsm8kReward: "jaxrlhf.rewards.answers:gsm8k",
    config.ArithmeticReward: "jaxrlhf.rewards.answers:arithmetic",
    config.MathReward: "jaxrlhf.rewards.mathematics:same_answer",
    config.CodeReward: "jaxrlhf.rewards.sandbox.programs:passes",
    config.FormatReward: "jaxrlhf.rewards.formats:matches",
    config.TagsReward: "jaxrlhf.rewards.formats:tags",
    config.RepetitionReward: "jaxrlhf.rewards.lengths:repetition",
    config.CosineLengthReward: "jaxrlhf.rewards.lengths:cosine_length",
    config.JudgeReward: "jaxrlhf.rewards.judges:judged",
    config.RemoteReward: "jaxrlhf.rewards.remote:scored",
}
"""Their keyword arguments have the names of the part's fields."""


def reward_function(name: str, part: config.RewardPart, *, workers: int) -> Function:
    """The function that computes a part of the configuration in `workers` processes.

    Raises:
      Refusal: If it cannot work on this machine.
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
    """A short name for each part; repeated ones are numbered, and so are those of the whole score's metrics."""
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
    """A part of the configuration, its name, and the source whose responses alone it scores, if it is of one."""

    name: str
    part: config.RewardPart
    source: str | None


def source_parts(
    parts: Sequence[config.RewardPart], sources: Mapping[str, Sequence[config.RewardPart]]
) -> list[NamedPart]:
    """All parts, those of a source named after it too."""
    named = [NamedPart(name, part, None) for name, part in zip(part_names(parts), parts, strict=True)]
    for source, own in sources.items():
        named += [NamedPart(f"{source}/{name}", part, source) for name, part in zip(part_names(own), own, strict=True)]
    return named


def first_part(rewards: config.Rewards) -> str:
    """Name of the part that accuracy is measured by: the first, or what the environment pays if there is none."""
    return part_names(rewards.parts)[0] if rewards.parts else ENVIRONMENT

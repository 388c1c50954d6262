"""From a part of the configuration to the function that computes it, and to its name."""

import dataclasses
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxrlhf import config
from jaxrlhf.rewards.formats import check_pattern
from jaxrlhf.rewards.protocol import Function
from jaxrlhf.rewards.sandbox import Limits, check_sandbox

SCORE_METRICS = ("mean", "std")
"""Of the whole score, logged as `score/mean` and `score/std`; a part is logged as `score/<its name>`."""


def reward_function(name: str, part: config.RewardPart) -> Function:
    """The function that computes a part of the configuration; `ValueError` where it cannot work here."""
    match part:
        case config.Gsm8kReward(method=method):
            return Function(name, "jaxrlhf.rewards.answers:gsm8k", {"method": method})
        case config.ArithmeticReward():
            return Function(name, "jaxrlhf.rewards.answers:arithmetic")
        case config.MathReward():
            return Function(name, "jaxrlhf.rewards.mathematics:same_answer")
        case config.CodeReward():
            settings = _settings(part)
            names = ("memory_bytes", "output_bytes", "allow_unsandboxed")
            check_sandbox(Limits(part.time_limit_s, **{name: settings[name] for name in names}))
            return Function(name, "jaxrlhf.rewards.programs:passes", settings)
        case config.FormatReward(pattern=pattern):
            check_pattern(pattern)
            return Function(name, "jaxrlhf.rewards.formats:matches", {"pattern": pattern})
        case config.FunctionReward(function=reference):
            return Function(name, reference)
    raise ValueError(f"unknown kind of reward: {part!r}")


def _settings(part: config.RewardPart) -> dict[str, Any]:
    """The keyword arguments of a function that has the names of the part's fields."""
    return {field.name: getattr(part, field.name) for field in dataclasses.fields(part) if field.name != "weight"}


def part_names(parts: Sequence[config.RewardPart]) -> list[str]:
    """A short name for each part; repeated ones are numbered, and so are those of the whole score's metrics."""
    names: list[str] = []
    for part in parts:
        match part:
            case config.Gsm8kReward():
                name = "gsm8k"
            case config.ArithmeticReward():
                name = "arithmetic"
            case config.MathReward():
                name = "math"
            case config.CodeReward():
                name = "code"
            case config.FormatReward():
                name = "format"
            case config.FunctionReward(function=reference):
                name = reference.rpartition(":")[2]
            case config.ModelReward(path=path):
                name = Path(path).name
        numbered = (f"{name}_{n}" for n in itertools.count(2))
        taken = {*names, *SCORE_METRICS}
        names.append(name if name not in taken else next(other for other in numbered if other not in taken))
    return names

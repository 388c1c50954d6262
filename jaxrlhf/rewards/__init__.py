"""Text to score: rule-based, user-written and model-based rewards behind one small protocol.

Worker processes and users' reward files import this room, so it loads nothing heavy;
`Scorer`, which needs arrays, is resolved on first use.
"""

import importlib

from jaxrlhf.rewards.protocol import Failure, RewardFunction, RewardsFailing, batched

__all__ = ["Failure", "RewardFunction", "RewardsFailing", "Scorer", "batched"]


def __getattr__(name: str):
    if name == "Scorer":
        return importlib.import_module("jaxrlhf.rewards.scorer").Scorer
    raise AttributeError(f"module 'jaxrlhf.rewards' has no attribute {name!r}")

"""Every knob of a run: frozen dataclasses, and how a file and a command line become one.

A configuration is a Python file with `get_config() -> Config`. Knobs that count say what
they count. Building a `Config` refuses what contradicts itself, before anything compiles.
This room imports no JAX.
"""

from jaxrlhf.config.algorithms import (
    GRPO,
    PPO,
    SFT,
    AdaptiveKL,
    Aggregation,
    Algorithm,
    KLEstimator,
    KLInLoss,
    KLInReward,
    PolicyGradient,
    PolicyLoss,
    TruncatedImportance,
    ValueLoss,
)
from jaxrlhf.config.run import Checkpointing, ColdStart, Config, Evaluation
from jaxrlhf.config.sources import (
    Arithmetic,
    ArithmeticReward,
    Data,
    FormatReward,
    FromScratch,
    FunctionReward,
    Gsm8k,
    Gsm8kReward,
    Model,
    ModelReward,
    Pretrained,
    PromptFile,
    RewardPart,
    Rewards,
)
from jaxrlhf.config.training import Layout, Optimizer, Rollout, Sampling, Training

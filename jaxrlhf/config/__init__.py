"""Every knob of a run: frozen dataclasses, and how a file and a command line become one.

A configuration is a Python file with `get_config() -> Config`. Knobs that count say what
they count. Building a `Config` refuses what contradicts itself, before anything compiles.
This room imports no JAX.
"""

from jaxrlhf.config.algorithm import Algorithm, PolicyGradient
from jaxrlhf.config.cluster import RayCluster
from jaxrlhf.config.command_line import CommandLine, from_cli, on_cluster, run_command
from jaxrlhf.config.corrections import IcePop, Rejection, TruncatedImportance
from jaxrlhf.config.critic_free import (
    CISPO,
    DAPO,
    GPG,
    GRPO,
    GSPO,
    OPO,
    RLOO,
    SAPO,
    DrGRPO,
    OverlongPunishment,
    ReinforcePlusPlus,
    ReinforcePlusPlusBaseline,
    ReMax,
)
from jaxrlhf.config.distillation import Distillation
from jaxrlhf.config.load import load, shipped
from jaxrlhf.config.lora import Lora, Quantization
from jaxrlhf.config.losses import AdaptiveKL, Aggregation, KLEstimator, KLInLoss, KLInReward, ValueLoss
from jaxrlhf.config.override import override
from jaxrlhf.config.placement import CRITICS, ROLLOUT, Pool, offloaded
from jaxrlhf.config.policy_losses import CISPOLoss, GSPOLoss, PolicyLoss, RatioLoss, SAPOLoss
from jaxrlhf.config.ppo import PPO
from jaxrlhf.config.preference import DPO, IPO, RPO, CostModel, Preference, RewardModel
from jaxrlhf.config.prime import PRIME
from jaxrlhf.config.record import to_json
from jaxrlhf.config.rewards import (
    ArithmeticReward,
    CodeReward,
    CosineLengthReward,
    FormatReward,
    FunctionReward,
    Gsm8kReward,
    JudgeReward,
    MathReward,
    ModelReward,
    RemoteReward,
    RepetitionReward,
    RewardPart,
    Rewards,
    TagsReward,
)
from jaxrlhf.config.run import Checkpointing, ColdStart, Config, Evaluation
from jaxrlhf.config.safe_rlhf import Constraint, Ptx, SafeRLHF
from jaxrlhf.config.sources import (
    Arithmetic,
    ArithmeticPairs,
    Data,
    FromScratch,
    Gsm8k,
    Model,
    Nnx,
    PairFile,
    Pretrained,
    PromptFile,
)
from jaxrlhf.config.supervised import SFT
from jaxrlhf.config.training import Layout, Optimizer, Remat, Rollout, Sampling, Training
from jaxrlhf.config.vapo import VAPO

__all__ = [
    "CISPO",
    "CRITICS",
    "DAPO",
    "DPO",
    "GPG",
    "GRPO",
    "GSPO",
    "IPO",
    "OPO",
    "PPO",
    "PRIME",
    "RLOO",
    "ROLLOUT",
    "RPO",
    "SAPO",
    "SFT",
    "VAPO",
    "AdaptiveKL",
    "Aggregation",
    "Algorithm",
    "Arithmetic",
    "ArithmeticPairs",
    "ArithmeticReward",
    "CISPOLoss",
    "Checkpointing",
    "CodeReward",
    "ColdStart",
    "CommandLine",
    "Config",
    "Constraint",
    "CosineLengthReward",
    "CostModel",
    "Data",
    "Distillation",
    "DrGRPO",
    "Evaluation",
    "FormatReward",
    "FromScratch",
    "FunctionReward",
    "GSPOLoss",
    "Gsm8k",
    "Gsm8kReward",
    "IcePop",
    "JudgeReward",
    "KLEstimator",
    "KLInLoss",
    "KLInReward",
    "Layout",
    "Lora",
    "MathReward",
    "Model",
    "ModelReward",
    "Nnx",
    "Optimizer",
    "OverlongPunishment",
    "PairFile",
    "PolicyGradient",
    "PolicyLoss",
    "Pool",
    "Preference",
    "Pretrained",
    "PromptFile",
    "Ptx",
    "Quantization",
    "RatioLoss",
    "RayCluster",
    "ReMax",
    "ReinforcePlusPlus",
    "ReinforcePlusPlusBaseline",
    "Rejection",
    "Remat",
    "RemoteReward",
    "RepetitionReward",
    "RewardModel",
    "RewardPart",
    "Rewards",
    "Rollout",
    "SAPOLoss",
    "SafeRLHF",
    "Sampling",
    "TagsReward",
    "Training",
    "TruncatedImportance",
    "ValueLoss",
    "from_cli",
    "load",
    "offloaded",
    "on_cluster",
    "override",
    "run_command",
    "shipped",
    "to_json",
]

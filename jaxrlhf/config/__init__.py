"""Settings of a run: frozen dataclasses, and functions that load them from a file and override them.

A configuration is a Python file with `get_config() -> Config`. Settings that are counts name what they count in their
help. `load`, `override` and `run` raise `Refusal` for contradictory settings, before anything compiles. This package
imports no JAX.
"""

from jaxrlhf.config.algorithms.algorithm import Algorithm, PolicyGradient
from jaxrlhf.config.algorithms.critic_free import (
    CISPO,
    DAPO,
    GMPO,
    GPG,
    GRPO,
    GSPO,
    OPO,
    RLOO,
    SAPO,
    DrGRPO,
    GroupCompared,
    GRPOPassK,
    OnlineDPO,
    OverlongPunishment,
    ReinforcePlusPlus,
    ReinforcePlusPlusBaseline,
    ReMax,
)
from jaxrlhf.config.algorithms.distillation import Distillation
from jaxrlhf.config.algorithms.ppo import PPO, VAPO
from jaxrlhf.config.algorithms.preference import (
    CPO,
    DPO,
    IPO,
    KTO,
    ORPO,
    RPO,
    CostModel,
    Preference,
    ReferenceFree,
    RewardModel,
    SimPO,
)
from jaxrlhf.config.algorithms.prime import PRIME
from jaxrlhf.config.algorithms.safe_rlhf import Constraint, Ptx, SafeRLHF
from jaxrlhf.config.algorithms.supervised import SFT, ColdStart
from jaxrlhf.config.checks.contradictions import checked
from jaxrlhf.config.cli.command_line import CommandLine, on_cluster, run_command
from jaxrlhf.config.cli.load import load, load_module, to_json
from jaxrlhf.config.cli.override import override
from jaxrlhf.config.cluster import RayCluster
from jaxrlhf.config.environments import Agent, AnyEnvironment, Environment, EnvironmentByRecord, Episodes, Tools
from jaxrlhf.config.lora import Lora, Quantization
from jaxrlhf.config.losses import (
    AdaptiveKL,
    Aggregation,
    CISPOLoss,
    DPPOLoss,
    DROLoss,
    GMPOLoss,
    GSPOLoss,
    IcePop,
    KLEstimator,
    KLInLoss,
    KLInReward,
    PolicyLoss,
    RatioLoss,
    Rejection,
    SAPOLoss,
    TruncatedImportance,
    ValueLoss,
)
from jaxrlhf.config.mixtures import Data, Evaluation, EvaluationSet, Mixture, Selection, Source
from jaxrlhf.config.named_functions import function_of, shipped
from jaxrlhf.config.placement import ROLLOUT, Pool, offloaded
from jaxrlhf.config.refusal import Refusal
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
    ProcessModelReward,
    RemoteReward,
    RepetitionReward,
    RewardPart,
    Rewards,
    TagsReward,
)
from jaxrlhf.config.roles import RoleSpec
from jaxrlhf.config.run import COLD_START, Config
from jaxrlhf.config.saved import Checkpointing, Stall, TokenRecords
from jaxrlhf.config.serving import RolloutServer
from jaxrlhf.config.sources import (
    Arithmetic,
    ArithmeticPairs,
    DataSet,
    FromScratch,
    Generated,
    Gsm8k,
    HubData,
    HubPairs,
    HubSteps,
    Model,
    Nnx,
    PairFile,
    Pretrained,
    PromptFile,
    Shapes,
    StepFile,
    Tower,
)
from jaxrlhf.config.training import Layout, Optimizer, ParameterGroup, Remat, Rollout, Sampling, Training

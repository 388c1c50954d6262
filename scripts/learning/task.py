"""Task for showing that an algorithm learns: the prompt is three digits, the answer is the first digit.

    <|user|>385<|assistant|>3

All runs except supervised training start from a policy that answers the first digit or, more often, the last digit.
An algorithm only has to learn that the first digit is better. The slow tests and `algorithms.py` use this task.
"""

import itertools
import json
import random
from pathlib import Path
from typing import Any

import jaxrlhf
from jaxrlhf.config import (
    CISPO,
    CPO,
    DAPO,
    DPO,
    GMPO,
    GPG,
    GRPO,
    GSPO,
    IPO,
    KTO,
    OPO,
    ORPO,
    PPO,
    PRIME,
    RLOO,
    RPO,
    SAPO,
    SFT,
    VAPO,
    Algorithm,
    Checkpointing,
    Config,
    CostModel,
    DPPOLoss,
    DrGRPO,
    DROLoss,
    Evaluation,
    FormatReward,
    FromScratch,
    GRPOPassK,
    Gsm8kReward,
    Model,
    OnlineDPO,
    Optimizer,
    PairFile,
    PolicyGradient,
    Preference,
    Pretrained,
    PromptFile,
    ReinforcePlusPlus,
    ReinforcePlusPlusBaseline,
    ReMax,
    RewardModel,
    Rewards,
    Rollout,
    SimPO,
    Training,
    load_module,
)
from jaxrlhf.trainer.policy import export_policy

STEPS = 30
"""Number of steps of an algorithm that generates: 8 problems x 8 responses and one update each."""

HELD_OUT = 64
TINY = FromScratch(hidden_size=32, intermediate_size=64, num_layers=1, num_heads=4, num_kv_heads=4, head_dim=8)


def training(learning_rate: float, **settings: Any) -> Training:
    """Return training settings for a model as small as `TINY`."""
    optimizer = Optimizer(learning_rate=learning_rate, weight_decay=0.0, **settings)
    return Training(optimizer, tokens_per_microbatch=1024, remat="none")


def generating() -> dict[str, PolicyGradient]:
    """Return the algorithms that learn from scores of generated responses, by name."""
    grouped = (GRPO, DrGRPO, DAPO, GSPO, CISPO, SAPO, RLOO, OPO, GPG)
    others = (ReinforcePlusPlus, ReinforcePlusPlusBaseline, ReMax)
    critic = training(5e-3)
    with_critic = {"PPO": PPO(critic=critic), "VAPO": VAPO(critic=critic, critic_warmup_steps=4, length_scale=2.0)}
    process = PRIME(process_reward=training(3e-4), gamma=0.0, least_accuracy=0.0, most_accuracy=1.0)
    return with_critic | {kind.__name__: kind() for kind in (*grouped, *others)} | {"PRIME": process}


def from_pairs() -> dict[str, Preference]:
    """Return the algorithms that learn from preference pairs, by name."""
    critic = training(5e-3, decay="linear")
    judges = (RewardModel(pairs_per_update=64, critic=critic), CostModel(pairs_per_update=64, critic=critic))
    every: tuple[Preference, ...] = (DPO(), IPO(), RPO(), *judges)
    return {type(one).__name__: one for one in every}


def further() -> dict[str, Algorithm]:
    """Return further algorithms and losses by name; they are trained from one seed only."""
    losses = (DPPOLoss(), DPPOLoss(divergence="kl", limit_low=0.05, limit_high=0.05), DROLoss())
    by_loss = {f"GRPO, {one}": GRPO(policy=one) for one in losses}
    maxrl, gdpo, otb, luffy = map(load_module, ("maxrl", "gdpo", "otb", "luffy"))
    clip_cov, kl_cov = map(load_module, ("clip_cov", "kl_cov"))
    groups = (GMPO, GRPOPassK, OnlineDPO, luffy.LUFFY, maxrl.MaxRL, gdpo.GDPO, otb.OptimalTokenBaseline)
    covariances = (clip_cov.ClipCov(share=0.02, covariance_low=0.0), kl_cov.KLCov(share=0.02))
    nash = load_module("nash_md").NashMD(beta=0.01, preference="higher")
    pairs = (KTO(), SimPO(), CPO(), ORPO(odds_coefficient=1.0))
    others = (*(kind() for kind in groups), *covariances, nash, *pairs)
    return {type(one).__name__: one for one in others} | by_loss


def write_records(folder: Path) -> Path:
    """Write the problems of both splits, each with the answer, a guess and a wrong answer; return the folder."""
    rng = random.Random(0)
    prompts = ["".join(digits) for digits in itertools.permutations("0123456789", 3)]
    rng.shuffle(prompts)
    records = [
        {
            "prompt": prompt,
            "answer": prompt[0],
            "guess": rng.choices(prompt, weights=(1, 0, 2))[0],
            "wrong": rng.choice(prompt[1:]),
            "answer_is_safe": True,
            "wrong_is_safe": False,
        }
        for prompt in prompts
    ]
    for split, part in (("evaluation", records[:HELD_OUT]), ("train", records[HELD_OUT:])):
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(record) + "\n" for record in part))
    return folder


def task(folder: Path, algorithm: Algorithm, model: Model, *, solution: str | None = None, **changes: Any) -> Config:
    """Return the configuration of a run on the records of a folder.

    Args:
      solution: Record field that supervised training imitates.
    """
    files: dict[str, Any] = {"train": str(folder / "train.jsonl"), "evaluation": str(folder / "evaluation.jsonl")}
    settings: dict[str, Any] = {
        "name": type(algorithm).__name__,
        "steps": STEPS,
        "data": PromptFile(**files, solution_key=solution),
        "rewards": Rewards(parts=(Gsm8kReward(method="flexible"),), workers=1),
        "rollout": Rollout(prompts_per_step=8, responses_per_prompt=8, max_prompt_tokens=8, max_response_tokens=4),
        "actor": training(4e-3),
        "evaluation": Evaluation(every_steps=0, problems=HELD_OUT),
        "checkpoint": Checkpointing(every_steps=0, keep_best=0),
        "compute_dtype": "float32",
        "devices": 1,
    }
    if isinstance(algorithm, Preference):
        safe = ("answer_is_safe", "wrong_is_safe") if isinstance(algorithm, CostModel) else None
        pairs = PairFile(**files, chosen_key="answer", rejected_key="wrong", safe_keys=safe)
        settings |= {"data": pairs, "rewards": Rewards()}
    if isinstance(algorithm, load_module("luffy").LUFFY):  # a group includes a solution of the record
        settings["data"] = PromptFile(**files, solution_key="answer")
    if isinstance(algorithm, load_module("gdpo").GDPO):  # the second reward checks that there is a digit
        settings["rewards"] = Rewards((Gsm8kReward(method="flexible"), FormatReward(r"\d", weight=0.1)), workers=1)
    if isinstance(algorithm, RewardModel | load_module("process_reward_model").ProcessRewardModel):
        # The algorithm has no actor, and learns to compare tokens.
        settings |= {"rewards": Rewards(), "actor": Training(), "steps": 150}
    return Config(algorithm=algorithm, model=model, **settings | changes)


def supervised(folder: Path, solution: str, *, model: Model = TINY, **changes: Any) -> Config:
    """Return the configuration of supervised training on a record field, by default from random weights."""
    settings = {"steps": 100, "actor": training(5e-3)} | changes
    return task(folder, SFT(examples_per_update=64), model, solution=solution, **settings)


def exported(folder: Path, solution: str, *, seed: int, **changes: Any) -> Pretrained:
    """Run `supervised` and return its exported policy."""
    name = f"{solution}_{seed}"
    jaxrlhf.run(supervised(folder, solution, seed=seed, workdir=str(folder / f"{name}_run"), **changes))
    export_policy(folder / f"{name}_run", folder / name)
    return Pretrained(str(folder / name))

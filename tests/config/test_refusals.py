"""Settings that mean nothing, or contradict each other, are refused with the reason."""

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from jaxrlhf.config import (
    DPO,
    GRPO,
    GSPO,
    PPO,
    SFT,
    Agent,
    Arithmetic,
    ArithmeticPairs,
    ArithmeticReward,
    Checkpointing,
    CISPOLoss,
    ColdStart,
    Config,
    Constraint,
    CostModel,
    Environment,
    EnvironmentByRecord,
    Evaluation,
    EvaluationSet,
    FormatReward,
    FromScratch,
    FunctionReward,
    Generated,
    GSPOLoss,
    HubData,
    IcePop,
    Layout,
    Mixture,
    ModelReward,
    Optimizer,
    PairFile,
    ParameterGroup,
    PolicyLoss,
    PromptFile,
    Ptx,
    Rejection,
    RewardModel,
    Rewards,
    Rollout,
    SafeRLHF,
    Sampling,
    Selection,
    Source,
    StepFile,
    TokenRecords,
    Tools,
    Training,
    TruncatedImportance,
    checked,
)


def a_config(**changes) -> Config:
    settings = {"name": "test", "model": FromScratch(), "data": Arithmetic(), "algorithm": PPO(), "steps": 10}
    return checked(Config(**{**settings, **changes}))


MIXED = Mixture((Source(name="a", data=Arithmetic()), Source(name="b", data=Arithmetic(), rewards=(FormatReward(),))))
COSTS = Rewards(parts=(ArithmeticReward(), FormatReward(weight=0.0), FormatReward()))
TOOLS = Tools(functions=("tools.py:calculator",))
FURTHER = Evaluation(sets=(EvaluationSet(name="further", data=Arithmetic()),))

# Each setting refuses what it cannot mean.


def test_setting_refuses(refused):
    for build in [
        lambda: a_config(steps=0),
        lambda: a_config(seed=-1),
        *[lambda name=name: a_config(name=name) for name in ("", " ", "..", "a/b", "a\\b")],
        lambda: a_config(steps="3"),
        lambda: a_config(steps=True),
        lambda: a_config(model="Qwen"),
        lambda: a_config(compute_dtype="fp8"),
        lambda: a_config(workdir=Path("runs")),
        lambda: a_config(resume=1),
        lambda: a_config(rewards=Rewards(parts=[ArithmeticReward()])),
        lambda: a_config(rewards=Rewards(parts=(ArithmeticReward(weight="1"),))),
        lambda: Optimizer(learning_rate=np.float32(1e-3)),
        lambda: Optimizer(learning_rate=float("nan")),
        lambda: Optimizer(learning_rate=float("inf")),
        lambda: Optimizer(eps=float("inf")),
        lambda: Optimizer(beta1=-0.1),
        lambda: Optimizer(beta2=1.0),
        lambda: Layout(context=2, stage=2),
        lambda: FromScratch(experts=2, experts_per_token=3),
        lambda: Layout(data=0),
        lambda: Sampling(temperature=0),
        lambda: Sampling(ignore_eos=True, stop_tokens=("x", "y")),
        lambda: Sampling(stop_tokens=("</answer>", "")),
        lambda: Sampling(top_p=0),
        lambda: Rollout(max_response_tokens=8, sampling=Sampling(min_tokens=9)),
        lambda: Arithmetic(difficulty=6),
        lambda: Arithmetic(difficulty="2"),
        lambda: Rewards(timeout_s=math.inf),
        lambda: FunctionReward(function="score"),
        *[lambda weight=weight: ArithmeticReward(weight=weight) for weight in (math.nan, math.inf)],
        lambda: PolicyLoss(entropy_coefficient=math.nan),
        lambda: PolicyLoss(clip_low=0),
        lambda: PolicyLoss(clip_low=1.1),
        lambda: PolicyLoss(dual_clip=1),
        lambda: IcePop(low=1.5),
        lambda: Rejection(low=0.1),
        lambda: GSPOLoss(aggregation="token-mean"),
        lambda: CISPOLoss(ratio_high=0.5),
        lambda: PPO(gamma=1.1),
    ]:
        with refused():
            build()


def test_setting_refuses_what_would_have_no_effect_or_another(refused):
    for build in [
        lambda: a_config(workdir=""),
        lambda: a_config(actor=Training(optimizer=Optimizer(groups=(ParameterGroup("embed", layers=(0, 1, 2)),)))),
        lambda: Constraint(largest_multiplier=math.inf),
        lambda: Selection(band=(0.1, 0.9)),
        lambda: EvaluationSet(name="a", data=Arithmetic(), sampling=Sampling(temperature=0.5)),
        lambda: EvaluationSet(name="a", data=Arithmetic(), samples=4, sampling=Sampling(greedy=True)),
        lambda: Ptx(data=HubData("me/prompts")),
        lambda: Ptx(data=StepFile("steps.jsonl")),
    ]:
        with refused():
            build()


def test_environment_refuses(refused):
    for build in [
        lambda: Tools(),
        lambda: Tools(functions=("calculator",)),
        lambda: Environment(factory="Maze"),
        lambda: Agent(program=""),
        lambda: EnvironmentByRecord("kind", ()),
        lambda: EnvironmentByRecord("kind", (TOOLS, TOOLS)),
        lambda: Generated("records"),
        lambda: Generated("records.py:records", arguments=("tokens 16",)),
    ]:
        with refused():
            build()


# Settings that contradict each other are refused together.


def test_contradiction_is_refused(refused):
    for changes in [
        {"rollout": Rollout(prompts_per_step=60)},
        {"algorithm": PPO(responses_per_update=32, old_logp="sampler")},
        {"algorithm": PPO(epochs_per_step=3, old_logp="sampler")},
        {"algorithm": PPO(old_logp="sampler", correction=TruncatedImportance())},
        {"algorithm": PPO(old_logp="sampler", rejection=(Rejection(),))},
        {"algorithm": PPO(old_logp="bypass", correction=IcePop())},
        {"algorithm": GRPO()},
        {"actor": Training(tokens_per_microbatch=1023)},
        {"algorithm": PPO(critic=Training(tokens_per_microbatch=1023))},
        {"algorithm": PPO(critic_warmup_steps=10)},
        {"profile_steps": (10, 11, 0)},
        {"algorithm": SFT(), "cold_start": ColdStart(steps=3)},
        {"algorithm": SFT(), "data": PromptFile("train.jsonl")},
        {"cold_start": ColdStart(steps=3), "data": PromptFile("train.jsonl")},
        {"cold_start": ColdStart(steps=3, max_prompt_tokens=513)},
        {"data": PromptFile("train.jsonl", answer_key=None)},
        *[
            {"rollout": Rollout(sampling=Sampling(**{name: value}))}
            for name, value in {"greedy": True, "top_p": 0.9, "top_k": 65, "min_tokens": 2}.items()
        ],
        {"rewards": Rewards(parts=(FormatReward(weight=0), ArithmeticReward(weight=0.0)))},
        {"rewards": Rewards(parts=())},
        {"rewards": Rewards(parts=()), "environment": TOOLS},
        {"data": Mixture((Source(name="a", data=Arithmetic(), rewards=(FormatReward(weight=0.0),)),))},
        {"algorithm": RewardModel(), "data": ArithmeticPairs(), "evaluation": FURTHER},
        {"algorithm": SFT(), "selection": Selection(online=True), "token_records": TokenRecords(entropy=True)},
        {"algorithm": DPO(), "data": PairFile("pairs.jsonl", margin_key="margin", safe_keys=("good", "bad"))},
        {"algorithm": CostModel(), "data": PairFile("pairs.jsonl", margin_key="margin", safe_keys=("good", "bad"))},
        {"environment": TOOLS, "algorithm": DPO()},
        {"environment": TOOLS, "rollout": Rollout(replay_routing=True)},
        *[
            {"environment": replace(TOOLS, history="as_templated"), "algorithm": one, "rollout": Rollout(64, 4)}
            for one in (GSPO(), GRPO(policy=GSPOLoss()))
        ],
        {"algorithm": PPO(actions="turns")},
        {"algorithm": SafeRLHF(), "data": MIXED, "rewards": COSTS},
        {"checkpoint": Checkpointing(every_steps=15, keep_best=1), "evaluation": Evaluation(every_steps=10)},
    ]:
        with refused():
            a_config(**changes)


def test_a_file_without_answers_can_be_scored_otherwise():
    a_config(data=PromptFile("train.jsonl", answer_key=None), rewards=Rewards(parts=(FormatReward(),)))
    a_config(data=PromptFile("train.jsonl", answer_key=None, solution_key="solution"), algorithm=SFT())


def test_what_is_no_contradiction():
    judged = Rewards(parts=(ArithmeticReward(), ModelReward("costs", weight=0.0)))
    assert a_config(algorithm=SafeRLHF(), data=MIXED, rewards=judged).algorithm.constraint.part == 1
    sampled = Sampling(temperature=0.7, stop_tokens=("x",))
    a_config(rollout=Rollout(sampling=sampled), algorithm=PPO(policy=PolicyLoss(clip_low=1.0)))
    a_config(rollout=Rollout(sampling=Sampling(greedy=True)), algorithm=SFT())
    a_config(algorithm=DPO(), data=ArithmeticPairs(), evaluation=FURTHER)
    paying = Environment(factory="games.py:Maze")
    for parts in ((), (FormatReward(weight=0.0),)):  # such a part is only measured
        a_config(environment=paying, rewards=Rewards(parts))
    for saved, evaluated, best in ((20, 10, 1), (15, 10, 0), (0, 10, 1), (15, 0, 1)):
        saving = Checkpointing(every_steps=saved, keep_best=best)
        a_config(checkpoint=saving, evaluation=Evaluation(every_steps=evaluated))


def test_a_cold_start_is_free_of_what_a_rollout_is_told():
    sampled = Rollout(replay_routing=True, quantize="int8", sampling=Sampling(top_k=8))
    settings = {"rollout": sampled, "algorithm": PPO(correction=IcePop()), "token_records": TokenRecords(entropy=True)}
    first, second = a_config(
        **settings, selection=Selection(online=True, band=(0.1, 0.9)), cold_start=ColdStart(1)
    ).phases
    assert (first.rollout.width, first.selection.online) == (second.rollout.width, False)


@pytest.mark.parametrize(
    ("settings", "saved", "best"),
    [
        ({}, 20, 1),
        ({"evaluation": Evaluation(every_steps=3)}, 21, 1),
        ({"evaluation": Evaluation(every_steps=50)}, 50, 1),
        ({"evaluation": Evaluation(every_steps=0)}, 20, 1),
        ({"checkpoint": Checkpointing(every_steps=15)}, 15, 0),
        ({"checkpoint": Checkpointing(every_steps=0)}, 0, 1),
        ({"checkpoint": Checkpointing(keep_best=2), "evaluation": Evaluation(every_steps=7)}, 21, 2),
        ({"checkpoint": Checkpointing(every_steps=30), "evaluation": Evaluation(every_steps=10)}, 30, 1),
    ],
)
def test_checkpoints_fall_on_evaluated_steps_unless_they_are_told_otherwise(settings, saved, best):
    saving = a_config(**settings).saving
    assert (saving.every_steps, saving.keep_best, saving.keep_last) == (saved, best, 2)

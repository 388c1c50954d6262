"""Configurations: files, overrides by name, and every refusal with its message."""

import dataclasses
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

import pytest

from jaxrlhf.config import (
    GRPO,
    PPO,
    SFT,
    AdaptiveKL,
    Algorithm,
    Arithmetic,
    ArithmeticReward,
    Checkpointing,
    ColdStart,
    Config,
    Evaluation,
    FormatReward,
    FromScratch,
    FunctionReward,
    KLInLoss,
    KLInReward,
    Layout,
    Optimizer,
    PolicyLoss,
    Pretrained,
    PromptFile,
    Rewards,
    Rollout,
    Sampling,
    Training,
    TruncatedImportance,
    ValueLoss,
    load,
    override,
    shipped,
    to_json,
)

CONFIG_FILE = """
from jaxrlhf.config import *

def get_config():
    return Config(
        name="mine",
        model=FromScratch(),
        data=Arithmetic(),
        algorithm=GRPO(),
        rollout=Rollout(responses_per_prompt=4),
        steps={steps},
    )
"""


def a_config(**changes) -> Config:
    settings = {"name": "test", "model": FromScratch(), "data": Arithmetic(), "algorithm": PPO(), "steps": 10}
    return Config(**{**settings, **changes})


def refused(message: str):
    return pytest.raises(ValueError, match="^" + re.escape(message))


# Each setting refuses what it cannot mean.


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: a_config(steps=0), "Config.steps must be above 0, got 0"),
        (lambda: a_config(steps="3"), "Config.steps must be int, got '3'"),
        (lambda: a_config(steps=True), "Config.steps must be int, got True"),
        (lambda: a_config(model="Qwen"), "Config.model must be FromScratch or Pretrained, got 'Qwen'"),
        (lambda: a_config(compute_dtype="fp8"), "Config.compute_dtype must be one of 'auto', 'float32', 'bfloat16'"),
        (lambda: a_config(workdir=Path("runs")), "Config.workdir must be str or None, got"),
        (lambda: a_config(resume=1), "Config.resume must be True or False, got 1"),
        (lambda: a_config(devices=0), "Config.devices must be above 0 or None, got 0"),
        (
            lambda: a_config(rewards=Rewards(parts=[ArithmeticReward()])),
            "Config.rewards.parts must be a tuple of Gsm8kReward or",
        ),
        (
            lambda: a_config(rewards=Rewards(parts=(ArithmeticReward(weight="1"),))),
            "Config.rewards.parts.0.weight must be float, got '1'",
        ),
        (lambda: Optimizer(learning_rate=0), "Optimizer.learning_rate must be above 0, got 0"),
        (lambda: Optimizer(learning_rate="1e-3"), "Optimizer.learning_rate must be above 0, got '1e-3'"),
        (lambda: Optimizer(learning_rate=float("nan")), "Optimizer.learning_rate must be above 0, got nan"),
        (lambda: Optimizer(warmup_updates=-1), "Optimizer.warmup_updates must be 0 or more, got -1"),
        (lambda: Optimizer(weight_decay=-0.1), "Optimizer.weight_decay must be 0 or more, got -0.1"),
        (lambda: Training(tokens_per_microbatch=0), "Training.tokens_per_microbatch must be above 0, got 0"),
        (lambda: Layout(fsdp=0), "Layout.fsdp must be above 0, got 0"),
        (lambda: Layout(data=0), "Layout.data must be above 0 or None, got 0"),
        (
            lambda: Layout(tensor=6, generation_tensor=4),
            "Layout.generation_tensor=4 does not divide tensor=6; pick from [1, 2, 3, 6]",
        ),
        (
            lambda: Sampling(temperature=0),
            "Sampling.temperature must be above 0, got 0; for argmax decoding",
        ),
        (lambda: Sampling(top_p=0), "Sampling.top_p must be in (0, 1], got 0"),
        (lambda: Sampling(top_k=-1), "Sampling.top_k must be 0 (off) or more, got -1"),
        (lambda: Sampling(min_tokens=-1), "Sampling.min_tokens must be 0 or more, got -1"),
        (lambda: Rollout(prompts_per_step=0), "Rollout.prompts_per_step must be above 0, got 0"),
        (lambda: Rollout(slots=0), "Rollout.slots must be above 0 or None, got 0"),
        (
            lambda: Rollout(max_response_tokens=8, sampling=Sampling(min_tokens=9)),
            "Sampling.min_tokens=9 is above max_response_tokens=8",
        ),
        (lambda: FromScratch(num_layers=0), "FromScratch.num_layers must be above 0, got 0"),
        (lambda: Arithmetic(difficulty=6), "Arithmetic.difficulty must be in [1, 5], got 6"),
        (lambda: Arithmetic(difficulty="2"), "Arithmetic.difficulty must be in [1, 5], got '2'"),
        (lambda: Rewards(parts=()), "Rewards.parts is empty; name at least one reward"),
        (lambda: Rewards(timeout_s=0), "Rewards.timeout_s must be above 0, got 0"),
        (lambda: FunctionReward(function="score"), "FunctionReward.function must be 'module:function' or"),
        (lambda: AdaptiveKL(horizon=0), "AdaptiveKL.horizon must be above 0, got 0"),
        (lambda: KLInReward(coefficient=0), "KLInReward.coefficient must be above 0, got 0"),
        (lambda: KLInLoss(coefficient=-1), "KLInLoss.coefficient must be above 0, got -1"),
        (lambda: PolicyLoss(clip_low=0), "PolicyLoss.clip_low must be above 0, got 0"),
        (lambda: PolicyLoss(dual_clip=1), "PolicyLoss.dual_clip must be above 1 or None, got 1"),
        (lambda: ValueLoss(clip=0), "ValueLoss.clip must be above 0, got 0"),
        (lambda: TruncatedImportance(cap=0), "TruncatedImportance.cap must be above 0, got 0"),
        (lambda: PPO(gamma=1.1), "PPO.gamma must be in [0.0, 1.0], got 1.1"),
        (lambda: PPO(lam=-0.1), "PPO.lam must be in [0.0, 1.0], got -0.1"),
        (lambda: PPO(critic_warmup_steps=-1), "PPO.critic_warmup_steps must be 0 or more, got -1"),
        (lambda: GRPO(epochs_per_step=0), "GRPO.epochs_per_step must be above 0, got 0"),
        (lambda: SFT(examples_per_update=0), "SFT.examples_per_update must be above 0, got 0"),
        (lambda: ColdStart(steps=0), "ColdStart.steps must be above 0, got 0"),
        (lambda: Evaluation(every_steps=-1), "Evaluation.every_steps must be 0 or more, got -1"),
        (lambda: Evaluation(problems=0), "Evaluation.problems must be above 0, got 0"),
        (lambda: Checkpointing(keep_last=0), "Checkpointing.keep_last must be above 0, got 0"),
        (lambda: Checkpointing(keep_best=-1), "Checkpointing.keep_best must be 0 or more, got -1"),
    ],
)
def test_setting_refuses(build, message):
    with refused(message):
        build()


# Settings that contradict each other are refused together.


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"rollout": Rollout(prompts_per_step=60)},
            "algorithm.responses_per_update=64 does not divide the 60 responses of a step (60 prompts x 1); "
            "nearest that do: [20, 30, 60]",
        ),
        (
            {"algorithm": GRPO()},
            "GRPO compares the responses to one prompt: rollout.responses_per_prompt must be 2 or more, got 1",
        ),
        (
            {"actor": Training(tokens_per_microbatch=1023)},
            "actor.tokens_per_microbatch=1023 cannot hold one sequence of max_prompt_tokens + max_response_tokens = "
            "1024 tokens; raise it to at least 1024",
        ),
        (
            {"algorithm": PPO(critic=Training(tokens_per_microbatch=1023))},
            "algorithm.critic.tokens_per_microbatch=1023 cannot hold one sequence",
        ),
        (
            {"algorithm": PPO(critic_warmup_steps=10)},
            "algorithm.critic_warmup_steps=10 leaves no step of steps=10 to train the policy",
        ),
        (
            {"algorithm": SFT(), "cold_start": ColdStart(steps=3)},
            "cold_start before algorithm SFT is the same training twice",
        ),
        (
            {"algorithm": SFT(), "data": PromptFile("train.jsonl")},
            "algorithm SFT trains on worked solutions, and data.solution_key is None",
        ),
        (
            {"cold_start": ColdStart(steps=3), "data": PromptFile("train.jsonl")},
            "cold_start trains on worked solutions, and data.solution_key is None",
        ),
        (
            {"data": PromptFile("train.jsonl", answer_key=None)},
            "ArithmeticReward compares with a reference answer, and data.answer_key is None",
        ),
    ],
)
def test_contradiction_is_refused(changes, message):
    with refused(message):
        a_config(**changes)


def test_a_file_without_answers_can_be_scored_otherwise():
    a_config(data=PromptFile("train.jsonl", answer_key=None), rewards=Rewards(parts=(FormatReward(),)))
    a_config(data=PromptFile("train.jsonl", answer_key=None, solution_key="solution"), algorithm=SFT())


def test_settings_cannot_be_assigned():
    with pytest.raises(dataclasses.FrozenInstanceError):
        a_config().steps = 3


# Files.


@pytest.mark.parametrize("name", ["ppo_gsm8k", "ppo_gsm8k.py"])
def test_shipped_configuration_is_found_by_name(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert load(name).name == "ppo_gsm8k"


def test_a_path_comes_before_a_shipped_configuration(tmp_path, monkeypatch):
    (tmp_path / "ppo_gsm8k.py").write_text(CONFIG_FILE.format(steps=3))
    assert load("ppo_gsm8k").name == "ppo_gsm8k"
    monkeypatch.chdir(tmp_path)
    assert load("ppo_gsm8k").name == load("ppo_gsm8k.py").name == "mine"
    assert load(tmp_path / "ppo_gsm8k.py").steps == 3


def test_an_edited_file_is_read_again(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(CONFIG_FILE.format(steps=3))
    assert load(path).steps == 3
    path.write_text(CONFIG_FILE.format(steps=4))
    assert load(path).steps == 4


def test_a_file_may_build_on_another(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text("from jaxrlhf.config import *\ndef get_config(): return override(load('ppo_gsm8k'), {'steps': 3})")
    assert load(path) == override(load("ppo_gsm8k"), {"steps": 3})


def test_a_file_may_define_its_own_algorithm(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(
        "from __future__ import annotations\nfrom dataclasses import dataclass\nfrom jaxrlhf.config import *\n"
        "@dataclass(frozen=True)\nclass Mine(GRPO):\n    margin: float = 0.5\n"
        "def get_config():\n    return Config(name='mine', model=FromScratch(), data=Arithmetic(), steps=1,\n"
        "                  algorithm=Mine(), rollout=Rollout(responses_per_prompt=2))\n"
    )
    assert to_json(override(load(path), {"algorithm.margin": 1.5}).algorithm)["margin"] == 1.5


def test_unknown_name_lists_what_exists():
    with refused("no configuration 'ppo_gms8k.py': neither a file nor one of ") as refusal:
        load("ppo_gms8k.py")
    assert all(name in str(refusal.value) for name in shipped())
    assert str(refusal.value).endswith("did you mean ppo_gsm8k?")


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("x = 1", ": defines no get_config(); add `def get_config() -> Config:`"),
        ("def get_config(): return 3", ": get_config() must return a jaxrlhf Config, got int"),
        ("def get_config(): pass", ": get_config() must return a jaxrlhf Config, got NoneType"),
        ("get_config = 3", ": defines no get_config()"),
        ("def get_config():\n    return 1 / 0", ":2: ZeroDivisionError: division by zero"),
        ("\nimport nowhere_to_be_found", ":2: ModuleNotFoundError: No module named 'nowhere_to_be_found'"),
        ("x = 1\ndef get_config(:", ":2: invalid syntax: def get_config(:"),
        (CONFIG_FILE.format(steps=0), ":5: Config.steps must be above 0, got 0"),
        (CONFIG_FILE.format(steps="'3'"), ":5: Config.steps must be int, got '3'"),
        (CONFIG_FILE.format(steps="3, sede=1"), ":5: Config has no setting sede; did you mean seed?"),
        (CONFIG_FILE.format(steps="PPO(gama=1)"), ":11: PPO has no setting gama; did you mean gamma?"),
        (CONFIG_FILE.format(steps="Layout(tensor='2')"), ":11: Layout.tensor must be above 0, got '2'"),
    ],
)
def test_a_bad_file_is_named_with_its_line(tmp_path, source, message):
    path = tmp_path / "mine.py"
    path.write_text(source)
    with refused(f"{path}{message}") as refusal:
        load(path)
    assert "\n" not in str(refusal.value)


# Overrides.


def test_override_changes_only_what_it_names():
    before = load("ppo_gsm8k")
    after = override(
        before, {"steps": 3, "actor.optimizer.learning_rate": 1e-5, "algorithm.kl": None, "rewards.parts.0.weight": 2}
    )
    assert before == load("ppo_gsm8k")
    assert after == replace(
        before,
        steps=3,
        actor=replace(before.actor, optimizer=replace(before.actor.optimizer, learning_rate=1e-5)),
        algorithm=replace(before.algorithm, kl=None),
        rewards=replace(before.rewards, parts=(replace(before.rewards.parts[0], weight=2),)),
    )


def test_override_checks_the_whole_once():
    # Neither change alone would pass: 5 responses divide neither 64 nor 60.
    changes = {"rollout.prompts_per_step": 5, "algorithm.responses_per_update": 5}
    assert override(a_config(), changes).rollout.prompts_per_step == 5


def test_override_switches_a_variant():
    after = override(a_config(), {"model": Pretrained("/x"), "data": PromptFile("train.jsonl")})
    assert (after.model, after.data) == (Pretrained("/x"), PromptFile("train.jsonl"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"stpes": 3}, "no setting stpes: did you mean steps?"),
        ({"rolout.slots": 3}, "no setting rolout.slots: did you mean rollout.slots?"),
        ({"rollout.sampling.slots": 3}, "no setting rollout.sampling.slots: did you mean rollout.slots?"),
        ({"prompts_per_step": 3}, "no setting prompts_per_step: did you mean rollout.prompts_per_step?"),
        ({"rollout.promts_per_step": 3}, "no setting rollout.promts_per_step: did you mean rollout.prompts_per_step"),
        (
            {"learning_rate": 1e-5},
            "no setting learning_rate: did you mean algorithm.critic.optimizer.learning_rate or "
            "actor.optimizer.learning_rate?",
        ),
        ({"zzz": 3}, "no setting zzz: the configuration has name, algorithm, steps, model, "),
        ({"evaluation.zzz": 3}, "no setting evaluation.zzz: evaluation has every_steps, problems"),
        ({"rewards.parts.1.weight": 3}, "no setting rewards.parts.1.weight: did you mean rewards.parts.0.weight?"),
        (
            {"model.path": "/x"},
            "no setting model.path: model is FromScratch, and path belongs to Pretrained; "
            "set model=Pretrained(...) in the configuration file",
        ),
        ({"algorithm.normalize_std": False}, "no setting algorithm.normalize_std: algorithm is PPO, and normalize_std"),
        ({"cold_start.steps": 3}, "no setting cold_start.steps: cold_start is None; set it to ColdStart(...)"),
        (
            {"algorithm.kl.coefficient": 0.1},
            "no setting algorithm.kl.coefficient: algorithm.kl is None",
        ),
        ({"steps": "3"}, "steps must be int, got '3'"),
        ({"steps": 3.0}, "steps must be int, got 3.0"),
        ({"actor.optimizer.learning_rate": "1e-5"}, "actor.optimizer.learning_rate must be float, got '1e-5'"),
        (
            {"actor.optimizer.decay": "cosin"},
            "actor.optimizer.decay must be one of 'constant', 'linear', 'cosine'",
        ),
        ({"rollout.sampling.stop_tokens": "x"}, "rollout.sampling.stop_tokens must be a tuple of str, got 'x'"),
        ({"model": Arithmetic()}, "model must be FromScratch or Pretrained, got Arithmetic("),
        ({"steps": 0}, "Config.steps must be above 0, got 0"),
        ({"rollout.prompts_per_step": 60}, "algorithm.responses_per_update=64 does not divide the 60 responses"),
    ],
)
def test_override_refuses(changes, message):
    with refused(message):
        override(a_config(), changes)


# Plain data.


def test_json_names_the_classes():
    data = to_json(a_config())
    assert data["class"] == "Config"
    assert data["algorithm"]["class"] == "PPO"
    assert data["model"]["class"] == "FromScratch"
    assert data["rewards"]["parts"] == [{"class": "ArithmeticReward", "weight": 1.0}]
    assert data["cold_start"] is None


def test_json_tells_any_two_configurations_apart():
    texts = [str(to_json(load(name))) for name in shipped()]
    assert len(set(texts)) == len(texts)


def test_a_new_algorithm_brings_its_own_check():
    @dataclass(frozen=True)
    class Picky(Algorithm):
        dataflow: ClassVar[str] = "nowhere:step"
        roles: ClassVar[tuple[str, ...]] = ("actor",)

        def check(self, config):
            raise ValueError(f"not with {config.steps} steps")

    with refused("not with 10 steps"):
        a_config(algorithm=Picky())


def test_a_resumed_run_follows_the_settings_it_has_now():
    fixed = PPO(kl=KLInReward(coefficient=0.5))
    assert fixed.resumed_state({"kl_coefficient": 0.0}) == {"kl_coefficient": 0.5}
    assert PPO(kl=None).resumed_state({"kl_coefficient": 0.5}) == {"kl_coefficient": 0.0}
    adaptive = PPO(kl=KLInReward(coefficient=0.5, adaptive=AdaptiveKL()))
    assert adaptive.resumed_state({"kl_coefficient": 0.3}) == {"kl_coefficient": 0.3}
    assert adaptive.resumed_state({"kl_coefficient": 0.0}) == {"kl_coefficient": 0.5}

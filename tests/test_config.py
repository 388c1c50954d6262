"""Configurations: files, overrides by name, and what a wrong one is told."""

import dataclasses
import re
import traceback
from dataclasses import dataclass, replace
from typing import ClassVar

import pytest

from jaxrlhf.config import (
    PPO,
    AdaptiveKL,
    Algorithm,
    Arithmetic,
    Config,
    FromScratch,
    KLInLoss,
    KLInReward,
    Pretrained,
    PromptFile,
    Refusal,
    Rejection,
    Rollout,
    TruncatedImportance,
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
    return pytest.raises(Refusal, match="^" + re.escape(message))


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
        ("x = 1\ndef get_config(:", ":2: invalid syntax: def get_config(:"),
        (CONFIG_FILE.format(steps=0), ":5: Config.steps must be above 0, got 0"),
        (CONFIG_FILE.format(steps="'3'"), ":5: Config.steps must be int, got '3'"),
        (CONFIG_FILE.format(steps="3, sede=1"), ":5: Config has no setting sede; did you mean seed?"),
        (CONFIG_FILE.format(steps="PPO(gama=1)"), ":11: PPO has no setting gama; did you mean gamma?"),
        (CONFIG_FILE.format(steps="Layout(tensor='2')"), ":11: Layout.tensor must be above 0, got '2'"),
        (CONFIG_FILE.format(steps="Sampling(temperature='hot')"), ":11: Sampling.temperature must be float, got 'hot'"),
        (CONFIG_FILE.format(steps="Rollout(sampling={})"), ":11: Rollout.sampling must be Sampling, got {}"),
        (CONFIG_FILE.format(steps="Rewards(parts=(ArithmeticReward()))"), ":11: Rewards.parts must be a tuple of "),
        (
            "from jaxrlhf import load\ndef get_config():\n    config = load('ppo_gsm8k')\n    config.steps = 3",
            ":4: cannot assign to field 'steps': settings stay as they are made; make others with dataclasses.replace(",
        ),
    ],
)
def test_a_bad_file_is_named_with_its_line(tmp_path, source, message):
    path = tmp_path / "mine.py"
    path.write_text(source)
    with refused(f"{path}{message}") as refusal:
        load(path)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("source", "error"),
    [
        ("\ndef get_config(): return int('three')", ValueError),
        ("\nimport nowhere_to_be_found", ModuleNotFoundError),
        ("class Mine: pass\nMine(gama=1)", TypeError),
    ],
)
def test_an_error_of_a_files_own_code_keeps_its_traceback(tmp_path, source, error):
    path = tmp_path / "mine.py"
    path.write_text(source)
    with pytest.raises(error) as raised:
        load(path)
    assert not isinstance(raised.value, Refusal)
    assert f'{path}", line 2' in "".join(traceback.format_exception(raised.value))


# Overrides.


def test_a_tuple_that_lacks_its_comma_is_known_as_such():
    says = "offload must be a tuple of str, got 'actor'; a tuple of one is written ('actor',), with a comma"
    with refused(says):
        override(load("ppo_gsm8k"), {"offload": "actor"})


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
        ({"model": Arithmetic()}, "model must be FromScratch or Pretrained or Nnx, got Arithmetic("),
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
        def updates_per_step(self, config):
            return 1

        dataflow: ClassVar[str] = "nowhere:step"
        roles: ClassVar[tuple[str, ...]] = ("actor",)

        def check(self, config):
            raise Refusal(f"not with {config.steps} steps")

    with refused("not with 10 steps"):
        a_config(algorithm=Picky())


def test_a_resumed_run_follows_the_settings_it_has_now():
    fixed = PPO(kl=KLInReward(coefficient=0.5))
    assert fixed.resumed_state({"kl_coefficient": 0.0}) == {"kl_coefficient": 0.5}
    assert PPO(kl=None).resumed_state({"kl_coefficient": 0.5}) == {"kl_coefficient": 0.0}
    adaptive = PPO(kl=KLInReward(coefficient=0.5, adaptive=AdaptiveKL()))
    assert adaptive.resumed_state({"kl_coefficient": 0.3}) == {"kl_coefficient": 0.3}
    assert adaptive.resumed_state({"kl_coefficient": 0.0}) == {"kl_coefficient": 0.5}
    assert adaptive.resumed_state({}) == {"kl_coefficient": 0.5}, "after a run on pairs, which carries no such number"


# What algorithms make of the rest.


@pytest.mark.parametrize(
    ("algorithm", "trusts"),
    [
        ({}, True),
        ({"kl": KLInLoss()}, True),
        ({"kl": KLInReward()}, False),
        ({"kl": KLInReward(), "old_logp": "sampler"}, True),
        ({"correction": TruncatedImportance()}, False),
        ({"rejection": (Rejection(),)}, False),
        ({"old_logp": "bypass", "epochs_per_step": 2}, True),
        ({"old_logp": "bypass", "rejection": (Rejection(),)}, False),
        ({"old_logp": "trainer"}, False),
        ({"responses_per_update": 32}, False),
        ({"epochs_per_step": 2}, False),
    ],
    ids=str,
)
def test_the_samplers_log_probabilities_serve_where_only_metrics_would_read_others(algorithm, trusts):
    config = a_config(algorithm=PPO(**algorithm), rollout=Rollout(prompts_per_step=64))
    assert config.algorithm.trusts_sampler(config) is trusts

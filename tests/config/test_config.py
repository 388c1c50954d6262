"""Configurations: files, overrides by name, and what a wrong one is told."""

import dataclasses
import sys
import traceback
from dataclasses import dataclass, replace
from typing import ClassVar

import pytest

from jaxrlhf.config import (
    GRPO,
    PPO,
    AdaptiveKL,
    Algorithm,
    Arithmetic,
    ColdStart,
    Config,
    FormatReward,
    FromScratch,
    KLInLoss,
    KLInReward,
    Lora,
    Pretrained,
    PromptFile,
    RayCluster,
    Refusal,
    Rejection,
    Rollout,
    Training,
    TruncatedImportance,
    checked,
    load,
    override,
    shipped,
    to_json,
)
from jaxrlhf.config.named_functions import load as load_function

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
    return checked(Config(**{**settings, **changes}))


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


def test_functions_of_a_shipped_configuration_are_found_by_its_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    reference = "grpo_instructions.py:follows"
    record = {"prompt": "", "topic": "cats", "instructions": [("lowercase", "")]}
    assert load_function(reference, "reward function")("", "we like cats.", None, record) == 1
    (tmp_path / "grpo_instructions.py").write_text("def follows(*_): return 7.0")
    assert load_function(reference, "reward function")("", "we like cats.", None, record) == 7
    with pytest.raises(Refusal, match=r"there is no file other\.py"):
        load_function("other.py:follows", "reward function")


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


def test_unknown_name_lists_what_exists_or_the_nearest(refused, tmp_path):
    (tmp_path / "mine.py").touch()
    for name in ("ppo_gms8k.py", "nothing_like_it", str(tmp_path / "mien.py")):
        with refused():
            load(name)


def test_a_bad_file_is_named_with_its_line(refused, tmp_path):
    for source in [
        "x = 1",
        "def get_config(): return 3",
        "def get_config(): pass",
        "get_config = 3",
        "x = 1\ndef get_config(:",
        CONFIG_FILE.format(steps=0),
        CONFIG_FILE.format(steps="'3'"),
        CONFIG_FILE.format(steps="3, sede=1"),
        CONFIG_FILE.format(steps="PPO(gama=1)"),
        CONFIG_FILE.format(steps="Layout(tensor='2')"),
        CONFIG_FILE.format(steps="Sampling(temperature='hot')"),
        CONFIG_FILE.format(steps="Rollout(sampling={})"),
        CONFIG_FILE.format(steps="Rewards(parts=(ArithmeticReward()))"),
        "from jaxrlhf.config import FromScrach",
        "from jaxrlhf import load\ndef get_config():\n    config = load('ppo_gsm8k')\n    config.steps = 3",
    ]:
        path = tmp_path / "mine.py"
        path.write_text(source)
        with refused() as refusal:
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


def test_a_file_may_import_its_neighbours_and_knows_where_it_is(tmp_path, monkeypatch):
    (tmp_path / "neighbour_of_mine.py").write_text("SEED = 7")
    (tmp_path / "mine.py").write_text(
        "from dataclasses import replace\nfrom jaxrlhf import load\nfrom neighbour_of_mine import SEED\n"
        "def get_config(): return replace(load('ppo_gsm8k'), seed=SEED, workdir=__file__)"
    )
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.chdir(tmp_path)
    config = load("mine")
    assert (config.seed, config.workdir) == (7, str(tmp_path / "mine.py"))


# Overrides.


def test_a_tuple_that_lacks_its_comma_is_known_as_such(refused):
    with refused():
        override(load("ppo_gsm8k"), {"offload": "actor"})


def test_what_was_meant_by_a_value_of_the_wrong_type_is_said(refused):
    config = load("ppo_gsm8k")
    for changes in ({"model": "Qwen/Qwen3-0.6B"}, {"algorithm": "grpo"}):
        with refused():
            override(config, changes)
    with refused():
        replace(config, algorithm=GRPO)


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


def test_what_is_none_is_switched_on_by_what_is_changed_of_it():
    after = override(a_config(), {"actor.lora.rank": 8, "cold_start.steps": 3, "cluster.restarts": 1})
    assert after == a_config(actor=Training(lora=Lora(rank=8)), cold_start=ColdStart(3), cluster=RayCluster(restarts=1))


def test_a_class_stands_for_its_settings():
    after = override(a_config(), {"algorithm.kl": KLInLoss, "algorithm.kl.coefficient": 0.5})
    assert after.algorithm.kl == KLInLoss(coefficient=0.5)
    again = override(after, {"algorithm.kl": KLInLoss})  # it is there
    assert again == after
    other = override(after, {"algorithm.kl": KLInReward, "model": Pretrained, "model.path": "/x"})
    assert (other.algorithm.kl, other.model) == (KLInReward(), Pretrained("/x"))
    parts = override(a_config(), {"rewards.parts.0": FormatReward, "rewards.parts.0.pattern": "a"}).rewards.parts
    assert parts == (FormatReward(pattern="a"),)


def test_override_refuses(refused):
    for changes in [
        {"stpes": 3},
        {"rolout.slots": 3},
        {"rollout.sampling.slots": 3},
        {"prompts_per_step": 3},
        {"rollout.promts_per_step": 3},
        {"learning_rate": 1e-5},
        {"zzz": 3},
        {"evaluation.zzz": 3},
        {"rewards.parts.1.weight": 3},
        {"evaluation.sets.0.samples": 4},
        {"actor.lora.rank": 4, "actor.lora.target": ("query",)},
        {"model.path": "/x"},
        {"data.path": "x"},
        {"cold_start.optimizer.learning_rate": 1e-3},
        {"model": Pretrained},
        {"algorithm.kl": PPO},
        {"algorithm.kl.coefficient": 0.1},
        {"steps": "3"},
        {"steps": 3.0},
        {"actor.optimizer.learning_rate": "1e-5"},
        {"actor.optimizer.decay": "cosin"},
        {"rollout.sampling.stop_tokens": "x"},
        {"model": Arithmetic()},
        {"steps": 0},
        {"rollout.prompts_per_step": 60},
    ]:
        with refused():
            override(a_config(), changes)


# Plain data.


def test_json_names_the_classes():
    data = to_json(a_config())
    assert data["class"] == "Config"
    assert data["algorithm"]["class"] == "PPO"
    assert data["model"]["class"] == "FromScratch"
    assert data["rewards"]["parts"] == [{"class": "ArithmeticReward", "in_thinking": False, "weight": 1.0}]
    assert data["cold_start"] is None


def test_json_tells_any_two_configurations_apart():
    texts = [str(to_json(load(name))) for name in shipped()]
    assert len(set(texts)) == len(texts)


def test_a_new_algorithm_brings_its_own_check(refused):
    @dataclass(frozen=True)
    class Picky(Algorithm):
        def updates_per_step(self, rollout):
            return 1

        dataflow: ClassVar[str] = "nowhere:step"

        def roles(self, training):
            return ()

        def check(self, config):
            raise Refusal(f"not with {config.steps} steps")

    with refused():
        a_config(algorithm=Picky())


def test_a_resumed_run_follows_the_settings_it_has_now():
    fixed = PPO(kl=KLInReward(coefficient=0.5))
    assert fixed.resumed_state({"kl_coefficient": 0.0}) == {"kl_coefficient": 0.5}
    assert PPO(kl=None).resumed_state({"kl_coefficient": 0.5}) == {"kl_coefficient": 0.0}
    adaptive = PPO(kl=KLInReward(coefficient=0.5, adaptive=AdaptiveKL()))
    assert adaptive.resumed_state({"kl_coefficient": 0.3}) == {"kl_coefficient": 0.3}
    assert adaptive.resumed_state({"kl_coefficient": 0.0}) == {"kl_coefficient": 0.5}
    assert adaptive.resumed_state({}) == {"kl_coefficient": 0.5}, "after a run on pairs, which carries no such number"

    class Counting(GRPO):
        def initial_state(self):
            return super().initial_state() | {"seen": 0.0, "since": 1.0}

    carried = Counting(kl=KLInLoss(coefficient=0.2)).resumed_state({"kl_coefficient": 0.1, "seen": 5.0})
    assert carried == {"kl_coefficient": 0.2, "seen": 5.0, "since": 1.0}, "numbers of an algorithm of one's own stay"


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (
            {"roles": lambda self, config: ()},
            r"Old\.roles gets the settings of the actor, .*roles\(self, training\)",
        ),
        (
            {"updates_per_step": lambda self, config: 1},
            r"Old\.updates_per_step gets the settings of the rollout, .*write updates_per_step\(self, rollout\)",
        ),
        ({"places_after": 1}, r"Old\.places_after is named positions_after now"),
        ({"draws_beside": "greedy answers"}, r"Old\.draws_beside is named also_generates now"),
    ],
)
def test_an_algorithm_in_the_former_form_is_refused_where_it_is_defined(body, message):
    with pytest.raises(Refusal, match=message):
        type("Old", (GRPO,), body)


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
    assert config.algorithm.trusts_sampler(config.rollout) is trusts

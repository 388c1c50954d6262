"""Command `plan`: plans of every shipped configuration without a network, and settings to paste."""

import itertools
import json
import os
import re
import subprocess
import sys

import pytest
from command_lines import run_module
from tiny_runs import write_policy

from jaxrlhf.config import Layout, Pool, load, override, shipped
from jaxrlhf.planner.apply import planned_config
from jaxrlhf.planner.hardware import hardware_of
from jaxrlhf.planner.plan import Infeasible, plan_from_json
from jaxrlhf.planner.problem import question_of
from jaxrlhf.planner.search.mapping import search

MACHINES = {"a100x2x8": 16, "h100": 8, "v5p-16": 8, "cpu": 8}


def refusal(capsys, *arguments: object) -> str:
    """Return the line with which the command ends."""
    with pytest.raises(SystemExit) as end:
        run_module("plan", *arguments)
    shown = capsys.readouterr()
    assert (end.value.code, shown.out, shown.err.count("\n")) == (2, "", 1)
    return shown.err


SMALL = [name for name, path in shipped().items() if path.parent.name == "configs"]  # test_recipes plans the recipes
KINDS = ("dapo_arithmetic", "grpo_geometry3k", "prime_letters", "rlhf_reward_model", "rlhf_sft", "rloo_arithmetic")
KINDS += ("safe_rlhf_digits", "tools_python")
"""Configurations with each algorithm, with images and with tools."""
FEW = [*itertools.product(KINDS, ["h100"]), *itertools.product(["ppo_gsm8k"], MACHINES)]


@pytest.mark.parametrize(
    ("name", "hardware"),
    [
        pytest.param(*case, marks=() if case in FEW else pytest.mark.seeds)
        for case in itertools.product(SMALL, MACHINES)
    ],
)
def test_every_shipped_configuration_is_planned(name, hardware, tmp_path, monkeypatch):
    config = load(name)
    if getattr(config.model, "path", "").startswith("models/"):  # exported by an earlier run of the pipeline
        monkeypatch.chdir(tmp_path)
        for exported in ("rlhf_sft", "rlhf_reward_model"):
            write_policy(tmp_path / "models" / exported)
    machines = hardware_of(config, hardware)
    assert machines.devices == MACHINES[hardware]
    if hardware == "cpu" and name.endswith(("_gsm8k", "_geometry3k")):
        # 0.5 or 3 billion trained weights take 16 bytes each; a plan fills 90 % of the 16 GB of all 8 devices.
        with pytest.raises(Infeasible, match=r"actor does not fit 8 x cpu: .* than the 1.68 GiB that a plan may fill"):
            search(question_of(config, machines).problem)
        return
    best, *others = search(question_of(config, machines).problem).plans
    assert all(best.seconds <= other.seconds for other in others)
    planned = planned_config(config, best)
    assert 1 <= sum(pool.devices for pool in planned.pools) <= MACHINES[hardware]
    assert all(0 < pool.peak_bytes < machines.memory_bytes for pool in best.pools)
    for pool, given in zip(best.pools, planned.pools, strict=True):
        for role, layout in pool.layouts.items():
            assert layout.data * layout.fsdp * layout.stage * layout.tensor == given.devices, role


def test_it_prints_plans_and_what_to_paste(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    run_module("plan", "--config", "ppo_gsm8k", "--hardware", "a100x2x8", "--response-tokens", 200)
    shown = capsys.readouterr().out
    assert "16 devices: 2 machines of 8 x a100" in shown
    assert "512 tokens of prompt; to set means" in " ".join(shown.split())
    assert "timeline of the best plan: plan_ppo_gsm8k.png" in shown
    assert (tmp_path / "plan_ppo_gsm8k.png").read_bytes()[:4] == b"\x89PNG"
    assert "or set placement='auto'" in shown

    pasted = shown[shown.index("from jaxrlhf.config") : shown.index("or set placement='auto'")]
    names = {"config": load("ppo_gsm8k")}
    exec(pasted, names)
    run_module("plan", "--config", "ppo_gsm8k", "--hardware", "a100x2x8", "--response-tokens", 200, "--json")
    printed = json.loads(capsys.readouterr().out)
    assert names["config"] == planned_config(load("ppo_gsm8k"), plan_from_json(printed["plans"][0]))
    assert names["config"].pools != ()


@pytest.mark.slow
def test_json_is_all_that_is_printed_and_touches_neither_device_nor_folder(tmp_path):
    words = "-m jaxrlhf.plan --config grpo_gsm8k --hardware h100 --json --plans 1"
    command = [sys.executable, *words.split()]
    # JAX fails on an unknown platform as soon as it looks for devices.
    environment = {**os.environ, "JAX_PLATFORMS": "nowhere", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    printed = json.loads(done.stdout)
    assert printed["hardware"]["name"] == "h100"
    assert printed["workload"]["response_tokens"] == load("grpo_gsm8k").rollout.max_response_tokens
    assert len(printed["plans"]) == 1
    assert printed["search"]["placements"] == 2  # actor and reference, together or apart
    assert printed["plans"][0]["seconds"] == pytest.approx(sum(printed["plans"][0]["stage_seconds"].values()))
    assert list(tmp_path.iterdir()) == []


def test_settings_on_the_command_line_count(tmp_path, capsys):
    picture = tmp_path / "here.png"
    arguments = ("--config", "grpo_gsm8k", "--hardware", "h100x4", "--devices", 8, "--json", "--picture", picture)
    run_module("plan", *arguments, "--model.path", "Qwen/Qwen2.5-7B-Instruct")
    printed = json.loads(capsys.readouterr().out)
    assert printed["hardware"]["machines"] == 1
    assert any("Qwen/Qwen2.5-7B-Instruct" in note for note in printed["notes"])
    assert picture.is_file()


CONFIGURATION = """
from dataclasses import replace
from jaxrlhf.config import Layout, Pool, Training, load

def get_config():
    pools = (Pool("policy", 4, ("actor", "reference")), Pool("value", 2, ("critic",)))
    return replace(load("ppo_gsm8k"), pools=pools, actor=Training(layout=Layout(tensor=2)))
"""


def test_pools_that_are_given_are_costed_as_they_are_unless_afresh(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(CONFIGURATION)
    run_module("plan", "--config", "mine", "--hardware", "h100", "--json")
    printed = json.loads(capsys.readouterr().out)
    [only] = printed["plans"]
    assert [(pool["roles"], pool["devices"]) for pool in only["pools"]] == [
        (["actor", "reference"], 4),
        (["critic"], 2),
    ]
    assert only["pools"][0]["layouts"]["actor"]["tensor"] == 2
    assert printed["settings"] == ""
    run_module("plan", "--config", "mine", "--hardware", "h100", "--json", "--afresh")
    afresh = json.loads(capsys.readouterr().out)
    assert afresh["search"]["placements"] == 5  # of three roles
    assert afresh["plans"][0]["seconds"] < only["seconds"]
    names = {"config": load("mine"), "override": override, "Pool": Pool, "Layout": Layout}
    exec(afresh["settings"], names)
    assert names["config"] == planned_config(load("mine"), plan_from_json(afresh["plans"][0]))


ADAPTERS = """
from dataclasses import replace
from jaxrlhf.config import KLInLoss, Lora, Pool, load

def get_config():
    config = load("grpo_gsm8k")
    return replace(
        config,
        algorithm=replace(config.algorithm, kl=KLInLoss()),
        actor=replace(config.actor, lora=Lora(rank=4)),
        pools=(Pool("policy", 4, ("actor",)), Pool("start", 4, ("reference", "reward"))),
    )
"""


def test_a_reference_apart_from_its_adapters_may_be_none_of_its_own_in_a_search_afresh(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(ADAPTERS)
    run_module("plan", "--config", "mine", "--hardware", "h100", "--json", "--afresh")
    names = {"config": load("mine"), "override": override, "Pool": Pool, "Layout": Layout}
    exec(json.loads(capsys.readouterr().out)["settings"], names)
    [pool] = names["config"].pools
    assert (pool.devices, pool.roles) == (8, ("actor", "reference"))
    assert names["config"].reference_is_frozen_actor and not load("mine").reference_is_frozen_actor


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--hardware", "a1000"), "unknown hardware 'a1000'; known names are a100"),
        (("--hardware", "nowhere.json"), "nowhere.json cannot be read as JSON (no such file); give"),
        (("--hardware", "h100", "--plans", "0"), "--plans must be 1 or more, got 0"),
        (("--hardware", "h100", "--prompt-tokens", "9999"), "a mean of 9999.0 prompt_tokens is above"),
        (
            ("--hardware", "h100", "--response-tokens", "nan"),
            "mean response_tokens must be above 0 and finite, got nan",
        ),
        (("--hardware", "h100x513x8"), "at most 4096 devices, got 4104"),
        (("--hardware", "h100", "--devices", "64"), "devices=64, but 1 machines of 8 x h100 have 8"),
        (("--hardware", "h100", "--model.path", "Qwen/Qwen2.5-0.6B"), "Qwen/Qwen2.5-0.5B"),
        (("--hardware", "h100x1x1", "--model.path", "Qwen/Qwen2.5-7B-Instruct"), "actor does not fit 1 x h100"),
    ],
)
def test_what_cannot_be_planned_is_refused_in_one_line(arguments, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert message in refusal(capsys, "--config", "ppo_gsm8k", *arguments)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("picture", "why"),
    [
        ("plan.jpg", "--picture must be a file that ends in .png or .svg or .pdf, got 'plan.jpg'"),
        ("plan", "--picture must be a file that ends in"),
        ("nowhere/plan.png", "--picture 'nowhere/plan.png': there is no folder 'nowhere'"),
    ],
)
def test_a_picture_that_cannot_be_written_is_refused_before_the_search(picture, why, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("jaxrlhf.planner.search.mapping.search", None)  # calling it would be a TypeError
    message = refusal(capsys, "--config", "ppo_gsm8k", "--hardware", "h100", "--picture", picture)
    assert why in message
    assert list(tmp_path.iterdir()) == []


def test_replicas_lie_within_the_hosts_of_a_cluster(capsys):
    model = ("--model.path", "Qwen/Qwen2.5-7B-Instruct")
    replicas = {}
    for name, cluster in {"hosts of one device": ("--cluster", "ray"), "one process": ()}.items():
        run_module("plan", "--config", "grpo_gsm8k", "--hardware", "a100x2x8", "--json", *model, *cluster)
        plans = json.loads(capsys.readouterr().out)["plans"]
        layouts = [pool["layouts"]["actor"] for found in plans for pool in found["pools"] if "actor" in pool["roles"]]
        replicas[name] = {layout["generation_stage"] * layout["generation_tensor"] for layout in layouts}
    assert replicas["hosts of one device"] == {1}
    assert max(replicas["one process"]) > 1


def test_devices_of_no_known_kind_are_refused(monkeypatch, capsys):
    monkeypatch.setattr("jaxrlhf.planner.hardware.recognise", lambda kind, platform: None)
    message = refusal(capsys, "--config", "ppo_gsm8k")
    assert "is unknown" in message
    assert "a .json file with the figures of the devices" in message


def test_slots_that_bind_are_named_with_what_more_would_gain(capsys):
    arguments = ("--config", "grpo_gsm8k", "--hardware", "h100", "--json", "--plans", 1)
    run_module("plan", *arguments, "--rollout.slots", 32)
    (few,) = [note for note in json.loads(capsys.readouterr().out)["notes"] if "rollout.slots" in note]
    more, fast, slow = re.search(
        r"=32 limits speed: with (\d+) .* is (\S+) s per step instead of (\S+) s", few
    ).groups()
    assert int(more) > 32 and float(fast) < 0.95 * float(slow)


def test_a_budget_below_the_longest_sequence_is_raised_and_said_by_a_plan_and_refused_without(tmp_path, capsys):
    arguments = ("--config", "grpo_gsm8k", "--hardware", "h100", "--picture", tmp_path / "x.png")
    small = ("--actor.tokens-per-microbatch", 512)
    assert "is below the longest sequence" in refusal(capsys, *arguments, *small)
    run_module("plan", *arguments, *small, "--placement", "auto", "--json")
    printed = json.loads(capsys.readouterr().out)
    longest = load("grpo_gsm8k").rollout.max_prompt_tokens + load("grpo_gsm8k").rollout.max_response_tokens
    assert any("actor: tokens_per_microbatch=512 is below the longest" in note for note in printed["notes"])
    raised = int(re.search(r'"actor.tokens_per_microbatch": (\d+)', printed["settings"])[1])
    assert raised >= longest

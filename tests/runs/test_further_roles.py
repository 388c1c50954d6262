"""Runs of further trained roles, and of recorded experts, on eight devices and on hosts: the numbers of one device."""

from dataclasses import replace

import further_roles
import pytest
from placed_runs import assert_same_numbers
from tiny_runs import get_config, numbers, training

import jaxrlhf
from jaxrlhf.config import GRPO, Checkpointing, FromScratch, RayCluster

pytestmark = [pytest.mark.seeds, pytest.mark.usefixtures("programs", "undrawn")]

ACTOR = {"fsdp": 4, "tensor": 2, "generation_tensor": 1}
CLUSTER = RayCluster(devices_per_host=4, platform="cpu", call_timeout_s=300.0)


def run(config, workdir, **settings):
    common = {"steps": 2, "checkpoint": Checkpointing(every_steps=0), "workdir": str(workdir)}
    jaxrlhf.run(replace(config, **common | settings))
    return workdir


@pytest.mark.parametrize("name", ["SafeRLHF", "PRIME"])
def test_eight_devices_give_the_numbers_of_one(name, tmp_path):
    config = further_roles.config_of(name)
    one = run(config, tmp_path / "one")
    if name == "SafeRLHF":
        roles = {"critic": training(fsdp=8), "cost_critic": training(fsdp=2, tensor=4)}
    else:
        # As the reference is laid out: what the two differ by is scaled up to 1, and that is rounding at first.
        roles = {"process_reward": training(**ACTOR)}
    split = {"devices": 8, "actor": training(**ACTOR), "algorithm": replace(config.algorithm, **roles)}
    assert_same_numbers(run(config, tmp_path / "eight", **split), one)
    first, last = numbers(one / "metrics.jsonl")
    trained = {"SafeRLHF": "cost_critic/loss", "PRIME": "process_reward/loss"}[name]
    assert first[trained] != last[trained]


def test_two_hosts_take_the_experts_again_that_they_sampled_with(tmp_path):
    tiny = get_config()
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_layers": 1, "num_heads": 4, "num_kv_heads": 4}
    config = replace(
        tiny,
        model=FromScratch(**sizes, head_dim=8, experts=4, experts_per_token=2),
        cold_start=None,
        algorithm=GRPO(responses_per_update=32, old_logp="trainer"),
        rollout=replace(tiny.rollout, prompts_per_step=8, responses_per_prompt=4, replay_routing=True),
        actor=replace(training(fsdp=2, expert=2, tensor=2), router_loss=0.01),
        evaluation=replace(tiny.evaluation, every_steps=0),
        devices=8,
    )
    here = run(config, tmp_path / "here")
    assert_same_numbers(run(config, tmp_path / "hosts", cluster=CLUSTER), here)
    for record in numbers(here / "metrics.jsonl"):
        assert record["router/actor_disagreement"] == 0, "each update is of what was just sampled"
        assert record["router/actor_loss"] > 0

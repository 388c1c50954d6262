"""Runs on Ray hosts: the numbers of one process, and transfers that bypass the controller."""

from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import odd_hosts
import pytest
import ray_world
import tiny_episodes
from placed_runs import APART, SPLIT, assert_same_numbers, cut_after, placed, pools_of, run
from tiny_runs import numbers, records, training

import jaxrlhf
from jaxrlhf.config import GRPO, Checkpointing, Evaluation, FunctionReward, RayCluster, Rewards, Sampling
from jaxrlhf.data.sources import load_problems
from jaxrlhf.data.tokenizer import decoder, load_tokenizer
from jaxrlhf.rewards.scorer import Scorer
from jaxrlhf.single_controller import ray_backend
from jaxrlhf.single_controller.launch import launch
from jaxrlhf.single_controller.ray.cluster import connect, disconnect
from jaxrlhf.workers.build import Phase
from jaxrlhf.workers.reward import response_texts

pytestmark = pytest.mark.usefixtures("programs", "undrawn")

STEPS = 3
CLUSTER = RayCluster(devices_per_host=4, platform="cpu", call_timeout_s=300.0)
WHOLE = {"devices": 8, "actor": {"fsdp": 4, "tensor": 2, "generation_tensor": 1}, "critic": {"fsdp": 8}}
HALVES = {"actor": {"fsdp": 2, "tensor": 2, "generation_tensor": 1}, "critic": {"fsdp": 4}}


@pytest.fixture(scope="module", autouse=True)
def connection(programs):
    connection = connect(CLUSTER)
    yield
    disconnect(connection)


@pytest.fixture(scope="module")
def here(tmp_path_factory):
    """Return a device of this process."""
    return run(tmp_path_factory.mktemp("here"), steps=STEPS)


@pytest.fixture(scope="module")
def apart(here, tmp_path_factory):
    """Resume the checkpoint of one process, with policy, value and generation on a host each."""
    workdir = cut_after(1, here, tmp_path_factory.mktemp("apart") / "moved")
    return run(workdir, steps=STEPS, pools=pools_of(4, 4, 4), cluster=CLUSTER, **HALVES)


def assert_made_anew_after(last: int, workdir: Path, before: Path) -> None:
    mine, theirs = numbers(workdir / "metrics.jsonl"), numbers(before / "metrics.jsonl")
    assert mine[:last] == theirs[:last]
    assert mine[last:] != theirs[last:]


@pytest.mark.seeds  # distributed/test_run_vision.py has it with episodes and pictures
def test_two_hosts_equal_one_process(here, tmp_path):
    run(tmp_path, steps=STEPS, cluster=CLUSTER, **WHOLE)
    assert_same_numbers(tmp_path, here)


@pytest.mark.slow
def test_pools_on_hosts_resume_a_checkpoint_of_one_process(here, apart):
    assert_same_numbers(apart, here)
    assert_made_anew_after(1, apart, here)


@pytest.mark.slow
def test_one_process_resumes_a_checkpoint_of_several_pools(here, apart, tmp_path):
    workdir = cut_after(2, apart, tmp_path / "moved")
    names = {item.name for item in (workdir / "checkpoints" / "step_2").iterdir()}
    assert names >= {"actor", "actor_optimizer", "critic", "critic_optimizer"}
    run(workdir, steps=STEPS)
    assert_same_numbers(workdir, here)
    assert_made_anew_after(2, workdir, apart)


@contextmanager
def launched(config):
    """Return the pools of the run and their roles."""
    tokenizer = load_tokenizer(None)
    pools = launch(config, tokenizer, progress=lambda *_: None, workdir=Path(config.workdir))
    try:
        roles = pools.roles(Phase(config, tuple(config.all_roles), 4))
        yield {ranks.name: ranks for ranks in pools._pools}, roles
        roles.close()
    finally:
        pools.close()


@pytest.mark.slow
def test_generation_on_another_host_equals_local_generation(apart, tmp_path):
    received = records(apart / "metrics.jsonl")[-1]["transfer/received_bytes"]
    with launched(placed(tmp_path, pools=APART, **HALVES)) as (_, roles):
        roles.rollout.load_weights(roles.actor.offer_weights(roles.rollout.wanted_weights())).result()
        metrics, _ = roles.take_metrics()
    assert received == metrics["transfer/received_bytes"] > 0


@pytest.fixture
def passing(monkeypatch):
    """Array bytes that this process receives from Ray and sends to Ray, counted outside of the package."""
    return ray_world.traffic(monkeypatch.setattr)


@pytest.fixture(scope="module")
def parts(tmp_path_factory):
    """Two pools of one host each, called directly, with a failing reward."""
    rewards = Rewards(parts=(FunctionReward(f"{odd_hosts.__file__}:strange"),), timeout_s=2.0)
    config = placed(tmp_path_factory.mktemp("parts"), pools=SPLIT, cluster=CLUSTER, rewards=rewards, **HALVES)
    loaded = load_problems(config.data, load_tokenizer(None), split="train", max_prompt_tokens=64).problems
    by_kind = [[problem for problem in loaded if int(problem.answer) % 4 == kind] for kind in range(4)]
    problems = [by_kind[0][0], by_kind[1][0], by_kind[2][0], *by_kind[3][:5]]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ray_backend, "make_host", odd_hosts.counting)
        with launched(config) as (pools, roles):
            yield config, pools, roles, problems


def generate(roles, problems):
    return roles.actor.generate_sequences(problems, Sampling(), responses_per_prompt=2, seed=1)


@pytest.mark.slow
def test_results_between_groups_bypass_the_controller(parts, passing):
    _, pools, roles, problems = parts

    def loaded():
        return {name: ranks.on_all("loaded_bytes")[0] for name, ranks in pools.items()}

    before = loaded()
    rollout = generate(roles, problems)
    chained = [
        roles.actor.compute_log_prob(rollout),
        roles.reference.compute_ref_log_prob(rollout),
        roles.critic.compute_values(rollout),
    ]
    for call in chained:
        call.value_or_handle()
    after = loaded()
    assert passing == {"get": 0, "put": 0}

    # Now the controller wants to read it itself.
    value = rollout.result()
    rows, columns = value.sequences.token_BT.shape
    assert (rows, columns) == (16, 64 + 16)
    tokens = rows * columns * (4 + 1 + 4 + 4)  # ids, mask, log-probabilities, versions
    size = tokens + rows * (4 + 8 + 1)  # length, prompt, truncated
    assert passing == {"get": size, "put": 0}
    assert {name: after[name] - before[name] for name in after} == {"policy": 2 * size, "value": size}

    # What it sends itself is seen as well.
    roles.critic.compute_values(value).result()
    assert passing["put"] == size


@pytest.mark.slow
def test_failing_reward_function_on_a_host(parts):
    config, _, roles, problems = parts
    rollout = generate(roles, problems)
    there = roles.reward.compute_reward(problems, rollout).result()
    kinds = [kind for problem in problems for kind in [int(problem.answer) % 4] * 2]
    np.testing.assert_array_equal(there.scorable_B, [kind == 3 for kind in kinds])
    np.testing.assert_array_equal(there.score_B, there.scorable_B)
    responses = response_texts(rollout.result(), decoder(load_tokenizer(None)))
    rows = [problem for problem in problems for _ in range(2)]
    scorer = Scorer(config.rewards)
    here = scorer.score([row.prompt for row in rows], responses, [row.answer for row in rows], [{}] * len(rows))
    assert scorer.counts == {"crash": 2, "timeout": 2, "exception": 2}
    scorer.close()
    for mine, theirs in zip(jax.tree.leaves(here), jax.tree.leaves(there), strict=True):
        np.testing.assert_array_equal(mine, theirs)


@pytest.mark.seeds  # distributed/test_run_vision.py has episodes with pictures
def test_episodes_on_two_hosts_equal_one_process(tmp_path):
    """Each host runs its share of the episodes, with environments in its own processes."""
    config = replace(
        tiny_episodes.get_config(),
        steps=1,
        devices=2,
        actor=training(data=2),
        algorithm=GRPO(responses_per_update=16),
        evaluation=Evaluation(every_steps=0, problems=16),
        checkpoint=Checkpointing(every_steps=0),
    )
    seen = []
    for name, cluster in (("here", None), ("hosts", replace(CLUSTER, devices_per_host=1))):
        workdir = tmp_path / name
        jaxrlhf.run(replace(config, workdir=str(workdir), cluster=cluster))
        seen.append([(sample["episode"]["messages"], sample["score"]) for sample in records(workdir / "samples.jsonl")])
    assert seen[0] == seen[1] and len(seen[0]) == 16
    assert len(list((tmp_path / "hosts" / "hosts").glob("all-?.log"))) == 2

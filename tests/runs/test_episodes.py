"""Whole runs in episodes: every algorithm, eight devices, a pool of their own, resumed."""

import json
import signal
from dataclasses import replace
from pathlib import Path

import pytest
import tiny_episodes
from placed_runs import assert_resumed, cut_after
from tiny_runs import records, training

import jaxrlhf
from jaxrlhf.config import DAPO, GRPO, PPO, Checkpointing, Pool, ReMax, load_module

pytestmark = pytest.mark.usefixtures("programs", "undrawn")

PPO_OVER_TURNS = PPO(responses_per_update=8, critic=training(data=8), actions="turns", gamma=0.9, lam=0.9)


def run(workdir: Path, stop_after: int = 0, **changes):
    """Run the tiny configuration; saved and stopped after a step, if one is given."""
    config = replace(tiny_episodes.get_config(), workdir=str(workdir), **changes)
    asked = {stop_after: lambda: signal.raise_signal(signal.SIGTERM)}
    jaxrlhf.run(config, on_step=lambda number, metrics: asked.get(number, lambda: None)())
    return workdir


def samples(workdir: Path) -> list[dict]:
    """The samples of a run without what the clock decides: seconds, and the sampler's rounding."""
    found = records(workdir / "samples.jsonl")
    for sample in found:
        assert sample.pop("logp_gap") < 1e-5
        if sample["tokens"]:
            assert max(map(abs, sample["tokens"].pop("gap"))) < 1e-5
        for turn in sample["episode"]["turns"]:
            del turn["policy_s"], turn["environment_s"]
    return found


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return run(tmp_path_factory.mktemp("whole"))


@pytest.mark.slow
def test_samples_show_conversations_and_metrics_their_turns(whole):
    first = samples(whole)[0]
    roles = [message["role"] for message in first["episode"]["messages"]]
    assert roles == ["user", "assistant"] * 3
    assert first["episode"]["stop"] == "done"
    assert first["score"] == pytest.approx(sum(turn["reward"] for turn in first["episode"]["turns"]), rel=1e-5)
    last = records(whole / "metrics.jsonl")[-1]
    assert (last["episode/turns_mean"], last["episode/ended_done"], last["environment/heard"]) == (3, 1, 4)
    assert last["sampler/logp_gap_max"] < 1e-5
    assert {"eval/accuracy", "eval/episode/turns_mean"} <= last.keys()


@pytest.mark.slow
def test_resumed_from_the_second_step(whole, tmp_path):
    """All that is trained and written is as without; `environments/test_loading.py` kills what has environments."""
    workdir = run(cut_after(2, whole, tmp_path / "resumed"))
    assert_resumed(workdir, whole, after=2, without=("sampler/",))
    assert [record["step"] for record in records(workdir / "metrics.jsonl")] == [1, 2, 3, 4]
    assert samples(workdir) == samples(whole)


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param(
            {"actor": training(data=8), "algorithm": PPO_OVER_TURNS},
            marks=pytest.mark.slow,
            id="eight devices and PPO",
        ),
        pytest.param(
            {
                "pools": (
                    Pool("policy", 4, ("actor", "reference", "critic")),
                    Pool("generation", 4, ("rollout", "reward")),
                )
            },
            marks=pytest.mark.seeds,
            id="a pool that generates",
        ),
    ],
)
def test_the_same_episodes_on_other_devices(whole, tmp_path, changes):
    devices = None if "pools" in changes else 8
    theirs = samples(whole)[:16]
    mine = samples(run(tmp_path, steps=1, devices=devices, **changes))
    assert [sample["episode"]["messages"] for sample in mine] == [sample["episode"]["messages"] for sample in theirs]
    assert records(tmp_path / "metrics.jsonl")[-1]["actor/grad_norm"] > 0


@pytest.mark.parametrize(
    ("staleness", "pools"),
    [
        pytest.param(1, (), marks=pytest.mark.seeds, id="one pool"),
        pytest.param(
            *(2, (Pool("policy", 4, ("actor",)), Pool("generation", 4, ("rollout", "reward")))),
            marks=pytest.mark.slow,
            id="a pool that generates",
        ),
    ],
)
def test_episodes_go_on_from_step_to_step_and_from_run_to_run(staleness, pools, tmp_path):
    """A step learns from the episodes that arrive first, of policies as old as allowed; each prompt is taken once."""
    tiny, own = tiny_episodes.get_config(), tmp_path / "arrivals"
    how = {"staleness": staleness, "over_provision": 1.5, "order": "arrival"}
    changes = {
        "pools": pools,
        "devices": None if pools else 1,
        "steps": 6,
        "environment": replace(tiny.environment, factory="talking_environments:Dawdles"),
        "algorithm": GRPO(responses_per_update=16, correction=None),  # which would read the sampler's rounding
    }
    run(own, 3, rollout=replace(tiny.rollout, **how), **changes)
    run(own, rollout=replace(tiny.rollout, **how), **changes)
    metrics = [record for record in records(own / "metrics.jsonl") if "staleness/age_max" in record]
    assert [record["step"] for record in metrics] == [1, 2, 3, 4, 5, 6]
    assert 0 < max(record["staleness/age_max"] for record in metrics) <= staleness
    assert all(record["staleness/put_off_groups"] == 4 and record["episode/ended_done"] == 1 for record in metrics)
    taken = [sample["prompt"] for sample in records(own / "samples.jsonl")]
    assert [taken.count(prompt) for prompt in {*taken}] == [2] * 48


@pytest.mark.parametrize(
    "algorithm",
    [
        *(
            pytest.param(kind(responses_per_update=8), marks=pytest.mark.seeds, id=kind.__name__)
            for kind in (GRPO, DAPO, ReMax, load_module("turn_grpo").TurnGRPO)
        ),
        pytest.param(load_module("gigpo").GiGPO(responses_per_update=8), marks=pytest.mark.slow, id="GiGPO"),
    ],
)
def test_every_algorithm_takes_episodes(algorithm, tmp_path):
    run(tmp_path, algorithm=algorithm, steps=2, checkpoint=Checkpointing(every_steps=0))
    last = records(tmp_path / "metrics.jsonl")[-1]
    assert last["actor/grad_norm"] > 0
    assert json.loads((tmp_path / "config.json").read_text())["environment"]["max_turns"] == 5

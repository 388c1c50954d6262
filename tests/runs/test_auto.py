"""`placement='auto'`: a run plans for the devices that are there, and resumes with its plan."""

import json
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import jax
import pytest
from placed_runs import assert_same_numbers, placed
from tiny_runs import get_config, records, training

from jaxrlhf.config import Config, Layout, RayCluster
from jaxrlhf.data.tokenizer import embedded_tokenizer
from jaxrlhf.planner.apply import planned_config
from jaxrlhf.planner.hardware import Hardware
from jaxrlhf.planner.plan import read_plan
from jaxrlhf.sharding.pool import ResourcePool
from jaxrlhf.trainer.auto_placement import place, placed_for_evaluation
from jaxrlhf.trainer.policy import evaluate_policy
from jaxrlhf.trainer.run import run
from jaxrlhf.workers.build import Builder, Phase

TOKENS = 500


@pytest.fixture
def slow_devices(tmp_path) -> str:
    """Eight devices that compute slowly, and whose links cost nothing: every plan wants all of them."""
    path = tmp_path / "slow.json"
    rates = {"memory_bytes": 1e9, "matmul_flops_per_s": 1e6, "memory_bytes_per_s": 1e12}
    links = dict.fromkeys(("link_bytes_per_s", "network_bytes_per_s", "host_bytes_per_s"), 1e12)
    delays = ("link_latency_s", "network_latency_s", "layer_overhead_s", "dispatch_overhead_s")
    hardware = Hardware("slow", 1, 8, **rates, **links, **dict.fromkeys(delays, 0.0))
    path.write_text(json.dumps(asdict(hardware)))
    return str(path)


def auto(workdir: Path, **settings) -> Config:
    """Tiny PPO that leaves its placement to the search, on all eight devices."""
    given = {"placement": "auto", "devices": None, "workdir": str(workdir)}
    return replace(get_config(), **given | settings)


def launched(monkeypatch, module: str = "jaxrlhf.trainer.run") -> list[Config]:
    """The configurations that are launched from now on; nothing is."""
    found: list[Config] = []

    def launch(config, *args, **kwargs):
        found.append(config)
        raise KeyboardInterrupt

    monkeypatch.setattr(f"{module}.launch", launch)
    return found


def interrupted(action: Callable[[], object]) -> None:
    with pytest.raises(KeyboardInterrupt):
        action()


# What is launched.


def test_a_plan_is_launched_and_printed(tmp_path, monkeypatch, capsys, slow_devices):
    configs = launched(monkeypatch)
    interrupted(lambda: run(auto(tmp_path / "run", hardware=slow_devices)))
    [config] = configs
    assert (config.placement, config.hardware) == ("given", None)
    assert {role for pool in config.pools for role in pool.roles} >= {"actor", "critic", "reference"}
    assert sum(pool.devices for pool in config.pools) == 8
    shown = capsys.readouterr().out
    assert "8 devices: 1 machine of 8 x slow" in shown
    assert "the best plan, by call" in shown


def test_devices_that_are_here_are_planned_for_roughly(tmp_path, monkeypatch, capsys):
    configs = launched(monkeypatch)
    interrupted(lambda: run(auto(tmp_path / "run", devices=4)))
    assert 1 <= sum(pool.devices for pool in configs[0].pools) <= 4
    shown = " ".join(capsys.readouterr().out.split())
    assert "4 devices: 1 machine of 4 x cpu" in shown
    assert "figures of cpu: rough" in shown


def test_a_dry_run_shows_the_plan_and_writes_nothing(tmp_path, capsys, slow_devices):
    workdir = tmp_path / "run"
    assert not run(auto(workdir, hardware=slow_devices), dry_run=True).finished
    shown = capsys.readouterr().out
    assert "the best plan, by call" in shown
    assert "x cpu" in shown  # the table of settings follows
    assert not workdir.exists()


def test_a_cluster_is_planned_in_whole_hosts(refused, tmp_path, monkeypatch):
    configs = launched(monkeypatch)
    cluster = RayCluster(devices_per_host=8)
    interrupted(lambda: run(auto(tmp_path, cluster=cluster, hardware="a100x2")))
    assert all(pool.devices % 8 == 0 for pool in configs[0].pools)
    with refused():
        run(auto(tmp_path, cluster=cluster))
    with refused():
        run(auto(tmp_path, cluster=RayCluster(devices_per_host=64), hardware="a100x2"))


def test_what_does_not_fit_is_refused_before_anything_is_written(refused, tmp_path, monkeypatch):
    configs = launched(monkeypatch)
    with refused():
        run(auto(tmp_path / "run", hardware="v4"))
    assert configs == []
    assert not (tmp_path / "run").exists()


def test_a_cold_start_goes_before_a_run_whose_reference_has_a_layout(capsys):
    config = replace(get_config(), reference_layout=Layout(), workdir="nowhere")
    assert not run(config, dry_run=True).finished
    assert "cold start" in capsys.readouterr().out


def test_a_reference_split_further_than_the_actor_has_a_row_on_each_device():
    # Rows of 64 + 16 tokens: two fit the actor's budget, and the reference has eight data-parallel devices.
    actor = replace(training(tensor=4), tokens_per_microbatch=160)
    config = replace(get_config(), actor=actor, reference_layout=Layout(), devices=8)
    pool = ResourcePool("all", tuple(jax.devices()))
    builder = Builder(config, embedded_tokenizer(), pool, ("reference",), progress=lambda *_: None)
    assert builder.on.training("reference").tokens_per_microbatch == 8 * 80
    workers = builder.workers(Phase(config, ("reference",), total_updates=1))
    assert workers["reference"].place is not None
    alike = replace(config, actor=replace(actor, tokens_per_microbatch=1024))
    builder = Builder(alike, embedded_tokenizer(), pool, ("reference",), progress=lambda *_: None)
    assert builder.on.training("reference").tokens_per_microbatch == 1024


# A plan that is there already.


def test_a_plan_serves_again_where_devices_and_roles_are_the_same(tmp_path, capsys, slow_devices):
    config = auto(tmp_path, hardware=slow_devices)
    first = place(config, tmp_path, vocabulary=TOKENS)
    assert not (tmp_path / "plan.json").exists()
    first.write(tmp_path)
    assert read_plan(tmp_path).plan == first.plan
    assert read_plan(tmp_path).hardware["name"] == "slow"

    # The kind of device may change, as on another cluster; the plan stays what the run was started with.
    capsys.readouterr()
    again = place(replace(config, hardware="a100"), tmp_path, vocabulary=TOKENS)
    assert again.config == first.config == planned_config(config, first.plan)
    shown = capsys.readouterr().out
    assert shown == f"placement: reusing the plan {tmp_path}/plan.json\n"
    again.write(tmp_path)
    assert read_plan(tmp_path).hardware["name"] == "slow"

    fewer = place(replace(config, devices=4), tmp_path, vocabulary=TOKENS)
    shown = capsys.readouterr().out
    assert f"the plan {tmp_path}/plan.json is not reused: the plan is for 8 devices, but there are 4\n" in shown
    assert "the best plan, by call" in shown
    assert fewer.hardware.devices == 4
    place(replace(config, resume=False), tmp_path, vocabulary=TOKENS)
    assert "reusing" not in capsys.readouterr().out


def test_an_evaluation_takes_the_plan_of_its_run(tmp_path, capsys, slow_devices):
    config = auto(tmp_path, hardware=slow_devices)
    first = place(config, tmp_path, vocabulary=TOKENS)
    assert placed_for_evaluation(config, tmp_path) == config
    assert "evaluating on one pool" in capsys.readouterr().out
    first.write(tmp_path)
    assert placed_for_evaluation(config, tmp_path) == first.config
    assert placed_for_evaluation(replace(config, devices=2), tmp_path) == replace(config, devices=2)
    shown = capsys.readouterr().out
    assert "the plan is for 8 devices, but there are 2" in shown


# Whole runs.


@pytest.mark.slow
@pytest.mark.usefixtures("programs", "undrawn")
def test_a_run_that_goes_on_keeps_its_plan(tmp_path, capsys, slow_devices):
    """With a cold start; resumed after two steps, and evaluated."""
    config = auto(tmp_path / "run", hardware=slow_devices, steps=2)
    assert run(config).finished
    shown = capsys.readouterr().out
    assert "the best plan, by call" in shown
    workdir = tmp_path / "run"
    written = (workdir / "plan.json").read_bytes()
    assert (workdir / "plan.png").is_file()
    assert json.loads((workdir / "config.json").read_text())["placement"] == "auto"

    assert run(replace(config, steps=4)).finished
    shown = capsys.readouterr().out
    assert f"placement: reusing the plan {workdir}/plan.json" in shown
    assert "tiny: resuming after step 2 of 4" in shown
    assert (workdir / "plan.json").read_bytes() == written
    assert [record["step"] for record in records(workdir / "metrics.jsonl")] == [1, 2, 3, 4]

    metrics = evaluate_policy(config, policy=None, samples=1, show=0)
    assert metrics["eval/accuracy"] == records(workdir / "metrics.jsonl")[-1]["eval/accuracy"]


@pytest.mark.seeds
@pytest.mark.usefixtures("programs", "undrawn")
def test_a_planned_run_gives_the_numbers_of_one_device(tmp_path, slow_devices):
    run(placed(tmp_path / "alone"))
    planned = placed(tmp_path / "planned", devices=None, placement="auto", hardware=slow_devices)
    run(planned)
    assert read_plan(tmp_path / "planned").devices == 8
    assert_same_numbers(tmp_path / "planned", tmp_path / "alone")

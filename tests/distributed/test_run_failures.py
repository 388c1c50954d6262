"""Runs whose hosts are killed at random moments, or hang: an error in time, or equal numbers after a restart."""

import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
import uuid
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

import odd_hosts
import pytest
import ray_world
from placed_runs import assert_same_numbers, placed
from tiny_runs import numbers

import jaxrlhf
from jaxrlhf.config import Pool, RayCluster
from jaxrlhf.resharding.wire import TransferError
from jaxrlhf.single_controller import ray_backend
from jaxrlhf.single_controller.ray import cluster as ray_cluster
from jaxrlhf.single_controller.ray.cluster import connect, disconnect
from jaxrlhf.single_controller.ray.failure import (
    HostDied,
    HostFailure,
    HostHung,
    HostId,
    HostNotStarted,
    HostRaised,
)
from jaxrlhf.single_controller.ray.processes import HostProcesses
from jaxrlhf.trainer import run as controller

pytestmark = pytest.mark.usefixtures("programs", "undrawn")

SUPPORT = Path(__file__).parents[1] / "support"
STEPS = 4
BOUND_S = 30.0
CLUSTER = RayCluster(devices_per_host=1, platform="cpu", call_timeout_s=300.0)
# Two worlds of one process: JAX keeps compiled programs of the first process of a world alone.
POOLS = (Pool("policy", 1, ("actor",)), Pool("value", 1, ("critic", "reference", "reward")))
MOMENTS = {"start": 1, "generate_sequences": 2, "update_actor": 2, "save": 6, "any call": 20}
"""Calls during or after which a host is killed, and the number of calls after a launch to choose from."""
SMALLEST = """
from learning_run import learning
from jaxrlhf.config import GRPO

def get_config():
    return learning(GRPO, kl=None)
"""


@pytest.fixture(autouse=True)
def nothing_is_left(monkeypatch):
    """Mark the environment of every process of a test, including Ray's processes and those of reward functions."""
    mark = uuid.uuid4().hex
    monkeypatch.setenv("RAY_TEST_MARK", mark)
    yield
    limit = time.monotonic() + 20
    while ray_world.marked(mark) and time.monotonic() < limit:
        time.sleep(0.2)
    assert ray_world.marked(mark) == []


def tiny(workdir, **cluster):
    return placed(workdir, steps=STEPS, pools=POOLS, cluster=replace(CLUSTER, **cluster))


@pytest.fixture(scope="module")
def undisturbed(programs, tmp_path_factory):
    """Return the run in this process."""
    workdir = tmp_path_factory.mktemp("undisturbed")
    jaxrlhf.run(placed(workdir, steps=STEPS, pools=POOLS))
    return workdir


@dataclass
class Kill:
    """One kill -9, and its consequences."""

    call: str
    host: HostId
    killed_s: float = 0.0
    failed_s: float = 0.0
    failure: HostFailure | None = None

    def strike(self) -> None:
        self.killed_s = time.monotonic()
        os.kill(self.host.pid, signal.SIGKILL)


class Killer:
    """Killer of a host of each launch of a run, at a moment sampled with the next seed."""

    def __init__(self, patch: pytest.MonkeyPatch, seeds: list[int]) -> None:
        self.kills: list[Kill] = []
        self._seeds = list(seeds)
        self._left = 0  # calls until the kill
        ask, call, attempt = HostProcesses._ask, HostProcesses.call, controller._launch_and_run

        def watched_ask(pool, method, *args):
            if method == "start":
                self._reached("start", pool.hosts)
            return ask(pool, method, *args)

        def watched_call(pool, method, *args, **kwargs):
            self._reached(args[1] if method in ("call", "item") else method, pool.hosts)
            return call(pool, method, *args, **kwargs)

        def watched_attempt(*args, **kwargs):
            self._arm()
            try:
                return attempt(*args, **kwargs)
            except HostFailure as failure:
                self.kills[-1].failure, self.kills[-1].failed_s = failure, time.monotonic()
                raise

        patch.setattr(HostProcesses, "_ask", watched_ask)
        patch.setattr(HostProcesses, "call", watched_call)
        patch.setattr(controller, "_launch_and_run", watched_attempt)

    def _arm(self) -> None:
        if self._seeds:
            seed = self._seeds.pop(0)
            self._dice, self._moment = random.Random(seed), list(MOMENTS)[seed % len(MOMENTS)]
            self._left = self._dice.randint(1, MOMENTS[self._moment])

    def _reached(self, call: str, hosts) -> None:
        if self._left and self._moment in (call, "any call"):
            self._left -= 1
            if not self._left:
                host = self._dice.choice(hosts)
                kill = Kill(call, host)
                self.kills.append(kill)
                threading.Timer(self._dice.uniform(0, 0.3), kill.strike).start()


@pytest.mark.parametrize(
    "seeds", [pytest.param([2], marks=pytest.mark.slow), pytest.param([*range(5)], marks=pytest.mark.seeds)], ids=str
)
def test_run_resumes_after_repeated_kills(seeds, undisturbed, tmp_path, monkeypatch):
    connection = connect(CLUSTER)
    killer = Killer(monkeypatch, seeds)
    jaxrlhf.run(tiny(tmp_path, restarts=len(seeds)))
    disconnect(connection)
    for kill in killer.kills:
        print(f"{kill.failed_s - kill.killed_s:.1f} s after {kill.call}, {kill.host}: {kill.failure}")
        assert isinstance(kill.failure, HostDied)
        assert 0 <= kill.failed_s - kill.killed_s < BOUND_S
        assert kill.failure.host == kill.host
        assert "was killed" in kill.failure.cause
        assert re.match(r"\w+\.\w+: host 0 of pool '(policy|value)' \(.*, pid \d+\) died: ", str(kill.failure))
    assert len(killer.kills) == len(seeds)
    for seed, kill in zip(seeds, killer.kills, strict=True):
        assert list(MOMENTS)[seed] in (kill.call, "any call")
    assert_same_run(tmp_path, undisturbed)


def assert_same_run(workdir: Path, expected: Path) -> None:
    """Assert that two results are bitwise equal."""
    assert numbers(workdir / "metrics.jsonl") == numbers(expected / "metrics.jsonl")
    for name in ("samples.jsonl", "evaluation.jsonl"):
        assert (workdir / name).read_bytes() == (expected / name).read_bytes()
    saved, wanted = (sorted(path.name for path in (run / "checkpoints").iterdir()) for run in (workdir, expected))
    assert saved == wanted


class Sniper:
    """Killer of a pool's host at certain calls: the n-th call of each method.

    Attributes:
      struck: Methods in whose calls a host was killed.
      launches: Pools that were started, one after another.
      attempts: Times that the run was launched as a whole.
    """

    def __init__(self, patch: pytest.MonkeyPatch, pool: str, moments: dict[str, int]) -> None:
        self.struck, self.launches, self.attempts = [], [], 0
        left = dict(moments)
        call, start, attempt = HostProcesses.call, HostProcesses._start, controller._launch_and_run

        def watched_call(processes, method, *args, **kwargs):
            name = args[1] if method == "call" else method
            if processes.name == pool and name in left:
                left[name] -= 1
                if left[name] == 0:
                    self.struck.append(name)
                    os.kill(processes.hosts[0].pid, signal.SIGKILL)
            return call(processes, method, *args, **kwargs)

        def watched_start(processes, *args):
            self.launches.append(processes.name)
            return start(processes, *args)

        def watched_attempt(*args, **kwargs):
            self.attempts += 1
            return attempt(*args, **kwargs)

        patch.setattr(HostProcesses, "call", watched_call)
        patch.setattr(HostProcesses, "_start", watched_start)
        patch.setattr(controller, "_launch_and_run", watched_attempt)


GENERATION = (Pool("policy", 1, ("actor", "critic", "reference", "reward")), Pool("generation", 1, ("rollout",)))


@pytest.mark.parametrize(("cause", "attempts"), [(TransferError("10.0.0.1:5", "nothing"), 2), (KeyError("role"), 1)])
def test_call_during_a_failed_transfer_reports_the_same_failure(cause, attempts, tmp_path, monkeypatch):
    made = []

    def attempt(*_, **__):
        made.append(1)
        if len(made) == 1:
            raise HostRaised(HostId("generation", 0), "rollout.generate_sequences", "raised it") from cause
        return True

    monkeypatch.setattr(controller, "_launch_and_run", attempt)
    monkeypatch.setattr(controller, "last_metrics", lambda _: {})
    with nullcontext() if attempts > 1 else pytest.raises(HostRaised):
        jaxrlhf.run(tiny(tmp_path, restarts=1))
    assert len(made) == attempts


class Launched:
    """Processes of a launched pool; `number` counts the launches."""

    def __init__(self, number):
        self.hosts, self.closed = (HostId("generation", 0, pid=number),), False

    def call(self, method, *args, label):
        raise HostDied(self.hosts[0], label, "died")

    def close(self):
        self.closed = True


def test_pool_closed_during_a_relaunch_leaves_no_processes():
    launches = []

    def launch(*, hosts):
        launches.append(Launched(len(launches)))
        if len(launches) == 2:
            ranks.close()  # as another thread does, which sees the run end
        return launches[-1]

    ranks = ray_backend.RayRanks("generation", launch, print, hosts=1, relaunches=3)
    beside = ranks.as_launched()
    assert not ranks.relaunch(HostDied(launches[0].hosts[0], "rollout.generate_sequences", "died"))
    assert [one.closed for one in launches] == [True, True]
    ranks.protocols = {"rollout": {"fetch_weights": None}}
    with pytest.raises(HostDied) as died:
        beside("rollout", "fetch_weights", (), {})
    assert died.value.host is launches[0].hosts[0], "no call goes to processes that were launched after it"


def test_relaunched_pool_has_as_many_hosts_as_fit():
    asked = []

    def launch(*, hosts):
        asked.append(hosts)
        if len(asked) > 1 and hosts > 2:
            raise HostNotStarted(HostId("generation"), "generation.start", f"requires {hosts} host processes")
        return Launched(len(asked))

    ranks = ray_backend.RayRanks("generation", launch, print, hosts=6, multiple=2, relaunches=1)
    assert ranks.relaunch(HostDied(HostId("generation", 0, pid=1), "rollout.generate_sequences", "died"))
    assert asked == [6, 6, 4, 2]


@pytest.mark.slow
def test_generation_pool_is_relaunched_during_the_run(undisturbed, tmp_path, monkeypatch):
    sniper = Sniper(monkeypatch, "generation", {"generate_sequences": 3, "load_weights": 3, "take_metrics": 4})
    jaxrlhf.run(placed(tmp_path, steps=STEPS, pools=GENERATION, cluster=replace(CLUSTER, restarts=3)))
    assert sorted(sniper.struck) == ["generate_sequences", "load_weights", "take_metrics"]
    assert (sniper.attempts, sniper.launches.count("policy"), sniper.launches.count("generation")) == (1, 1, 4)
    assert_same_run(tmp_path, undisturbed)


@pytest.mark.seeds  # shown above without processes
def test_generation_pool_is_relaunched_with_fewer_hosts(undisturbed, tmp_path, monkeypatch):
    sniper, asked, place = Sniper(monkeypatch, "generation", {"generate_sequences": 3}), [], ray_cluster.place

    def with_less_room(name, hosts, *args, **kwargs):
        asked.append((name, hosts))
        if name == "generation" and hosts > 1 and sniper.struck:
            raise HostNotStarted(HostId(name), f"{name}.start", f"requires {hosts} host processes")
        return place(name, hosts, *args, **kwargs)

    monkeypatch.setattr(ray_cluster, "place", with_less_room)
    pools = (GENERATION[0], Pool("generation", 2, ("rollout",)))
    jaxrlhf.run(placed(tmp_path, steps=STEPS, pools=pools, cluster=replace(CLUSTER, restarts=1)))
    assert sniper.attempts == 1
    assert [hosts for name, hosts in asked if name == "generation"] == [2, 2, 1]
    assert_same_numbers(tmp_path, undisturbed)


@pytest.mark.seeds
def test_responses_of_a_dead_host_are_restarted_by_the_newest_policy(tmp_path, monkeypatch):
    sniper = Sniper(monkeypatch, "generation", {"continue_groups": 3, "fetch_weights": 4})
    config = placed(tmp_path, steps=STEPS, pools=GENERATION, cluster=replace(CLUSTER, restarts=2))
    config = replace(config, rollout=replace(config.rollout, staleness=2, over_provision=1.5))
    jaxrlhf.run(config)
    assert sniper.struck == ["continue_groups", "fetch_weights"] and sniper.attempts == 1
    logged = numbers(tmp_path / "metrics.jsonl")
    assert [record["step"] for record in logged] == [*range(1, STEPS + 1)]
    assert all(record["staleness/age_max"] <= 2 for record in logged)
    assert all(record["staleness/put_off_groups"] == 4 for record in logged)  # as many as before


@pytest.mark.seeds
def test_hung_host_is_found(undisturbed, tmp_path, monkeypatch):
    monkeypatch.setattr(ray_backend, "make_host", odd_hosts.sleeping)
    start = time.monotonic()
    with pytest.raises(HostHung) as info:
        jaxrlhf.run(tiny(tmp_path, call_timeout_s=20.0))
    assert time.monotonic() - start < 20 + 2 * BOUND_S
    assert (info.value.label, info.value.host.pool) == ("actor.update_actor", "policy")
    assert "did not answer within 20." in str(info.value)
    assert "in call_or_sleep" in str(info.value)
    assert "time.sleep(1)" in str(info.value)


@pytest.mark.slow
def test_message_after_a_kill(tmp_path):
    config = tmp_path / "smallest.py"
    config.write_text(SMALLEST)
    arguments = f"--config {config} --workdir {tmp_path / 'run'} --cluster ray --devices 2 --steps 500"
    process = subprocess.Popen(
        [sys.executable, "-u", "-m", "jaxrlhf.train", *arguments.split()],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "1", "PYTHONPATH": str(SUPPORT)},
    )
    shown = ""
    while not re.search(r"step +1/500", shown):
        line = process.stdout.readline()
        assert line, process.stderr.read()
        shown += line
    log = tmp_path / "run" / "hosts" / "all-1.log"
    pid = int(re.search(r"pid (\d+)", log.read_text())[1])
    os.kill(pid, signal.SIGKILL)
    start = time.monotonic()
    _, error = process.communicate(timeout=60)
    assert time.monotonic() - start < BOUND_S
    assert process.returncode == 1
    found = re.match(rf"error: \w+\.\w+: host 1 of pool 'all' \([\d.]+, pid {pid}\) died: (.*)\n", error)
    assert "It crashed or was killed" in found[1]
    assert re.search(r"\nin step \d+ of \w+, while \w+", error)
    assert "Traceback" not in error
    assert f"{log} ends with:" in error

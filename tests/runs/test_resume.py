"""A run that is killed, or told to stop, at any moment gives the numbers of one that was not."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tiny_runs import numbers, records

SUPPORT = Path(__file__).parents[1] / "support"
KILLED = -signal.SIGKILL


@pytest.fixture(scope="module")
def start(programs, tmp_path_factory):
    """Starts `jaxrlhf.train`, which `dying_run.py` has die where a signal is given, and waits for its end."""
    command = [sys.executable, str(SUPPORT / "dying_run.py")]
    printed, errors = (tmp_path_factory.mktemp("printed") / name for name in ("out", "err"))
    with subprocess.Popen(command, env=os.environ, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as forks:

        def run(workdir: Path, *dying: object, settings: str = "") -> subprocess.CompletedProcess:
            arguments = ["--config", str(SUPPORT / "tiny_runs.py"), "--workdir", str(workdir), *settings.split()]
            request = [*map(str, dying or ("", "", 0)), *arguments]
            forks.stdin.write(json.dumps([str(printed), str(errors), request]) + "\n")
            forks.stdin.flush()
            code = int(forks.stdout.readline())
            return subprocess.CompletedProcess(request, code, printed.read_text(), errors.read_text())

        yield run
        forks.stdin.close()


@pytest.fixture(scope="module")
def undisturbed(start, tmp_path_factory) -> Path:
    workdir = tmp_path_factory.mktemp("undisturbed")
    done = start(workdir)
    assert done.returncode == 0, done.stderr
    return workdir


def saved(directory: Path) -> set[int]:
    """Steps of the checkpoints that are complete."""
    folders = directory.glob("checkpoints/step_*")
    return {int(folder.name.removeprefix("step_")) for folder in folders if "tmp" not in folder.name}


def unfinished(directory: Path) -> list[Path]:
    return [folder for folder in directory.glob("checkpoints/*") if "tmp" in folder.name]


def assert_same_run(workdir: Path, other: Path) -> None:
    for stage in ("cold_start", "."):
        mine, theirs = numbers(workdir / stage / "metrics.jsonl"), numbers(other / stage / "metrics.jsonl")
        assert [record["step"] for record in mine] == [record["step"] for record in theirs]
        for record, expected in zip(mine, theirs, strict=True):
            assert record == expected
    for name in ("samples.jsonl", "evaluation.jsonl"):
        assert (workdir / name).read_bytes() == (other / name).read_bytes()
    assert saved(workdir) == saved(other)
    assert not unfinished(workdir)


@pytest.mark.slow
def test_killed_five_times(start, undisturbed, tmp_path):
    cold = tmp_path / "cold_start"

    # The second update of the cold start, which makes two and saves at its end.
    assert start(tmp_path, "SIGKILL", "update", 2).returncode == KILLED
    assert (saved(cold), len(records(cold / "metrics.jsonl"))) == (set(), 1)

    # Two updates of the cold start again, then the second of the first step's two.
    assert start(tmp_path, "SIGKILL", "update", 4).returncode == KILLED
    assert (saved(cold), saved(tmp_path), records(tmp_path / "metrics.jsonl")) == ({2}, set(), [])

    # The cold start is not made again; the save after step 2 is cut off as it writes.
    assert start(tmp_path, "SIGKILL", "write", 1).returncode == KILLED
    assert saved(tmp_path) == set()
    assert unfinished(tmp_path)
    assert len(records(tmp_path / "metrics.jsonl")) >= 2

    # Step 2 is saved now; the save after step 4 is cut off before its last rename.
    assert start(tmp_path, "SIGKILL", "commit", 2).returncode == KILLED
    assert saved(tmp_path) == {2}
    assert unfinished(tmp_path)
    assert len(records(tmp_path / "metrics.jsonl")) >= 4

    # From step 2: two updates of each of steps 3 and 4, then the second of step 5.
    assert start(tmp_path, "SIGKILL", "update", 6).returncode == KILLED
    assert saved(tmp_path) >= {2}
    assert len(records(tmp_path / "metrics.jsonl")) == 4

    done = start(tmp_path)
    assert done.returncode == 0, done.stderr
    assert "tiny (cold start): resuming after step 2 of 2" in done.stdout
    assert "tiny: resuming after step " in done.stdout
    assert "step 1/6" not in done.stdout
    assert_same_run(tmp_path, undisturbed)


@pytest.mark.seeds
def test_killed_25_times_at_random(start, undisturbed, tmp_path):
    dice, started = random.Random(0), time.monotonic()
    assert start(tmp_path / "whole").returncode == 0
    ticks, kills, workdir = int(100 * (time.monotonic() - started)), 0, tmp_path / "0"
    while kills < 25:
        done = start(workdir, "SIGKILL", "clock", dice.randint(1, ticks))
        if done.returncode:
            assert done.returncode == KILLED, done.stderr
            kills += 1
        else:  # started again from nothing: a run that has ended has nothing to lose
            assert_same_run(workdir, undisturbed)
            workdir = tmp_path / str(kills)
    assert start(workdir).returncode == 0
    assert_same_run(workdir, undisturbed)


@pytest.mark.slow
def test_a_damaged_checkpoint_stops_the_run_or_is_passed_over(start, undisturbed, tmp_path):
    workdir = tmp_path / "run"
    shutil.copytree(undisturbed, workdir)
    *others, newest = sorted(saved(workdir))
    assert newest == 6 and others
    [file] = (workdir / "checkpoints" / "step_6" / "critic_optimizer").glob("manifest.ocdbt")
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 4
    file.write_bytes(content)
    refused = start(workdir)
    assert refused.returncode == 2
    [line] = [line for line in refused.stderr.splitlines() if line.startswith("error: ")]
    assert f"step 6 is damaged: {file}" in line
    assert f"other checkpoints: steps {', '.join(map(str, others))}." in line
    done = start(workdir, settings="--checkpoint.on-damage previous")
    assert done.returncode == 0, done.stderr
    assert f"moved the checkpoint to {workdir}/checkpoints_damaged/step_6" in done.stdout
    assert_same_run(workdir, undisturbed)


@pytest.mark.slow
def test_a_full_disk_is_one_message_and_a_copy_goes_on(start, undisturbed, tmp_path):
    """On a file system of 1.2 MB, while two checkpoints of 0.6 MB would be kept."""
    small = tmp_path / "small"
    small.mkdir()
    mount = 'mount -t tmpfs -o size=1200k tmpfs "$1" && shift && "$@"'
    mounted = ["unshare", "-Urm", "sh", "-c", mount, "sh", str(small)]
    if subprocess.run([*mounted, "true"], capture_output=True).returncode:
        pytest.skip("this user can mount nothing")
    train = [sys.executable, "-m", "jaxrlhf.train", "--config", str(SUPPORT / "tiny_runs.py"), "--workdir", "$0/run"]
    script = f'{" ".join(train)}; code=$?; cp -r "$0/run" {tmp_path}/copy; exit $code'
    environment = {**os.environ, "PYTHONPATH": f"{SUPPORT}:{SUPPORT.parents[1]}"}
    done = subprocess.run([*mounted, "sh", "-c", script, str(small)], env=environment, capture_output=True, text=True)
    first, *others = done.stderr.splitlines()
    assert done.returncode == 1 and first.startswith(f"error: no space left to write {small}/run/")
    assert len(others) <= 2 and "copy the workdir to another disk, then repeat the command" in others[-1]
    done = start(tmp_path / "copy")
    assert done.returncode == 0, done.stderr
    assert_same_run(tmp_path / "copy", undisturbed)


@pytest.mark.slow
def test_stopped_three_times(start, undisturbed, tmp_path):
    # In the first step of the cold start.
    done = start(tmp_path, "SIGTERM", "update", 1)
    assert (done.returncode, done.stderr) == (128 + signal.SIGTERM, "")
    assert f"stopped after saving; the same command continues from {tmp_path}" in done.stdout
    assert (saved(tmp_path / "cold_start"), saved(tmp_path)) == ({1}, set())

    # Half a cold start is something to resume, too.
    done = start(tmp_path, settings="--no-resume")
    assert done.returncode == 2
    assert "already holds a run, but resume=False" in done.stderr

    # In the last step of the cold start: the main stage has not started.
    done = start(tmp_path, "SIGTERM", "update", 1)
    assert (done.returncode, done.stderr) == (128 + signal.SIGTERM, "")
    assert "stopped after saving" in done.stdout
    assert (saved(tmp_path / "cold_start"), (tmp_path / "metrics.jsonl").exists()) == ({2}, False)

    # Four updates of steps 1 and 2, then the first of step 3; by Ctrl-C this time, which ends what is to follow too.
    done = start(tmp_path, "SIGINT", "update", 5)
    stopped = f"stopped after saving; the same command continues from {tmp_path}\n"
    assert (done.returncode, done.stderr) == (128 + signal.SIGINT, stopped)
    assert "finishing and saving step 3; press Ctrl-C again to stop immediately" in done.stdout
    assert max(saved(tmp_path)) == 3
    assert len(records(tmp_path / "metrics.jsonl")) == 3
    assert not (tmp_path / "curve.png").exists()

    done = start(tmp_path)
    assert done.returncode == 0, done.stderr
    assert_same_run(tmp_path, undisturbed)

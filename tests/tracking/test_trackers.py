"""Trackers offline: their stores have the metrics and samples of a run, before and after a resume."""

import html
import importlib
import json
import os
import sqlite3
import struct
import subprocess
import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import get_args

import pytest
from tiny_runs import get_config

import jaxrlhf
from jaxrlhf.config import Refusal
from jaxrlhf.config.run import TrackerName
from jaxrlhf.tracking import Sample, TrackedRun, Trackers, require_packages
from jaxrlhf.tracking.trackers.trackers import KNOWN, ROWS

HOSTILE = "<script>alert(1)</script> | a\nb"
RUN = f"""
import sys
from pathlib import Path
from jaxrlhf.tracking import Sample, TrackedRun, Trackers

name, folder = sys.argv[1], Path(sys.argv[2])

def track(steps, resumed):
    run = TrackedRun("tiny", folder, {{"steps": 5, "actor": {{"lora": None}}}}, resumed)
    trackers = Trackers([name], run)
    for step in steps:
        trackers.log(step, {{"score/mean": step / 7, "eval/pass@8": 0.5, "kl/ref": float("nan")}})
        responses = [Sample(step, f"question {{n}}", {HOSTILE!r}, 0.5, 3, 4, False) for n in range(20)]
        trackers.samples("samples", responses)
    trackers.close()

track([1, 2, 3], None)
track([3, 4], 2)  # killed at step 3, and resumed from a checkpoint of step 2
track([1], None)  # another run
"""
OFFLINE = {
    **{"WANDB_MODE": "offline", "WANDB_SILENT": "true", "SWANLAB_MODE": "offline", "MLFLOW_ALLOW_FILE_STORE": "true"},
}
WHOLE = [(1, 1 / 7), (2, 2 / 7), (3, 3 / 7), (3, 3 / 7), (4, 4 / 7)]


def tracked(name: str, folder: Path) -> dict[str, str]:
    """Track runs in another process, with the tracker's files below `folder`; return the ids."""
    places = {"MLFLOW_TRACKING_URI": f"file://{folder}/mlruns", "TRACKIO_DIR": str(folder / "trackio")}
    done = subprocess.run(
        [sys.executable, "-c", RUN, name, str(folder)],
        env=os.environ | OFFLINE | places,
        cwd=folder,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "the run continues" not in done.stderr, done.stderr
    return json.loads((folder / "trackers.json").read_text())


def needs(package: str):
    """Mark a test as slow, and skip the test if a tracker's package is not installed."""
    absent = pytest.mark.skipif(find_spec(package) is None, reason=f"pip install 'jaxrlhf[{package}]'")
    return lambda test: pytest.mark.slow(absent(test))


def log_records(path: Path) -> list[bytes]:
    """Return the records of a file in LevelDB's log format: a header of 7 bytes, blocks of 32 KiB, records in parts."""
    data, at, whole, records = path.read_bytes(), 7, b"", []
    while at + 7 <= len(data):
        left = 32768 - at % 32768
        if left < 7:
            at += left
            continue
        length, kind = struct.unpack("<HB", data[at + 4 : at + 7])
        whole += data[at + 7 : at + 7 + length]
        if kind in (1, 4):
            records, whole = [*records, whole], b""
        at += 7 + length
    return records


def check_table(columns: list[str], rows: list[list]) -> None:
    assert len(rows) == ROWS
    assert [dict(zip(columns, row, strict=True))["prompt"] for row in rows[:3]] == [f"question {n}" for n in (0, 2, 5)]
    assert dict(zip(columns, rows[0], strict=True))["response"] == HOSTILE


@pytest.mark.parametrize(("resumed", "hidden_from"), [(4, 5), (None, 0)])
def test_tensorboard_hides_events_of_an_earlier_run(tmp_path, resumed, hidden_from):
    from tensorboardX.proto import event_pb2

    board = Trackers(["tensorboard"], TrackedRun("tiny", tmp_path, {}, resumed))
    board.log(5, {"score/mean": 0.25, "kl/ref": float("nan")})
    board.samples("samples", [Sample(5, "question", HOSTILE, None, 3, 4, False)])
    board.close()
    (file,) = (tmp_path / "tensorboard").iterdir()
    data, events = file.read_bytes(), []
    while data:  # as in TFRecord files
        length = int.from_bytes(data[:8], "little")
        events.append(event_pb2.Event.FromString(data[12 : 12 + length]))
        data = data[16 + length :]
    values = [(event.step, value) for event in events for value in event.summary.value]
    assert [(step, one.tag, one.simple_value) for step, one in values if not one.HasField("tensor")] == [
        (5, "score/mean", 0.25)
    ]
    [start] = [event for event in events if event.session_log.status == event.session_log.START]
    assert start.step == hidden_from
    [table] = [one.tensor.string_val[0].decode() for _, one in values if one.HasField("tensor")]
    head, line, row = table.splitlines()
    assert head.count("|") == line.count("|") == row.count("|")
    assert html.escape("<script>") in row and "<script>" not in row


@pytest.mark.slow
def test_tensorboard_does_not_load_torch(tmp_path):
    code = f"""
import sys
from pathlib import Path
from jaxrlhf.tracking import TrackedRun, Trackers
board = Trackers(["tensorboard"], TrackedRun("tiny", Path({str(tmp_path)!r}), {{}}))
board.log(1, {{"score": 0.5}})
board.close()
assert "torch" not in sys.modules
import torch  # whoever wants it still gets it
"""
    subprocess.run([sys.executable, "-c", code], check=True)
    assert list((tmp_path / "tensorboard").glob("*tfevents*"))


@needs("wandb")
def test_wandb_stores_and_resumes_a_run(tmp_path):
    from wandb.proto.wandb_internal_pb2 import Record

    last = tracked("wandb", tmp_path)["wandb"]
    parts = sorted((tmp_path / "wandb").glob("offline-run-*/*.wandb"), key=lambda path: path.stat().st_mtime_ns)
    seen = []
    for path in parts:
        for record in map(Record.FromString, log_records(path)):
            items = {"/".join(item.nested_key) or item.key: item.value_json for item in record.history.item}
            if "score/mean" in items:
                assert "kl/ref" not in items and json.loads(items["eval/pass@8"]) == 0.5
                seen.append((json.loads(items["step"]), json.loads(items["score/mean"])))
    assert seen == [*WHOLE, (1, 1 / 7)]
    first, resumed, another = [path.stem.removeprefix("run-") for path in parts]
    assert first == resumed and another == last != first
    tables = [json.loads(file.read_text()) for file in (tmp_path / "wandb").rglob("*.table.json")]
    assert len(tables) == 6
    for table in tables:
        check_table(table["columns"], table["data"])


@needs("mlflow")
@pytest.mark.filterwarnings("ignore")
def test_mlflow_stores_and_resumes_a_run(tmp_path, monkeypatch):
    from mlflow import MlflowClient

    last = tracked("mlflow", tmp_path)["mlflow"]
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    client = MlflowClient(f"file://{tmp_path}/mlruns")
    another, first = client.search_runs([client.get_experiment_by_name("jaxrlhf").experiment_id])
    assert another.info.run_id == last and first.info.status == another.info.status == "FINISHED"
    history = client.get_metric_history(first.info.run_id, "score/mean")
    assert sorted((one.step, one.value) for one in history) == WHOLE
    assert set(first.data.metrics) == {"score/mean", "eval/pass-8"}
    assert first.data.params == {"steps": "5", "actor.lora": "None"}
    [table] = list((tmp_path / "mlruns").rglob(f"{first.info.run_id}/artifacts/samples/step_4.json"))
    check_table(**dict(zip(("columns", "rows"), json.loads(table.read_text()).values(), strict=True)))


@needs("swanlab")
def test_swanlab_stores_and_resumes_a_run(tmp_path):
    last = tracked("swanlab", tmp_path)["swanlab"]
    parts = sorted((tmp_path / "swanlab").glob("run-*/*.swanlab"), key=lambda path: path.stat().st_mtime_ns)
    first, resumed, another = [path.stem.removeprefix("run-") for path in parts]
    assert first == resumed and another == last != first
    for path, steps in zip(parts, ([1, 2, 3], [3, 4], [1]), strict=True):
        scores = [record for record in log_records(path) if b"score/mean" in record]
        for step in range(1, 5):
            there = any(struct.pack("<d", step / 7) in record for record in scores)
            assert there == (step in steps), (path, step)
    tables = [json.loads(file.read_text()) for file in (tmp_path / "swanlab").rglob("echarts/*.json")]
    assert len(tables) == 6
    for table in tables:
        check_table([column["field"] for column in table["colDefs"]], [list(row.values()) for row in table["rowData"]])


@needs("trackio")
def test_trackio_stores_and_resumes_a_run(tmp_path):
    last = tracked("trackio", tmp_path)["trackio"]
    with sqlite3.connect(tmp_path / "trackio" / "jaxrlhf.db") as base:
        rows = base.execute("select run_id, run_name, step, metrics from metrics order by id").fetchall()
    base.close()
    runs: dict[str, list] = {}
    for _, run, step, metrics in rows:
        runs.setdefault(run, []).append((step, json.loads(metrics)))
    first, another = runs
    assert another == last and first.startswith("tiny-")
    assert [(step, one["score/mean"]) for step, one in runs[first] if "score/mean" in one] == WHOLE
    tables = [one["samples"]["_value"] for _, one in runs[first] if "samples" in one]
    assert len(tables) == 5
    for table in tables:
        check_table(list(table[0]), [list(row.values()) for row in table])


def test_every_configured_tracker_exists():
    assert set(get_args(TrackerName)) == set(KNOWN)


def test_missing_package_is_refused_with_its_install_command(tmp_path, monkeypatch, refused):
    monkeypatch.setattr("jaxrlhf.tracking.trackers.trackers.find_spec", lambda name: None)
    for names in (("wandb",), ("tensorboard", "swanlab")):
        with refused():
            jaxrlhf.run(replace(get_config(), workdir=str(tmp_path / "run"), trackers=names))
    assert not (tmp_path / "run").exists()
    with refused():
        replace(get_config(), trackers=("comet",))


def test_data_folder_of_a_tracker_is_no_package(tmp_path, monkeypatch):
    (tmp_path / "left_by_a_tracker").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr("jaxrlhf.tracking.trackers.trackers.PACKAGES", {"wandb": "left_by_a_tracker"})
    with pytest.raises(Refusal, match="trackers=wandb: not installed"):
        require_packages(["wandb"])
    (tmp_path / "left_by_a_tracker" / "__init__.py").touch()
    importlib.invalidate_caches()
    require_packages(["wandb"])


def test_failing_service_does_not_stop_the_run(tmp_path, monkeypatch, caplog):
    class Down:
        def __init__(self, run: TrackedRun) -> None:
            pass

        def log(self, step, metrics):
            raise ConnectionError("no route to host")

        table = close = log

    taken = []

    class Up(Down):
        def log(self, step, metrics):
            taken.append(step)

        def table(self, step, name, rows):
            taken.append((step, name, len(rows)))

        def close(self):
            taken.append("closed")

    monkeypatch.setattr("jaxrlhf.tracking.trackers.trackers.KNOWN", {"down": Down, "up": Up})
    trackers = Trackers(["down", "up"], TrackedRun("tiny", tmp_path, {}))
    trackers.log(3, {"score/mean": 1.0})
    trackers.samples("samples", [Sample(3, "a", "b", 1.0, 1, 1, False)])
    trackers.close()
    assert taken == [3, (3, "samples", 1), "closed"]
    assert "down failed to store the metrics of step 3; the run continues: ConnectionError('no route" in caplog.text


def test_open_trackers_are_closed_if_another_fails_to_open(tmp_path, monkeypatch, refused):
    closed = []

    class Opens:
        def __init__(self, run: TrackedRun) -> None:
            pass

        def close(self):
            closed.append(True)

    def refuses(run: TrackedRun):
        raise PermissionError("no key")

    monkeypatch.setattr("jaxrlhf.tracking.trackers.trackers.KNOWN", {"a": Opens, "b": refuses})
    with refused():
        Trackers(["a", "b"], TrackedRun("tiny", tmp_path, {}))
    assert closed == [True]

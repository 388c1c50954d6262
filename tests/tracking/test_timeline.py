"""Trace of a run: valid JSON, also after a kill and a resume."""

import json
import time
from pathlib import Path

import pytest

from jaxrlhf.tracking import Call, TimelineFile


def events(path: Path) -> list[dict]:
    """Return the events of a closed trace, read as JSON."""
    return json.loads(path.read_text())


def test_each_role_has_its_line(tmp_path):
    file = TimelineFile(tmp_path / "timeline.json")
    now = time.perf_counter()
    file.append(
        [
            Call("actor", "generate_sequences", now - 2, now - 1.5, "a"),
            Call("reward", "compute_reward", now - 1, now, "b"),
        ]
    )
    file.append([Call("actor", "update_actor", now, now + 0.25, "a")])
    file.close()
    written = events(tmp_path / "timeline.json")
    names = {event["tid"]: event["args"]["name"] for event in written if event["ph"] == "M"}
    calls = [(names[event["tid"]], event["name"], event["dur"]) for event in written if event["ph"] == "X"]
    assert calls == [
        ("actor", "generate_sequences", pytest.approx(0.5e6, rel=1e-6)),
        ("reward", "compute_reward", pytest.approx(1e6, rel=1e-6)),
        ("actor", "update_actor", pytest.approx(0.25e6, rel=1e-6)),
    ]
    assert abs(written[1]["ts"] / 1e6 - (time.time() - 2)) < 5


def test_resumed_trace_removes_a_truncated_event(tmp_path):
    path = tmp_path / "timeline.json"
    first = TimelineFile(path)
    first.append([Call("actor", "a", 0, 1, "all")])
    path.write_bytes(path.read_bytes() + b'{"ph": "X", "na')  # the first was killed
    second = TimelineFile(path, resumed=True)
    second.append([Call("actor", "b", 2, 3, "all")])
    second.close()
    third = TimelineFile(path, resumed=True)  # the second came to its end
    third.append([Call("actor", "c", 4, 5, "all")])
    third.close()
    assert [event["name"] for event in events(path) if event["ph"] == "X"] == ["a", "b", "c"]
    first.close()


def test_trace_without_calls_is_valid_and_can_be_resumed(tmp_path):
    path = tmp_path / "timeline.json"
    TimelineFile(path).close()
    TimelineFile(path, resumed=True).close()
    assert events(path) == []
    second = TimelineFile(path, resumed=True)
    second.append([Call("actor", "b", 2, 3, "all")])
    second.close()
    assert [event["name"] for event in events(path)] == ["thread_name", "b"]


def test_role_keeps_its_line_in_a_resumed_trace(tmp_path):
    path = tmp_path / "timeline.json"
    for resumed, roles in ((False, ("actor", "reward")), (True, ("reward", "critic", "actor"))):
        file = TimelineFile(path, resumed=resumed)
        file.append(Call(role, "a", 0, 1, "all") for role in roles)
        file.close()
    written = events(path)
    names = {(event["tid"], event["args"]["name"]) for event in written if event["ph"] == "M"}
    assert names == {(0, "actor"), (1, "reward"), (2, "critic")}
    assert [event["tid"] for event in written if event["ph"] == "X"] == [0, 1, 1, 2, 0]

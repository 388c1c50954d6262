"""The viewer's server: the files that it reads, the files that it refuses, and explanations of metrics."""

import json
import os
import re
import subprocess
import sys
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from viewed_runs import append_steps, write_runs

from jaxrlhf.viewer import ViewServer
from jaxrlhf.viewer.explanations import explanations
from jaxrlhf.viewer.run_files import RunFiles
from tests.docs.test_metrics import PAGE as METRICS_PAGE
from tests.docs.test_metrics import names, pattern


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    root = tmp_path_factory.mktemp("here") / "runs"
    write_runs(root, steps=5)
    outside = root.parent / "outside"
    outside.mkdir()
    (outside / "metrics.jsonl").write_text('{"step": 1, "secret": 7}\n')
    (root / "link").symlink_to(outside)
    (root / "one" / "deeper").mkdir()
    (root / "one" / "deeper" / "metrics.jsonl").symlink_to(outside / "metrics.jsonl")
    with ViewServer(RunFiles(root), port=0) as server:
        yield root, server.address


def get(address: str, **headers: str) -> tuple[int, str, dict[str, str]]:
    try:
        with urllib.request.urlopen(urllib.request.Request(address, headers=headers)) as answer:
            return answer.status, answer.read().decode(), dict(answer.headers)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode(), dict(error.headers)


def test_runs_and_their_steps_are_read(runs):
    root, address = runs
    answer = json.loads(get(f"{address}/api/runs")[1])
    assert [(run["run"], run["last_step"], run["has"]) for run in answer["runs"]] == [
        ("one", 5, ["samples", "evaluation"]),
        ("two", 5, ["samples", "evaluation"]),
    ]
    answer = json.loads(get(f"{address}/api/metrics?run=one&after=3")[1])
    assert answer["before"] == 3 and [record["step"] for record in answer["records"]] == [4, 5]
    assert answer["records"][0]["odd"] is None
    assert list(json.loads(get(f"{address}/api/steps?run=two&kind=evaluation")[1])) == ["0", "2", "5"]
    samples = json.loads(get(f"{address}/api/samples?run=two&kind=samples&step=4")[1])
    written = [json.loads(line) for line in (root / "two" / "samples.jsonl").read_text().splitlines()]
    assert samples == [sample for sample in written if sample["step"] == 4] and len(samples) == 8
    assert json.loads(get(f"{address}/api/settings?run=one")[1])["rollout.prompts_per_step"] == 8
    calls = json.loads(get(f"{address}/api/timeline?run=one")[1])
    assert len(calls) == 15 and {call["role"] for call in calls} == {"actor", "reward"}


@pytest.mark.parametrize(
    "path",
    [
        *(
            "/api/metrics?run=../outside",
            "/api/metrics?run=link",
            "/api/metrics?run=one/deeper",
            "/api/metrics?run=/etc",
        ),
        *("/api/samples?run=one&kind=../../outside/metrics.jsonl&step=1", "/api/settings?run=..", "/../view.py"),
        *("/api/metrics?run=one%2F..%2F..%2Foutside", "/%2e%2e/app.py", "/page/index.html", "/metrics.md"),
    ],
)
def test_nothing_outside_the_folder_is_read(runs, path):
    status, text, _ = get(runs[1] + path)
    assert status == 404 and "secret" not in text


def test_invalid_requests_get_an_error(runs):
    for path in ("/api/metrics", "/api/samples?run=one&kind=samples&step=x"):
        status, text, _ = get(runs[1] + path)
        assert status == 400 and "invalid request" in text


def test_other_host_names_and_foreign_scripts_are_refused(runs):
    for host in ("evil.example", "evil.example:99999"):
        assert get(f"{runs[1]}/api/runs", Host=host)[0] == 400
    status, text, headers = get(f"{runs[1]}/")
    assert status == 200 and "script-src 'self'" in headers["content-security-policy"]
    assert re.findall(r"(?:src|href)=\"(.*?)\"", text) == ["data:,", "view.css", "view.js"]


def test_script_prints_listening_ports(runs):
    command = [sys.executable, "-m", "scripts.tools.listening", str(os.getpid())]
    done = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, check=True)
    port = runs[1].rpartition(":")[2]
    assert re.search(rf"{os.getpid()}  127\.0\.0\.1:{port} +this machine only", done.stdout)


def test_file_truncated_by_a_resume_is_indexed_again(tmp_path):
    files = RunFiles(write_runs(tmp_path, steps=5))
    assert len(files.samples("one", "samples", 5)) == 8
    append_steps(tmp_path / "one", range(4, 8), 0, resumed_step=3)
    assert list(files.steps("one", "samples")) == [1, 2, 3, 4, 5, 6, 7]
    assert [sample["step"] for sample in files.samples("one", "samples", 6)] == [6] * 8
    assert files.samples("one", "samples", 99) == []
    with open(tmp_path / "one" / "samples.jsonl", "a") as file:
        file.write('{"step": 8, "prom')  # being written
    assert list(files.steps("one", "samples"))[-1] == 7


def test_concurrent_requests_equal_sequential_requests(tmp_path):
    root = write_runs(tmp_path, steps=100)
    alone = RunFiles(root)
    steps = list(alone.steps("one", "samples"))
    expected = [alone.samples("one", "samples", step) for step in steps]
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)  # many switches between threads
    try:
        with ThreadPoolExecutor(8) as threads:
            for _ in range(10):
                files = RunFiles(root)
                found = threads.map(lambda step, files=files: files.samples("one", "samples", step), steps)
                assert list(found) == expected
    finally:
        sys.setswitchinterval(before)


def test_settings_behind_a_link_are_not_read(tmp_path):
    root = write_runs(tmp_path / "runs", steps=1)
    (tmp_path / "outside.json").write_text('{"secret": 7}')
    (root / "one" / "config.json").unlink()
    (root / "one" / "config.json").symlink_to(tmp_path / "outside.json")
    assert RunFiles(root).settings("one") == {}


def test_foreign_file_hides_no_run(tmp_path):
    write_runs(tmp_path, steps=2)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "metrics.jsonl").write_text('{"loss": 1}\n{"loss": 2}\n')
    (tmp_path / "folder" / "metrics.jsonl").mkdir(parents=True)
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "metrics.jsonl").write_text('{"step": 1, "a": ' + "[" * 100_000 + "]" * 100_000 + "}\n")
    (tmp_path / "pipe").mkdir()
    os.mkfifo(tmp_path / "pipe" / "metrics.jsonl")
    (tmp_path / "gone").mkdir()
    (tmp_path / "gone" / "metrics.jsonl").symlink_to(tmp_path / "nothing")
    runs = {run["run"]: run for run in RunFiles(tmp_path).runs()}
    assert {name for name, run in runs.items() if "unreadable" not in run} == {"one", "two"}
    assert runs.keys() - {"one", "two"} == {"other", "folder", "deep", "pipe"}
    assert "no regular file" in runs["pipe"]["unreadable"]
    assert "line 1, is not a JSON object with a 'step'" in runs["other"]["unreadable"]


def test_run_of_invalid_files_hides_no_other(tmp_path):
    write_runs(tmp_path, steps=2)
    for name, line in (
        (b"endless", '{"step": Infinity}'),
        (b"\xff", '{"step": 1}'),
        (b"large", f'{{"step": {10**400}}}'),
    ):
        folder = os.path.join(os.fsencode(tmp_path), name)
        os.mkdir(folder)
        with open(os.path.join(folder, b"metrics.jsonl"), "w") as file:
            file.write(f"{line}\n" * 2)
    odd = tmp_path / "odd"
    odd.mkdir()
    (odd / "metrics.jsonl").write_text('{"step": 1, "loss": NaN, "\\ud800": [1]}\n')
    (odd / "timeline.json").write_text('[\n["X"],\n{"ph": "X"},\n')
    (odd / "config.json").write_text("[" * 100_000)
    samples = (tmp_path / "one" / "samples.jsonl").read_bytes().splitlines(keepends=True)
    damaged = [b"\0" * 99 + b"\n", b"[1]\n", b'{"step": 1, "prom\n', b'{"step": "1"}\n']
    (tmp_path / "one" / "samples.jsonl").write_bytes(b"".join([*samples[:3], *damaged, *samples[3:]]))
    with ViewServer(RunFiles(tmp_path), port=0) as server:
        status, text, _ = get(f"{server.address}/api/runs")
        runs = {run["run"]: run for run in json.loads(text)["runs"]}
        assert status == 200 and {"one", "two", "odd", "\udcff"} <= runs.keys()
        assert all("no regular file" not in runs[name]["unreadable"] for name in ("endless", "large"))
        assert get(f"{server.address}/api/metrics?run=odd")[0] == 200
        for path in ("timeline?run=odd", "settings?run=odd", "steps?run=odd&kind=samples", "metrics?run=%00"):
            status, text, _ = get(f"{server.address}/api/{path}")
            assert status in (400, 404) and json.loads(text)["error"], path
        found = json.loads(get(f"{server.address}/api/samples?run=one&kind=samples&step=1")[1])
        assert found == [one for line in samples if (one := json.loads(line))["step"] == 1]


def test_endless_lines_hide_no_run(tmp_path):
    write_runs(tmp_path, steps=2)
    (tmp_path / "endless").mkdir()
    for name in ("metrics.jsonl", "samples.jsonl", "timeline.json", "config.json"):
        (tmp_path / "endless" / name).touch()
        os.truncate(tmp_path / "endless" / name, 1 << 29)
    with ViewServer(RunFiles(tmp_path), port=0) as server:
        status, text, _ = get(f"{server.address}/api/runs")
        reasons = {run["run"]: run.get("unreadable", "") for run in json.loads(text)["runs"]}
        assert status == 200 and (reasons["one"], reasons["two"]) == ("", "")
        assert "metrics.jsonl has a line of more than" in reasons["endless"]
        for path in ("metrics?run=RUN", "steps?run=RUN&kind=samples", "timeline?run=RUN", "settings?run=RUN"):
            status, text, _ = get(f"{server.address}/api/{path.replace('RUN', 'endless')}")
            assert status == 400 and re.search("more than|at most", json.loads(text)["error"]), path
            assert get(f"{server.address}/api/{path.replace('RUN', 'one')}")[0] == 200, path


@pytest.mark.parametrize("name", ["config.json", "metrics.jsonl"])
def test_link_to_itself_hides_no_run(tmp_path, name, capfd):
    write_runs(tmp_path, steps=2)
    (tmp_path / "one" / name).unlink()
    (tmp_path / "one" / name).symlink_to(name)
    with ViewServer(RunFiles(tmp_path), port=0) as server:
        status, text, _ = get(f"{server.address}/api/runs")
        shown = {run["run"]: run for run in json.loads(text)["runs"]}
        assert status == 200 and shown["two"]["last_step"] == 2 and "unreadable" not in shown["two"]
        if name == "config.json" or "one" in shown:  # Python up to 3.12 finds no metrics behind such a link
            assert f"{name} is a link that leads to itself" in shown["one"]["unreadable"]
        kind = "settings" if name == "config.json" else "metrics"
        status, text, _ = get(f"{server.address}/api/{kind}?run=one")
        assert status == 400 and "leads to itself, expected a file" in json.loads(text)["error"]
        assert get(f"{server.address}/api/{kind}?run=two")[0] == 200
        (tmp_path / "three").symlink_to("three")
        assert get(f"{server.address}/api/metrics?run=three")[0] == 400
    assert "Traceback" not in capfd.readouterr().err


def test_every_metric_of_the_page_is_explained_by_its_row():
    rows = explanations()
    assert len(rows) > 60
    for name in names(METRICS_PAGE):
        plain = re.sub(r"<\w+>|\*", "format", name)
        assert re.fullmatch(pattern(name).replace("format", "[a-z]+"), plain) or "<" in name
        assert any(re.match(row.pattern, plain) for row in rows), name
    [kl] = [row for row in rows if re.match(row.pattern, "kl/ref")]
    assert kl.meaning.startswith("k3 estimate") and kl.otherwise.startswith("jumps")
    assert not [row for row in rows if re.match(row.pattern, "nothing/of_this")]


def test_command_refuses_a_missing_folder(tmp_path):
    command = [sys.executable, "-m", "jaxrlhf.view", str(tmp_path / "none"), "--port", "0"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2 and "none is no folder; give the folder that has the workdirs of runs" in done.stderr

"""Files of metrics and samples, the console, and the learning curve."""

import io
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rich.console import Console

from jaxrlhf.config import Refusal
from jaxrlhf.tracking import (
    CompileCounter,
    JsonLines,
    MetricsWriter,
    RunConsole,
    Sample,
    SampleFile,
    SettingsTable,
    peak_memory_bytes,
    read_records,
    read_samples,
    save_learning_curve,
    show_samples,
)
from jaxrlhf.tracking.console import default_console, is_live
from jaxrlhf.tracking.plots import draw_learning_curve


def write_steps(path: Path, steps: range, *, resumed_step: int | None = None) -> None:
    with MetricsWriter([JsonLines(path, resumed_step=resumed_step)]) as writer:
        for step in steps:
            writer.log(step, {"score/mean": step / 7})


def steps_of(path: Path) -> list[int]:
    return [record["step"] for record in read_records(path)]


def test_line_is_a_json_object(tmp_path):
    path = tmp_path / "run" / "metrics.jsonl"
    with MetricsWriter([JsonLines(path)]) as writer:
        metrics = {"a": 0.1, "b": np.float32(0.5), "c": float("nan"), "d": jnp.float32(jnp.inf), "e": 3}
        writer.log(1, metrics)
    (line,) = path.read_text().splitlines()
    assert line.startswith('{"step": 1, ')
    assert json.loads(line) == {"step": 1, "a": 0.1, "b": 0.5, "c": None, "d": None, "e": 3}


@pytest.mark.parametrize("torn", [b"", b'{"step": 6, "score/me', b'{"step": 5', b"\x00\x00\x00", b'{"step": 6}', b"7"])
@pytest.mark.parametrize("resumed_step", [0, 3, 5, 9])
def test_resumed_file_equals_an_uninterrupted_one(tmp_path, torn, resumed_step):
    whole, killed = tmp_path / "whole.jsonl", tmp_path / "killed.jsonl"
    last = min(resumed_step, 5)
    write_steps(whole, range(1, last + 1))
    write_steps(whole, range(resumed_step + 1, 12), resumed_step=resumed_step)
    write_steps(killed, range(1, 6))
    with open(killed, "ab") as file:
        file.write(torn)
    assert steps_of(killed) == [1, 2, 3, 4, 5]
    write_steps(killed, range(resumed_step + 1, 12), resumed_step=resumed_step)
    assert killed.read_bytes() == whole.read_bytes()


def test_new_run_overwrites_the_file(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write_steps(path, range(1, 6))
    write_steps(path, range(1, 3))
    assert steps_of(path) == [1, 2]


def test_resume_without_a_file_creates_it(tmp_path):
    write_steps(tmp_path / "metrics.jsonl", range(4, 6), resumed_step=3)
    assert steps_of(tmp_path / "metrics.jsonl") == [4, 5]


@pytest.mark.slow
def test_logged_lines_survive_kill_9(tmp_path):
    path = tmp_path / "metrics.jsonl"
    script = f"""
import itertools
from pathlib import Path
from jaxrlhf.tracking.records import RecordFile
file = RecordFile(Path({str(path)!r}), resumed_step=None)
for step in itertools.count(1):
    file.append([{{"step": step, "text": "x" * 50_000}}])
    print(step, flush=True)
"""
    writer = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE)
    with writer:
        for _ in range(5):
            writer.stdout.readline()
        writer.send_signal(signal.SIGKILL)
        reported = 5 + len(writer.stdout.readlines())
    kept = steps_of(path)
    assert kept == list(range(1, len(kept) + 1)) and len(kept) >= reported
    write_steps(path, range(4, 6), resumed_step=3)
    assert steps_of(path) == [1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    "damaged", [b'{"step": ', b"\0" * 4096, b'"step"', b'{"step": "2"}', b'{"step": NaN}', b"[" * 100_000, b"\xff"]
)
def test_damaged_line_is_skipped_with_a_warning(tmp_path, damaged):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n' + damaged + b'\n{"step": 3}\n{"step": 4}\n')
    with pytest.warns(UserWarning, match=r"(?s)metrics\.jsonl, line 2, .*skipping"):
        write_steps(path, [5], resumed_step=3)
    with pytest.warns(UserWarning, match=r"metrics\.jsonl, line 2"):
        assert steps_of(path) == [1, 3, 5]


def test_foreign_file_is_not_continued(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text("my notes\nof yesterday\n")
    with pytest.raises(Refusal, match=r"metrics\.jsonl, line 1"):
        JsonLines(path, resumed_step=3)
    assert path.read_text() == "my notes\nof yesterday\n"


def test_endless_line_is_refused(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write_steps(path, range(1, 4))
    os.truncate(path, 1 << 29)
    for read in (lambda: steps_of(path), lambda: JsonLines(path, resumed_step=3)):
        with pytest.raises(Refusal, match=r"metrics\.jsonl has a line of more than 268435456 bytes, expected one JSON"):
            read()
    JsonLines(path, resumed_step=1).close()  # the line is after the records that are read
    assert steps_of(path) == [1]


@pytest.mark.parametrize("line", range(1, 6))
def test_a_flipped_step_loses_no_record(tmp_path, line):
    whole, damaged = tmp_path / "whole.jsonl", tmp_path / "damaged.jsonl"
    write_steps(whole, range(1, 8))
    lines = whole.read_text().splitlines(keepends=True)
    changed = [*lines]
    changed[line - 1] = changed[line - 1].replace(f'"step": {line}', '"step": 9')
    damaged.write_text("".join(changed))
    for path in (whole, damaged):
        write_steps(path, range(6, 8), resumed_step=5)
    kept = lines[:4] if line == 5 else changed[:5]  # the last line of all is not known to be of step 5
    assert damaged.read_text() == "".join([*kept, *lines[5:]])
    assert whole.read_text() == "".join(lines)


def test_damage_of_the_first_line_says_what_to_do(tmp_path):
    path = tmp_path / "samples.jsonl"
    path.write_text('{"stfp": 1}\n{"step": 2}\n')
    with pytest.raises(Refusal, match=r"samples\.jsonl, line 1, .*; if a run wrote the file, delete the line"):
        SampleFile(path, resumed_step=2)
    path.write_text('{"step": 2}\n')
    SampleFile(path, resumed_step=2).close()
    assert path.read_text() == '{"step": 2}\n'


def test_steps_must_ascend(tmp_path):
    log = JsonLines(tmp_path / "metrics.jsonl")
    log.log(2, {})
    log.log(2, {})
    with pytest.raises(ValueError, match="expected steps in ascending order"):
        log.log(1, {})
    log.close()


def test_every_logger_gets_all_metrics_and_is_closed():
    class Recorder:
        def __init__(self):
            self.seen = []

        def log(self, step, metrics):
            self.seen.append((step, dict(metrics)))

        def close(self):
            self.seen.append("closed")
            raise OSError("disk full")

    first, second = Recorder(), Recorder()
    writer = MetricsWriter([first, second])
    writer.log(1, {"a": 1.0})
    with pytest.raises(OSError, match="disk full"):
        writer.close()
    assert first.seen == second.seen == [(1, {"a": 1.0}), "closed"]


def sample(step: int, number: int, **fields) -> Sample:
    known = {"score": 1.0, "prompt_length": 3, "response_length": 4, "truncated": False}
    return Sample(step=step, prompt=f"prompt {number}", response=f"response {number}", **{**known, **fields})


def test_samples_round_trip(tmp_path):
    path = tmp_path / "samples.jsonl"
    file = SampleFile(path)
    odd = sample(2, 0, score=float("nan"), parts={"format": np.float32(0.5), "f": float("nan")}, answer="é\ud800\n")
    file.add([sample(1, n) for n in range(3)])
    file.add([odd, *(sample(2, n) for n in range(1, 10))])
    file.close()
    read = read_samples(path, n=5)
    assert [each.prompt for each in read] == [f"prompt {n}" for n in (0, 2, 4, 6, 8)]
    assert (read[0].score, read[0].parts, read[0].answer) == (None, {"format": 0.5, "f": None}, odd.answer)
    assert "é" in path.read_text()
    assert len(read_samples(path, n=99)) == 10
    file = SampleFile(path, resumed_step=1)
    file.add([sample(2, 0)])
    file.close()
    assert [record["step"] for record in read_records(path)] == [1, 1, 1, 2]


@pytest.mark.parametrize("terminal", [True, False])
def test_samples_are_shown_without_markup(terminal):
    out = io.StringIO()
    console = Console(file=out, force_terminal=terminal, width=80, color_system=None, legacy_windows=False)
    odd = [sample(3, 0, score=None), sample(3, 1, truncated=True, answer="7")]
    odd.append(Sample(3, "[bold]2+2[/nonsense]", "[red]4", 0.5, 1, 2, False))
    show_samples(odd, console=console)
    shown = out.getvalue()
    assert "[bold]2+2[/nonsense]" in shown and "[red]4" in shown
    assert "unscorable" in shown and "answer 7" in shown and "(cut)" in shown
    assert ("╭" in shown) == terminal


@pytest.mark.parametrize("calls", [[{"name": "add", "arguments": {"a": 1}}], ["add"], "add", 5])
def test_calls_of_any_form_are_shown(calls):
    out = io.StringIO()
    spoken = [{"role": "assistant", "content": "So.", "tool_calls": calls}]
    episode = {"messages": spoken, "turns": [], "stop": "done", "failure": ""}
    show_samples([Sample(3, "", "", 0.5, 1, 2, False, episode=episode)], console=Console(file=out, width=80))
    assert "assistant: So." in out.getvalue() and ("add" in out.getvalue()) == isinstance(calls, list)


@pytest.mark.parametrize("terminal", [True, False])
def test_samples_are_shown_without_control_characters(terminal):
    out = io.StringIO()
    console = Console(file=out, force_terminal=terminal, width=80, color_system=None, legacy_windows=False)
    show_samples([Sample(3, "a\x1b[8mb\x9d", "\x0e\ud83d\tend", 0.5, 1, 2, False)], console=console)
    shown = out.getvalue()
    assert all(text in shown for text in (r"a\x1b[8mb\x9d", r"\x0e\ud83d", "end"))
    assert not any(sign in shown for sign in ("\x1b[8m", "\x9d", "\x0e", "\ud83d"))


METRICS = {"score/mean": 0.5123, "kl/ref": float("nan"), "throughput/generated_tokens_per_s": 1234.5, "other": 1.0}


def test_without_a_terminal_each_step_is_a_line():
    out = io.StringIO()
    with RunConsole(steps=100, console=Console(file=out, width=20)) as console:
        console.progress("generate", 1, 2)
        console.log(7, METRICS)
        console.log(8, {"eval/accuracy": 0.75, "time/step_s": 2.0})
    assert (
        out.getvalue()
        == "step   7/100  score 0.512  generates 1,234 tokens/s\nstep   8/100  accuracy 0.750  2.00 s/step\n"
    )


def test_on_a_terminal_there_are_bars():
    out = io.StringIO()
    terminal = Console(file=out, force_terminal=True, width=120, color_system=None, _environ={"TERM": "xterm"})
    with RunConsole(steps=100, first_step=6, console=terminal) as console:
        console.progress("generate", 1, 4)
        console._bars.refresh()
        during = out.getvalue()
        console.progress("generate", 4, 4)
        console.log(7, METRICS)
        names = [task.description for task in console._bars.tasks]
    assert "6/100" in during and "generate" in during and "1/4" in during
    assert "step   7/100  score 0.512" in out.getvalue() and "7/100" in out.getvalue().split("tokens/s")[1]
    assert names == ["steps"]
    out.truncate(0)
    with RunConsole(steps=0, console=terminal) as console:  # an evaluation
        console.progress("generate", 1, 4)
        console._bars.refresh()
        assert "generate" in out.getvalue()
        console.progress("generate", 4, 4)
    assert "steps" not in out.getvalue()


def test_colored_log_is_not_redrawn(monkeypatch, capsys):
    monkeypatch.setenv("FORCE_COLOR", "1")
    with RunConsole(steps=2) as console:
        console.log(1, {})
        print("by another way")
        console.log(2, {})
    assert capsys.readouterr().out == "step 1/2\nby another way\nstep 2/2\n"
    assert not is_live(default_console())


SPEAKING = """
import sys
from jaxrlhf.tracking import RunConsole
with RunConsole(steps=3) as console:
    console.log(1, {})
    sys.stdin.readline()
    console.log(2, {})
    print("by another way", flush=True)
    console.log(3, {})
"""


def test_run_continues_after_a_broken_pipe():
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", SPEAKING], **pipes) as speaking:
        assert speaking.stdout.readline() == b"step 1/3\n"
        speaking.stdout.close()
        speaking.stdin.write(b"\n")
        speaking.stdin.close()
        assert (speaking.stderr.read(), speaking.wait()) == (b"", 0)


def test_settings_table(capsys):
    rows = [("rollout", "prompts", 64, "a note"), ("rollout", "responses", 256, ""), ("actor", "[x]", "1e-6", "")]
    RunConsole(steps=1).print(SettingsTable(rows, title="derived"))
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["rollout", "prompts", "64", "a", "note"] in lines
    assert ["responses", "256"] in lines  # the section is named once
    assert ["actor", "[x]", "1e-6"] in lines


@pytest.mark.parametrize("width", [80, 120])
def test_narrow_settings_table_prints_notes_below_rows(width):
    note = "a note that says in about sixty letters what becomes of this one"
    rows = [("actor", "tokens per microbatch", "16384", note), ("rollout", "x", "data 4 x fsdp 2 x tensor 2", note)]
    out = io.StringIO()
    Console(file=out, width=width).print(SettingsTable(rows))
    lines = out.getvalue().splitlines()
    assert max(map(len, lines)) <= width
    assert "16384" in out.getvalue() and "data 4 x fsdp 2 x tensor 2" in out.getvalue()
    assert len([line for line in lines if line.strip()]) <= 7  # notes take a line or two each, not five


def test_compilations_are_counted():
    double = jax.jit(lambda x: 2 * x + 17)
    small, large = np.ones(3, np.float32), np.ones(5, np.float32)
    with CompileCounter() as counter:
        double(small)
        assert counter.count == 1
        double(small)
        assert counter.count == 1
        double(large)
        assert counter.count == 2 and counter.seconds > 0
    jax.jit(lambda x: 3 * x + 17)(small)
    assert counter.count == 2


def test_peak_memory_on_cpu_is_the_processs():
    block = np.ones(30_000_000)  # 240 MB, touched
    assert block.nbytes < peak_memory_bytes() < os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def write_curves(path: Path, steps: int, names: tuple[str, ...]) -> None:
    with MetricsWriter([JsonLines(path)]) as writer:
        for step in range(1, steps + 1):
            writer.log(step, dict.fromkeys(names, 1.0 / step))


EVERYTHING = (
    *("score/mean", "response/length_mean", "response/truncated_fraction", "kl/ref", "policy/entropy"),
    *("policy/clip_fraction", "sampler/logp_gap_mean", "sampler/logp_gap_max", "actor/loss"),
    *("time/generate_s", "time/update_s", "eval/accuracy_at_start", "eval/accuracy"),
)


@pytest.mark.slow
@pytest.mark.parametrize("steps", [1, 30])
def test_learning_curve_has_six_labelled_panels(tmp_path, steps):
    write_curves(tmp_path / "metrics.jsonl", steps, EVERYTHING)
    png = save_learning_curve(tmp_path / "metrics.jsonl", tmp_path / "curve.png", title="lr $x_{ $")
    assert png.read_bytes().startswith(b"\x89PNG")
    axes = draw_learning_curve(tmp_path / "metrics.jsonl").axes
    panels = [each for each in axes if each.get_title()]
    assert len(panels) == 6
    assert all(each.get_xlabel() == "step" and each.get_ylabel() for each in panels)


def test_panels_without_data_are_left_out(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write_curves(path, 3, ("supervised/loss", "time/update_s"))
    assert [each.get_title() for each in draw_learning_curve(path).axes] == ["Time of a step", "Loss"]
    write_curves(path, 3, ("something",))
    with pytest.raises(ValueError, match="has no metrics to plot; it has something"):
        draw_learning_curve(path)
    with open(path, "w"):
        pass
    with pytest.raises(ValueError, match="no numbers"):
        draw_learning_curve(path)


def test_slow_first_step_does_not_flatten_other_steps(tmp_path):
    path = tmp_path / "metrics.jsonl"
    with MetricsWriter([JsonLines(path)]) as writer:
        for step in range(1, 20):
            writer.log(step, {"time/update_s": 100.0 if step == 1 else 1.0})
    (axes,) = draw_learning_curve(path).axes
    assert axes.get_ylim() == (0, 2.5)

"""Refusals of a run: in one line that says what to do, quickly, and before it has trained anything."""

import json
import os
import pickle
import shutil
import signal
import socket
import subprocess
import sys
import time
from contextlib import nullcontext
from pathlib import Path

import pytest
from command_lines import run_module
from tiny_runs import write_policy

import jaxrlhf
from jaxrlhf.batch import Diverged
from jaxrlhf.rewards import RewardsFailing
from jaxrlhf.single_controller.ray.failure import HostFailure, HostId
from jaxrlhf.trainer.run import RunResult

PROBLEM = json.dumps({"question": "What is 1 + 1?", "answer": "It is 2.\n#### 2"}) + "\n"
SIZES = (
    "--rollout.prompts-per-step 4 --algorithm.responses-per-update 4 --rollout.max-prompt-tokens 128 "
    "--rollout.max-response-tokens 16 --devices 1 "
    "--actor.tokens-per-microbatch 1024 --algorithm.critic.tokens-per-microbatch 1024"
)


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> Path:
    """A good model and good data, and damaged copies of both."""
    folder = tmp_path_factory.mktemp("files")
    write_policy(folder / "model")
    for name in ("no_eos", "torn"):
        shutil.copytree(folder / "model", folder / name)
    settings = folder / "no_eos" / "tokenizer_config.json"
    fields = json.loads(settings.read_text())
    del fields["eos_token"]
    settings.write_text(json.dumps(fields))
    weights = (folder / "model" / "model.safetensors").read_bytes()
    (folder / "torn" / "model.safetensors").write_bytes(weights[:-1000])
    for name, lines in (("data", PROBLEM * 10), ("bad_data", PROBLEM * 6 + PROBLEM[:30] + "\n" + PROBLEM * 3)):
        (folder / name).mkdir()
        (folder / name / "train.jsonl").write_text(lines)
        (folder / name / "test.jsonl").write_text(PROBLEM)
    return folder


GOOD = "--model.path {files}/model --data.path {files}/data"
CASES = {
    "missing model": (
        "--model.path {files}/nowhere --data.path {files}/data",
        "no directory '{files}/nowhere'; use a local checkpoint directory, or a hub id",
    ),
    "missing model, tokenizer elsewhere": (
        "--model.path {files}/nowhere --tokenizer {files}/model --data.path {files}/data",
        "{files}/nowhere",
    ),
    "missing model beside a directory": (
        "--model.path tests/nothing --data.path {files}/data",
        "no directory 'tests/no",
    ),
    "missing model shaped like a hub id": (
        "--model.path jaxrlhf-nowhere/nothing --data.path {files}/data",
        "no local directory 'jaxrlhf-nowhere/nothing' and no reachable hub repository of that name",
    ),
    "missing tokenizer shaped like a hub id": (
        "--model.path {files}/model --tokenizer jaxrlhf-nowhere/words --data.path {files}/data",
        "no local directory 'jaxrlhf-nowhere/words' and no reachable hub repository of that name",
    ),
    "no EOS": (
        "--model.path {files}/no_eos --data.path {files}/data",
        "the tokenizer of '{files}/no_eos' has no end-of-sequence token, so responses cannot end; set \"eos_token\"",
    ),
    "torn weights": (
        "--model.path {files}/torn --data.path {files}/data",
        "{files}/torn/model.safetensors is damaged or incomplete",
    ),
    "corrupt jsonl": (
        "--model.path {files}/model --data.path {files}/bad_data",
        "{files}/bad_data/train.jsonl, line 7: not valid JSON",
    ),
    "missing data": (
        "--model.path {files}/model --data.path {files}/nowhere",
        "there is no directory '{files}/nowhere' and no public data set of that name",
    ),
    "too few problems": (GOOD + " --rollout.prompts-per-step 44", "a step takes 44 problems and there are 10; "),
    "prompts too long": (GOOD + " --rollout.max-prompt-tokens 5", "all 10 train problems are over the token limits"),
    "devices that are not there": (GOOD + " --devices 64", "devices=64 exceeds the"),
    "layout": (
        GOOD + " --devices 1 --actor.layout.tensor 3",
        "actor: data=rest x fsdp=1 x stage=1 x tensor=3 does not fill",
    ),
    "heads that do not split": (
        GOOD + " --devices 8 --actor.layout.tensor 8",
        "actor: the model's 'heads' dimension of 4 does not split 8 ways",
    ),
    "positions": (
        GOOD + " --rollout.max-response-tokens 1000 --actor.tokens-per-microbatch 2048 "
        "--algorithm.critic.tokens-per-microbatch 2048",
        "max_prompt_tokens + max_response_tokens = 1128 exceeds the model's 1024 positions; lower one of them",
    ),
}


def words(case: str, files: Path, workdir: Path) -> list[str]:
    given = CASES[case][0].format(files=files)
    return f"--config ppo_gsm8k {SIZES} --workdir {workdir} {given}".split()


@pytest.mark.parametrize("case", CASES)
def test_refusal(case, files, tmp_path, monkeypatch, capsys):
    workdir = tmp_path / "workdir"
    monkeypatch.chdir(Path(__file__).parents[2])
    with pytest.raises(SystemExit) as end:
        run_module("train", *words(case, files, workdir))
    shown = capsys.readouterr().err
    assert end.value.code == 2
    assert (shown[:7], shown.count("\n")) == ("error: ", 1)
    assert CASES[case][1].format(files=files) in shown
    assert not (workdir / "checkpoints").exists()


DIVERGED = Diverged("the policy's logits are not finite; resume from the last checkpoint")


@pytest.mark.parametrize(
    "failure",
    [
        pickle.loads(pickle.dumps(DIVERGED)),  # as it comes from a host
        RewardsFailing("reward 'mine' failed on 100 responses in a row"),
        HostFailure(HostId("policy"), "actor.update_actor", "died\nIts log ends with: ..."),
    ],
    ids=lambda failure: type(failure).__name__,
)
@pytest.mark.parametrize("command", ["train", "evaluate"])
def test_what_ends_a_run_is_one_message(command, failure, monkeypatch, capsys):
    def fail(*_, **__):
        raise failure

    monkeypatch.setattr("jaxrlhf.trainer.run.run", fail)
    monkeypatch.setattr("jaxrlhf.trainer.policy.evaluate_policy", fail)
    config = Path(__file__).parents[1] / "support" / "tiny_runs.py"
    with pytest.raises(SystemExit) as end:
        run_module(command, "--config", config)
    assert (end.value.code, capsys.readouterr().err) == (1, f"error: {failure}\n")
    monkeypatch.setenv("JAXRLHF_DEBUG", "1")
    with pytest.raises(type(failure)):
        run_module(command, "--config", config)


def test_full_disk_of_standard_output_is_one_message(tmp_path):
    code = "from jaxrlhf.trainer.failures import one_message\nwith one_message(): print(10_000 * 'x', flush=True)"
    with open("/dev/full", "w") as full:
        done = subprocess.run([sys.executable, "-c", code], stdout=full, stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr) == (1, "error: [Errno 28] No space left on device\n")


def test_a_run_that_was_stopped_is_no_success(tmp_path, monkeypatch, capsys):
    config = Path(__file__).parents[1] / "support" / "tiny_runs.py"
    for finished, code in ((False, 128 + signal.SIGTERM), (True, None)):
        monkeypatch.setattr("jaxrlhf.trainer.run.run", lambda *_, done=finished, **__: RunResult(tmp_path, done))
        with nullcontext() if code is None else pytest.raises(SystemExit) as end:
            run_module("train", "--config", config)
        assert code is None or end.value.code == code
    assert capsys.readouterr().out == f"stopped after saving; the same command continues from {tmp_path}\n"


def test_the_name_of_a_configuration_is_none(refused):
    with refused():
        jaxrlhf.run("grpo_arithmetic")


def test_an_evaluation_names_the_policy_that_diverged(files, monkeypatch, capsys):
    def diverge(*_, **__):
        raise DIVERGED

    monkeypatch.setattr("jaxrlhf.trainer.policy.launch", diverge)
    arguments = f"--config ppo_gsm8k {SIZES} --data.path {files}/data --policy {files}/model"
    with pytest.raises(SystemExit) as end:
        run_module("evaluate", *arguments.split())
    shown = capsys.readouterr().err
    assert end.value.code == 1
    assert shown.startswith(
        f"error: the policy of {files}/model returns logits that are not finite, because its weights div"
    )
    assert shown.count("\n") == 1


# Users have no torch, which is here for the sake of other tests; transformers spends a second on it where it is.
WITHOUT_TORCH = """
import importlib.util, runpy
find = importlib.util.find_spec
importlib.util.find_spec = lambda name, package=None: None if name == "torch" else find(name, package)
import jax._src.compiler

def compiled(*_, **__):
    raise AssertionError("a program was compiled")

jax._src.compiler.compile_or_get_cached = compiled
runpy.run_module("jaxrlhf.train", run_name="__main__", alter_sys=True)
"""


@pytest.mark.parametrize(
    "case",
    [
        *(pytest.param(case, marks=pytest.mark.slow) for case in ("missing model", "too few problems")),
        *(pytest.param(case, marks=pytest.mark.seeds) for case in ("no EOS", "torn weights", "corrupt jsonl")),
    ],
)
def test_refusal_comes_before_anything_is_compiled(case, files, tmp_path):
    command = [sys.executable, "-c", WITHOUT_TORCH, *words(case, files, tmp_path / "workdir")]
    done = subprocess.run(command, env=os.environ, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)


@pytest.mark.parametrize("case", [case for case in CASES if "shaped like a hub id" in case])
def test_a_silent_hub_is_not_waited_for(case, files, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("jaxrlhf.models.huggingface.hub._TIMEOUT_S", 0.5)
    start = time.monotonic()
    with socket.create_server(("127.0.0.1", 0)) as hub:  # takes requests and never answers
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", f"http://127.0.0.1:{hub.getsockname()[1]}")
        test_refusal(case, files, tmp_path, monkeypatch, capsys)
    assert time.monotonic() - start < 5

"""Command lines: what they accept, user errors as one quick line, and a wheel that carries the configurations."""

import importlib
import os
import pickle
import re
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import numpy as np
import pytest
import tyro
from command_lines import run_module

import jaxrlhf.serve
from jaxrlhf.__main__ import _command
from jaxrlhf.config import (
    CommandLine,
    Config,
    FromScratch,
    KLInLoss,
    Lora,
    RayCluster,
    Refusal,
    Rollout,
    load,
    on_cluster,
    override,
    run_command,
    shipped,
)
from jaxrlhf.config.cli.outputs import check_writable
from jaxrlhf.config.cli.override import find, setting_names
from jaxrlhf.planner.plan import Infeasible

ROOT = Path(__file__).parents[2]
SHOW = "from jaxrlhf.config import *\nrun_command(lambda: print(CommandLine().parse_config()[0].name))"


def from_words(words: list[str]) -> Config:
    return CommandLine().parse_config(words)[0]


def python(*arguments: str, cwd: Path = ROOT.parent, **environment: str) -> subprocess.CompletedProcess:
    """Run a fresh interpreter."""
    command = [sys.executable, *arguments]
    return subprocess.run(command, env={**os.environ, **environment}, cwd=cwd, capture_output=True, text=True)


# What is accepted.


@pytest.mark.parametrize(
    ("words", "changes"),
    [
        ("", {}),
        ("--steps 3", {"steps": 3}),
        ("--steps=3", {"steps": 3}),
        ("--steps 3 --steps 4", {"steps": 4}),
        ("--model.path /x", {"model.path": "/x"}),
        ("--rollout.prompts-per-step 64", {"rollout.prompts_per_step": 64}),
        ("--rollout.prompts_per_step 64", {"rollout.prompts_per_step": 64}),
        (
            "--rollout.prompts-per-step 5 --algorithm.responses-per-update 5",
            {"rollout.prompts_per_step": 5, "algorithm.responses_per_update": 5},
        ),
        ("--no-resume", {"resume": False}),
        ("--rollout.sampling.ignore-eos", {"rollout.sampling.ignore_eos": True}),
        ("--rollout.sampling.ignore_eos True", {"rollout.sampling.ignore_eos": True}),
        ("--rollout.sampling.no-ignore-eos", {"rollout.sampling.ignore_eos": False}),
        ("--rollout.sampling.ignore-eos --rollout.sampling.ignore-eos False", {"rollout.sampling.ignore_eos": False}),
        ("--actor.remat full", {"actor.remat": "full"}),
        ("--actor.optimizer.learning-rate 1e-5", {"actor.optimizer.learning_rate": 1e-5}),
        ("--actor.optimizer.decay cosine", {"actor.optimizer.decay": "cosine"}),
        ("--algorithm.policy.dual-clip None", {"algorithm.policy.dual_clip": None}),
        ("--algorithm.kl None", {"algorithm.kl": None}),
        ("--devices 8 --rewards.parts.0.weight -1", {"devices": 8, "rewards.parts.0.weight": -1}),
        ("--rewards.parts.0.method flexible", {"rewards.parts.0.method": "flexible"}),
        ("--rollout.sampling.stop-tokens a b", {"rollout.sampling.stop_tokens": ("a", "b")}),
        ("--rollout.sampling.stop-tokens", {"rollout.sampling.stop_tokens": ()}),
        ("--profile-steps 3 5", {"profile_steps": (3, 5)}),
        ("--data.instruction=--x=1", {"data.instruction": "--x=1"}),
        ("--actor.lora.rank 8 --actor.lora.rslora", {"actor.lora": Lora(rank=8, rslora=True)}),
        ("--algorithm.kl.estimator k3 --algorithm.kl KLInLoss", {"algorithm.kl": KLInLoss(estimator="k3")}),
        ("--cluster RayCluster --cluster.address auto", {"cluster": RayCluster(address="auto")}),
        ("--model FromScratch", {"model": FromScratch()}),
    ],
)
def test_overrides(words, changes):
    assert from_words(["--config", "ppo_gsm8k", *words.split()]) == override(load("ppo_gsm8k"), changes)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ppo_arithmetic", "safe_rlhf_digits", "prime_letters", "rlhf_reward_model"])
def test_every_setting_can_be_given_and_means_what_tyro_reads(name):
    config, words = load(name), []
    for setting in setting_names(config):
        value, _ = find(config, setting)
        if isinstance(value, bool):
            room, dot, switch = setting.rpartition(".")
            words.append(f"--{room}{dot}no-{switch}")
        else:
            words += [f"--{setting}", *map(str, value if isinstance(value, tuple) else [value])]
    ours = from_words(["--config", name, *words])
    assert ours == tyro.cli(Config, default=config, args=words, config=(tyro.conf.AvoidSubcommands,))
    assert ours != config  # the switches


def test_a_command_adds_flags_of_its_own():
    command = CommandLine()
    command.add_argument("--dry-run", action="store_true")
    config, flags = command.parse_config(["--steps", "3", "--dry-run", "--config", "ppo_gsm8k", "--seed", "4"])
    assert (config.steps, config.seed, flags.dry_run) == (3, 4, True)


def test_the_version_is_told(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["jaxrlhf", "--version"])
    _command()
    assert capsys.readouterr().out == f"jaxrlhf {jaxrlhf.__version__}\n"


def test_hosts_joined_by_ray_can_be_asked_for_and_left_out():
    for given, wanted in {"ray": RayCluster(), "None": None}.items():
        command = CommandLine()
        command.add_argument("--cluster")
        words = ["--config", "ppo_gsm8k", "--cluster", given]
        assert command.parse_config(words, implied=on_cluster)[0].cluster == wanted


def test_help_lists_the_settings_of_the_configuration(capsys):
    command = CommandLine(prog="python -m program", description="What it does.")
    command.add_argument("--dry-run", action="store_true", help="stop early")
    with pytest.raises(SystemExit) as end:
        command.parse_config(["--config", "ppo_gsm8k", "--help"])
    shown = capsys.readouterr().out
    assert end.value.code in (None, 0)
    assert all(
        text in shown for text in ("What it does.", "stop early", "ppo_arithmetic", "--rollout.prompts-per-step")
    )
    assert "\nusage: python -m program --config ppo_gsm8k [-h] [OPTIONS]\n\nSettings of ppo_gsm8k and" in shown


def test_help_needs_no_configuration(capsys):
    with pytest.raises(SystemExit) as end:
        CommandLine().parse_config(["-h"])
    assert end.value.code in (None, 0)
    assert "--config" in capsys.readouterr().out


# What is refused, in one line.


def test_user_error_is_one_line(refused, capsys):
    for words in [
        "",
        "--config",
        "--config ppo_gms8k",
        "--config ppo_gsm8k --stpes 3",
        "--config ppo_gsm8k --rollout.promts-per-step 3",
        "--config ppo_gsm8k --no-steps",
        "--config ppo_gsm8k --steps three",
        "--config ppo_gsm8k --steps 3 4",
        "--config ppo_gsm8k --steps",
        "--config ppo_gsm8k --steps -3",
        "--config ppo_gsm8k --resume maybe",
        "--config ppo_gsm8k --no-resume yes",
        "--config ppo_gsm8k --no-resume=a b",
        "--config ppo_gsm8k --rollout.sampling.no-ignore-eos False",
        "--config ppo_gsm8k --devices x",
        "--config ppo_gsm8k --actor.optimizer.decay cosin",
        "--config ppo_gsm8k 3",
        "--config ppo_gsm8k -steps 3",
        "--config ppo_gsm8k --algorithm.kl k3",
        "--config ppo_arithmetic --model.path /x",
        "--config ppo_gsm8k --rollout.prompts-per-step 60",
        "--config grpo_gsm8k --algorithm.kl None --algorithm.kl.coefficient 1",
        "--config ppo_arithmetic --model Pretrained",
        "--config ppo_gsm8k --rewards.parts FormatReward",
        "--config ppo_gsm8k --algorithm drgpro",
        "ppo_gsm8k",
    ]:
        with pytest.raises(SystemExit) as end:
            run_command(lambda words=words: from_words(words.split()))
        shown = capsys.readouterr()
        refused.check(shown.err)
        assert (end.value.code, shown.out, shown.err.count("\n")) == (2, "", 1)


def test_a_flag_or_a_command_that_is_misspelled_is_told(refused, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["jaxrlhf", "trian", "--config", "ppo_gsm8k"])
    with refused():
        _command()
    command = CommandLine(prog="jaxrlhf generate")
    command.add_argument("policy")
    command.add_argument("--dry-run", action="store_true")
    with refused():
        command.parse_config(["mine", "--config", "ppo_gsm8k", "--dry_run"])
    with refused():
        command.parse_config(["mine", "--config", "ppo_gsm8k", "--dryrun"])
    with refused():  # of the flags and the settings, this is closest to a setting
        command.parse_config(["mine", "--config", "ppo_gsm8k", "--stpes", "3"])
    with refused():
        command.parse_args([])


CONTRADICTION = """
from jaxrlhf.config import *

def get_config():
    rollout = Rollout(prompts_per_step=2, sampling=Sampling(min_tokens=600))
    layout = Layout(context=2, stage=2)
    return Config("x", GRPO(responses_per_update=4), 3, FromScratch(), Arithmetic(), rollout=rollout,
                  actor=Training(layout=layout, tokens_per_microbatch=100))
"""


def test_a_file_that_contradicts_itself_is_mended_on_the_command_line(tmp_path):
    path = tmp_path / "x.py"
    path.write_text(CONTRADICTION)
    mended = "--actor.layout.stage 1 --actor.tokens-per-microbatch 2048 --rollout.responses-per-prompt 2"
    words = f"--config {path} {mended} --rollout.sampling.min-tokens 0".split()
    config = from_words(words)
    assert (config.actor.layout.context, config.actor.layout.stage, config.rollout.sampling.min_tokens) == (2, 1, 0)
    for left_out, line in (("--actor.layout.stage", 6), ("--rollout.sampling.min-tokens", 5)):
        place = words.index(left_out)
        with pytest.raises(Refusal) as refusal:
            from_words(words[:place] + words[place + 2 :])
        assert left_out.rpartition(".")[2].replace("-", "_") in str(refusal.value)
        if line == 5:  # the file's first contradiction is told of with its line
            assert f"{path}:{line}: " in str(refusal.value)
    with pytest.raises(Refusal, match="did you mean steps"):
        from_words([*words, "--stpes", "3"])
    with pytest.raises(Refusal, match=r"x.py:5: "):
        load(path)


@pytest.mark.parametrize("name", ["stream_parts", "on_new_weights", "replay_arrivals"])
def test_a_setting_that_was_removed_is_refused_with_what_to_use_instead(name, tmp_path):
    advice = re.escape(Rollout.removed[name])
    with pytest.raises(Refusal, match=f"no setting rollout.{name}: it was removed; {advice}"):
        from_words(["--config", "grpo_arithmetic", f"--rollout.{name}", "4"])
    path = tmp_path / "x.py"
    path.write_text(f"from jaxrlhf.config import Config, Rollout\n\ndef get_config():\n    return Rollout({name}=4)\n")
    with pytest.raises(Refusal, match=rf"x.py:4: Rollout.{name} was removed: {advice}"):
        load(path)


def test_a_setting_that_was_removed_from_an_algorithm_is_refused():
    with pytest.raises(Refusal, match=r"no setting algorithm.halve_kl: it was removed; halve the coefficient of kl"):
        from_words(["--config", "safe_rlhf_digits", "--algorithm.halve_kl", "True"])


WRITING = {
    "generate": "policy prompts.jsonl {}/out.jsonl",
    "plan": "--config ppo_arithmetic --hardware h100x2 --picture {}/plan.png",
    "export": "run {}/export",
}


@pytest.mark.parametrize("command", WRITING)
def test_a_place_that_cannot_be_written_is_refused_at_once(command, tmp_path, refused, monkeypatch):
    main = importlib.import_module(f"jaxrlhf.{command}").main
    monkeypatch.setattr(sys, "argv", [command, *WRITING[command].format(tmp_path).split()])
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != tmp_path)  # root may write everywhere
    with refused():
        main()
    (tmp_path / "file").touch()
    monkeypatch.setattr(sys, "argv", [command, *WRITING[command].format(tmp_path / "file").split()])
    with refused():
        main()


def test_a_place_may_be_yet_to_be_made(tmp_path):
    (tmp_path / "there.json").touch()
    for place in ("there.json", "new.json", "new/folder/file", "."):
        check_writable(tmp_path / place)


def test_the_library_names_what_it_has():
    assert {"Config", "load", "override", "run"} <= {*dir(jaxrlhf)}


def test_a_policy_of_this_folder_is_served_by_its_name(tmp_path, monkeypatch):
    named = []
    monkeypatch.setattr(jaxrlhf.serve, "serve", lambda flags, *_: named.append(flags.name))
    monkeypatch.chdir(tmp_path)
    for words in ("runs/mine/", ".", "Qwen/Qwen3-8B", ". --name yours"):
        monkeypatch.setattr(sys, "argv", ["serve", *words.split()])
        jaxrlhf.serve.main()
    assert named == ["mine", tmp_path.name, "Qwen3-8B", "yours"]


def test_user_error_is_quick():
    start = time.monotonic()
    done = python("-c", SHOW, "--config", "ppo_gsm8k", "--steps", "x")
    assert time.monotonic() - start < 5
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)


def test_debugging_shows_the_traceback(monkeypatch):
    monkeypatch.setenv("JAXRLHF_DEBUG", "1")
    with pytest.raises(Refusal, match="no configuration"):
        run_command(lambda: from_words(["--config", "nothing"]))


def test_an_error_that_is_no_refusal_keeps_its_traceback():
    with pytest.raises(ValueError, match="cannot reshape"):
        run_command(lambda: np.zeros(3).reshape(2, 2))
    with pytest.raises(ModuleNotFoundError):
        run_command(lambda: importlib.import_module("no_module_of_this_name"))


def test_hosts_that_are_not_there_are_refused(capsys):
    with pytest.raises(SystemExit, match="2"):
        run_module("convert", "model", "converted", "--multihost")
    shown = capsys.readouterr().err
    assert shown.startswith("error: --multihost calls jax.distributed.initialize()") and shown.count("\n") == 1


@pytest.mark.parametrize("package", ["starlette", "openai", "fcntl"])
def test_a_package_that_is_missing_is_one_line(package, refused, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(SystemExit) as end:
        run_command(lambda: importlib.import_module(f"{package}.testclient"))
    shown = capsys.readouterr().err
    refused.check(shown)
    assert (end.value.code, shown.count("\n")) == (2, 1)


def test_a_limit_of_few_open_files_is_one_line(refused):
    limited = ["sh", "-c", 'ulimit -n 40 && exec "$@"', "sh", sys.executable, "-c", SHOW, "--config", "ppo_arithmetic"]
    done = subprocess.run(limited, capture_output=True, text=True)
    refused.check(done.stderr)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)


@pytest.mark.parametrize("error", [Refusal("devices do not fit"), Infeasible("devices do not fit")])
def test_a_refusal_of_another_process_is_one_line_here(error, capsys):
    def again():
        raise pickle.loads(pickle.dumps(error))

    with pytest.raises(SystemExit):
        run_command(again)
    assert capsys.readouterr().err == "error: devices do not fit\n"


# The wheel.


@pytest.mark.slow
def test_the_wheel_carries_the_configurations_the_tables_of_plans_and_the_page_of_the_view(tmp_path):
    built = python("-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path), cwd=ROOT)
    assert built.returncode == 0, built.stderr
    [wheel] = tmp_path.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(tmp_path / "installed")
    code = (
        "import jaxrlhf, jaxrlhf.config as c; print(jaxrlhf.__file__, *(c.load(f'{n}.py').name for n in c.shipped())); "
        "import jaxrlhf.planner.hardware, jaxrlhf.planner.shapes; "  # read their tables
        "from jaxrlhf.viewer.app import PAGE; from jaxrlhf.viewer.explanations import explanations; "
        "assert (PAGE / 'view.js').is_file() and len(explanations()) > 60"
    )
    done = python("-c", code, cwd=tmp_path, PYTHONPATH=str(tmp_path / "installed"))
    place, *names = done.stdout.split()
    assert place.startswith(str(tmp_path)) and names == list(shipped()), done.stderr

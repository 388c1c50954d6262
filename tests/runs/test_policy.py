"""Trained policies outside their run: exported, evaluated, and the settings of a run without running it."""

import itertools
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest
import torch
import transformers
from command_lines import run_module
from safetensors.numpy import load_file, save_file
from tiny_runs import get_config, records, write_policy

from jaxrlhf import models
from jaxrlhf.checkpoint import Checkpoints, convert
from jaxrlhf.config import (
    Evaluation,
    EvaluationSet,
    Lora,
    MathReward,
    Pretrained,
    PromptFile,
    Refusal,
    Rewards,
)
from jaxrlhf.models import read_config
from jaxrlhf.tracking import CompileCounter
from jaxrlhf.trainer.evaluation import pass_at_k
from jaxrlhf.trainer.policy import evaluate_policy, export_policy
from jaxrlhf.trainer.run import run
from jaxrlhf.trainer.saved_policy import AdaptedRun
from tests.docs.test_metrics import unexplained
from tests.trainer.test_publishing import hub as a_hub

CONFIG = Path(__file__).parents[1] / "support" / "tiny_runs.py"
hub = a_hub


# The settings alone.


def test_dry_run_prints_the_settings_and_does_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with CompileCounter() as compiled:
        run_module("train", "--config", CONFIG, "--dry-run")
    assert compiled.count == 0
    assert list(tmp_path.iterdir()) == []
    shown = capsys.readouterr().out
    for words in ("PPO", "8 prompts x 2", "2 updates", "1 x 1 x 1", "4 x 240 tokens", "of 200 dropped as too long"):
        assert words in shown


def test_dry_run_counts_the_references_that_can_only_be_compared_as_text(tmp_path, capsys):
    def file_of(name):
        return PromptFile("-", evaluation=str(tmp_path / f"{name}.jsonl"))

    plain, formulas = ["7"] * 8, ["7", r"\int_0^1 x\,dx"] * 4
    sets = (
        EvaluationSet(name="sums", data=file_of("formulas"), rewards=(MathReward(),)),
        EvaluationSet(name="plain", data=file_of("plain"), rewards=(MathReward(),)),
    )
    for name, given in (("plain", plain), ("formulas", formulas)):
        lines = (json.dumps({"prompt": f"{n}?", "answer": answer}) + "\n" for n, answer in enumerate(given))
        (tmp_path / f"{name}.jsonl").write_text("".join(lines))
    config = replace(get_config(), rewards=Rewards((MathReward(),)), evaluation=Evaluation(sets=sets))
    for train, evaluation in (("plain", "formulas"), ("formulas", "plain")):
        data = PromptFile(str(tmp_path / f"{train}.jsonl"), evaluation=str(tmp_path / f"{evaluation}.jsonl"))
        run(replace(config, data=data, cold_start=None), dry_run=True)
        shown = [line for line in capsys.readouterr().out.splitlines() if "read as text" in line]
        other = "held-out references" if train == "plain" else "references"
        assert [line.split("read as text")[0].split("  ")[-1].strip() for line in shown] == [
            other,
            "references of set sums",
        ]
        assert all(line.endswith("4 of 8 checked") or "4 of 8 checked  such as" in line for line in shown)


def test_dry_run_of_a_checkpoint_reads_no_weights(tmp_path, capsys):
    model = write_policy(tmp_path / "model")
    (model / "model.safetensors").unlink()
    config = replace(get_config(), model=Pretrained(str(model)), workdir=str(tmp_path / "workdir"))
    assert not run(config, dry_run=True).finished
    assert "qwen2, 2 layers" in capsys.readouterr().out
    assert not (tmp_path / "workdir").exists()


def test_dry_run_finds_weights_that_no_run_reads(tmp_path):
    model = write_policy(tmp_path / "model")
    (model / "model.safetensors").rename(model / "pytorch_model.bin")
    config = replace(get_config(), model=Pretrained(str(model)), workdir=str(tmp_path / "workdir"))
    with pytest.raises(Refusal, match=r"but pytorch_model\.bin, a pickle.*convert it to safetensors"):
        run(config, dry_run=True)


@pytest.mark.parametrize("role", ["actor", "critic"])
def test_dry_run_finds_what_a_checkpoint_lacks(tmp_path, role):
    model = write_policy(tmp_path / "model")
    tensors = load_file(model / "model.safetensors")
    shards = {f"model-{n}.safetensors": {name: tensors[name] for name in sorted(tensors)[n::2]} for n in range(2)}
    for name, part in shards.items():
        save_file(part, model / name)
    index = {tensor: name for name, part in shards.items() for tensor in part}
    (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    (model / "model.safetensors").unlink()
    base, start = replace(get_config(), workdir=str(tmp_path / "workdir")), Pretrained(str(model))
    config = replace(base, model=start)
    if role == "critic":
        config = replace(base, algorithm=replace(base.algorithm, critic_model=start), tokenizer=str(model))
    assert not run(config, dry_run=True).finished
    file = model / "model-1.safetensors"
    content = file.read_bytes()
    file.unlink()
    with CompileCounter() as compiled, pytest.raises(Refusal, match=rf"{file.name} is missing.*incomplete"):
        run(config, dry_run=True)
    file.write_bytes(content)
    fields = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(fields | {"intermediate_size": fields["intermediate_size"] * 2}))
    with CompileCounter() as again, pytest.raises(Refusal, match=r"has shape .*config\.json and the requested head"):
        run(config, dry_run=True)
    assert compiled.count == again.count == 0


def test_dry_run_finds_a_tokenizer_of_other_tokens(tmp_path):
    model, larger = write_policy(tmp_path / "model"), write_policy(tmp_path / "larger")
    tokenizer = transformers.AutoTokenizer.from_pretrained(larger)
    tokenizer.add_tokens([f"word{n}" for n in range(200)])
    tokenizer.save_pretrained(larger)
    base, start = (
        replace(get_config(), workdir=str(tmp_path / "workdir"), tokenizer=str(larger)),
        Pretrained(str(model)),
    )
    policy, critic = replace(base, model=start), replace(base, algorithm=replace(base.algorithm, critic_model=start))
    for config in (policy, critic):
        with pytest.raises(Refusal, match=r"the tokenizer has ids up to 644, but the model embeds 448 tokens"):
            run(config, dry_run=True)
        assert not run(replace(config, tokenizer=str(model)), dry_run=True).finished


def test_a_run_without_held_out_records_says_so(tmp_path, capsys):
    (tmp_path / "train.jsonl").write_text('{"prompt": "1", "answer": "1"}\n' * 8)
    data = PromptFile(str(tmp_path / "train.jsonl"))
    run(replace(get_config(), data=data, cold_start=None, workdir=str(tmp_path / "workdir")), dry_run=True)
    assert "nothing is evaluated: PromptFile has no held-out records" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ("actor=replace(config.actor, lora=Lora(rank=2))", "the base weights of the adapters exist only in this run"),
        ("model=Nnx(lambda rngs: None)", "the run trains a user-defined module (Nnx), which has no Hugging"),
    ],
)
def test_what_cannot_be_exported_is_refused_before_it_is_trained(settings, message, tmp_path, capsys):
    text = CONFIG.read_text().replace("def get_config()", "def tiny()") + (
        "\n\nfrom dataclasses import replace\nfrom jaxrlhf.config import Lora, Nnx\n"
        f"def get_config():\n    config = tiny()\n    return replace(config, {settings})\n"
    )
    (tmp_path / "mine.py").write_text(text)
    arguments = ("--config", tmp_path / "mine.py", "--workdir", tmp_path / "run", "--export", tmp_path / "exported")
    with pytest.raises(SystemExit) as end:
        run_module("train", *arguments)
    assert end.value.code == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_an_export_does_not_take_the_place_of_a_file(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="file is a file; choose a new directory"):
        export_policy("run", tmp_path / "file")


def test_a_cold_start_is_no_run_to_export(tmp_path):
    cold = tmp_path / "run" / "cold_start"
    for folder in (cold / "checkpoints", tmp_path / "run" / "model"):
        folder.mkdir(parents=True)
    with pytest.raises(ValueError, match=r"is the cold start of the run in .*run; choose .*run or another whole run"):
        export_policy(cold, tmp_path / "new")


def test_a_workdir_that_cannot_be_made_is_refused(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=r"file is not writable: .*File exists.*; choose another"):
        run(replace(get_config(), workdir=str(tmp_path / "file")))


def test_a_workdir_may_be_in_the_home_directory(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    home = replace(get_config(), workdir="~/runs")
    (tmp_path / "runs" / "checkpoints" / "step_2").mkdir(parents=True)
    with pytest.raises(ValueError, match=f"{tmp_path}/runs already holds a run"):
        run(replace(home, resume=False))
    for reads in (
        lambda: export_policy("~/runs", tmp_path / "exported"),
        lambda: evaluate_policy(home, policy="~/runs", samples=1, show=0),
        lambda: evaluate_policy(home, policy=None, samples=1, show=0),
    ):
        with pytest.raises(ValueError, match=f"{tmp_path}/runs/checkpoints/step_2/host/metadata"):
            reads()


def test_two_runs_do_not_share_a_workdir(tmp_path):
    config = replace(get_config(), workdir=str(tmp_path))
    (tmp_path / "checkpoints" / "step_2").mkdir(parents=True)
    other = (
        "import fcntl, sys; lock = open(sys.argv[1], 'w'); fcntl.flock(lock, fcntl.LOCK_EX); "
        "print('held', flush=True); input()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", other, tmp_path / "lock"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(ValueError, match=r"another run is using the workdir .*; wait for its end"):
            run(config)
        assert not run(config, dry_run=True).finished
        holder.kill()
    with pytest.raises(ValueError, match="already holds a run, but resume=False"):  # past the lock of a killed run
        run(replace(config, resume=False))


def test_adapters_were_trained_beside_the_weights_of_a_converted_checkpoint(tmp_path):
    model = write_policy(tmp_path / "model")
    convert(model, tmp_path / "converted")
    expected = load_file(model / "model.safetensors")
    run = AdaptedRun(Lora(rank=2), Pretrained(str(tmp_path / "converted")), seed=0, cold_start=None)
    weights = dict(run.weights(read_config(model), "lm"))
    np.testing.assert_array_equal(weights["embed"], expected["model.embed_tokens.weight"])
    assert sum(weight.size for weight in weights.values()) == sum(weight.size for weight in expected.values())


# pass@k.


@pytest.mark.parametrize("samples", [1, 2, 5, 8])
def test_pass_at_k_is_the_share_of_draws_with_a_correct_answer(samples):
    for correct in range(samples + 1):
        answers = [True] * correct + [False] * (samples - correct)
        for k in range(1, samples + 1):
            draws = list(itertools.combinations(answers, k))
            assert pass_at_k(samples, correct, k) == pytest.approx(np.mean([any(draw) for draw in draws]))


def test_pass_at_k_of_many_samples():
    assert pass_at_k(10_000, 1, 100) == pytest.approx(0.01)
    assert pass_at_k(10_000, 0, 10_000) == 0


# A trained policy.


@pytest.fixture(scope="module")
def workdir(programs, undrawn, tmp_path_factory):
    """A finished run."""
    workdir = tmp_path_factory.mktemp("trained")
    run(replace(get_config(), steps=4, workdir=str(workdir)))
    return workdir


@pytest.fixture(scope="module")
def exported(workdir, tmp_path_factory):
    """Its policy as a Hugging Face checkpoint."""
    directory = tmp_path_factory.mktemp("exported") / "policy"
    run_module("export", workdir, directory)
    return directory


@pytest.mark.slow
def test_the_exported_policy_has_the_trained_logits_in_transformers(workdir, exported, tmp_path):
    config = models.read_config(workdir / "model")
    target = jax.eval_shape(lambda key: models.init_params(config, "lm", key), jax.random.key(0))
    checkpoints = Checkpoints(workdir / "checkpoints")
    restored = checkpoints.read(4, {"actor": on_first_device(target)})
    checkpoints.close()
    token_RW = np.random.default_rng(0).integers(0, config.vocab_size, (3, 40), dtype=np.int32)
    position_RW = np.broadcast_to(np.arange(40, dtype=np.int32), token_RW.shape)
    hidden_RWD = models.hidden_states(
        restored["actor"], config, token_RW, position_RW, np.ones_like(token_RW)
    ).hidden_RWD
    ours = models.logits(restored["actor"], config, hidden_RWD)

    theirs = transformers.AutoModelForCausalLM.from_pretrained(exported, dtype=torch.float32).eval()
    with torch.no_grad():
        expected = theirs(torch.tensor(token_RW, dtype=torch.long)).logits.numpy()
    np.testing.assert_allclose(ours, expected, atol=1e-4)
    tokenizer = transformers.AutoTokenizer.from_pretrained(exported)
    assert theirs.generation_config.eos_token_id == tokenizer.eos_token_id
    assert tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}], tokenize=False) == "<|user|>Hi"


@pytest.mark.slow
def test_what_the_run_wrote_is_on_the_page_of_metrics(workdir):
    assert unexplained(workdir, files=2) == []


def on_first_device(shapes):
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), shapes)


@pytest.mark.slow
def test_every_form_of_the_policy_has_the_accuracy_of_its_run(workdir, exported, capsys):
    logged = records(workdir / "metrics.jsonl")[-1]
    config = replace(get_config(), workdir=str(workdir))
    metrics = [
        evaluate_policy(config, policy=None, samples=1, show=0),
        evaluate_policy(replace(get_config(), workdir="elsewhere"), policy=str(workdir), samples=1, show=0),
        evaluate_policy(replace(get_config(), workdir="elsewhere"), policy=str(exported), samples=1, show=0),
    ]
    for name in ("eval/accuracy", "eval/length_mean", "eval/truncated_fraction", "eval/problems", "eval/unscorable"):
        assert {evaluated[name] for evaluated in metrics} == {logged[name]}
    assert 0 < logged["eval/accuracy"] < 1, "an accuracy that any policy has shows nothing"
    before = next(record for record in records(workdir / "metrics.jsonl") if record["step"] == 2)
    earlier = evaluate_policy(config, policy=None, samples=1, show=0, step=2)
    assert earlier["eval/length_mean"] == before["eval/length_mean"] != logged["eval/length_mean"]
    with pytest.raises(ValueError, match="no checkpoint of step 3; it has "):
        evaluate_policy(config, policy=None, samples=1, show=0, step=3)
    with pytest.raises(ValueError, match=f"--step 2 requires the workdir of a run, but {exported} is"):
        evaluate_policy(config, policy=str(exported), samples=1, show=0, step=2)

    capsys.readouterr()
    arguments = ("--config", CONFIG, "--policy", exported, "--samples", 4, "--show", 2)
    run_module("evaluate", *arguments)
    shown = capsys.readouterr().out
    assert shown.count(">>>") == 2
    rows = dict(line.split()[-2:] for line in shown.splitlines() if "pass@" in line)
    assert float(rows["pass@1"]) <= float(rows["pass@2"]) <= float(rows["pass@4"]) <= 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("{workdir}/tensorboard", "{new}"), "tensorboard has no model folder, so it is not the workdir of a run"),
        (("{workdir}", "{new}", "--step", "3"), "has no checkpoint of step 3; it has [2, 4]"),
        (("{workdir}", "{exported}"), "is not empty; choose a new directory"),
    ],
)
def test_export_refuses(arguments, message, workdir, exported, tmp_path, capsys):
    places = {"workdir": workdir, "exported": exported, "new": tmp_path / "new"}
    with pytest.raises(SystemExit) as end:
        run_module("export", *(argument.format(**places) for argument in arguments))
    shown = capsys.readouterr().err
    assert end.value.code == 2
    assert (shown[:7], shown.count("\n")) == ("error: ", 1)
    assert message in shown
    assert not (tmp_path / "new").exists()


@pytest.mark.slow
def test_a_run_ends_with_its_export_on_the_hub(workdir, hub, tmp_path, capsys):
    out = tmp_path / "out"
    words = ("--config", CONFIG, "--workdir", workdir, "--steps", 4)
    run_module("train", *words, "--export", out, "--dtype", "bfloat16", "--push", "me/tiny", "--private")
    assert "wrote the model of step 4" in capsys.readouterr().out
    files = {path: content for path, content in hub.repositories["me/tiny"]["main"].items() if path[0] != "."}
    assert files == {file.name: file.read_bytes() for file in out.iterdir()}
    assert hub.private == {"me/tiny"} and b'from_pretrained("me/tiny")' in files["README.md"]
    loaded = transformers.AutoModelForCausalLM.from_pretrained(out)
    assert loaded.dtype == torch.bfloat16


@pytest.mark.slow
def test_resuming_refuses_another_run_and_leaves_this_one_alone(workdir):
    config = replace(get_config(), steps=6, workdir=str(workdir))
    before = contents(workdir)
    for changes, message in (
        ({"seed": 1}, "the saved data position has seed=0 and this run has seed=1"),
        ({"resume": False}, "already holds a run, but resume=False"),
        ({"model": replace(config.model, num_layers=3)}, "num_layers=2, but the configuration has num_layers=3"),
        ({"cold_start": None}, "with cold_start: steps=2, but the configuration has none"),
    ):
        with pytest.raises(ValueError, match=message):
            run(replace(config, **changes))
        assert contents(workdir) == before


def contents(directory: Path) -> dict[Path, bytes]:
    return {file: file.read_bytes() for file in sorted(directory.rglob("*")) if file.is_file()}


@pytest.mark.slow
def test_a_finished_run_is_not_described_by_settings_that_trained_nothing(workdir, capsys):  # the last test
    config = replace(get_config(), steps=4, workdir=str(workdir))
    before, metrics = ((workdir / name).read_bytes() for name in ("config.json", "metrics.jsonl"))
    hotter = replace(config.actor, optimizer=replace(config.actor.optimizer, learning_rate=0.5))
    assert run(replace(config, actor=hotter)).finished
    shown = capsys.readouterr().out
    assert "tiny: all 4 steps are done; to train further, raise steps or choose another workdir" in shown
    assert (workdir / "config.json").read_bytes() == before
    assert (workdir / "metrics.jsonl").read_bytes() == metrics
    run(replace(config, actor=hotter, steps=5))
    [line] = [line for line in capsys.readouterr().out.splitlines() if line.startswith("settings changed since the")]
    assert set(line.split(": ")[1].split(", ")) == {"steps 4 -> 5", "actor.optimizer.learning_rate 0.003 -> 0.5"}
    assert json.loads((workdir / "config.json").read_text())["steps"] == 5

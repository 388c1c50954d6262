"""A run is not resumed with what makes other numbers of its checkpoints."""

import json
import os
import shutil
from contextlib import closing
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from flax import nnx
from tiny_runs import get_config

import jaxrlhf
from jaxrlhf.checkpoint import Checkpoints, Damaged, TreeItem
from jaxrlhf.config import Checkpointing, ColdStart, Config, FromScratch, Lora, Nnx, Pretrained, Refusal, to_json
from jaxrlhf.trainer import run as whole
from jaxrlhf.trainer.resume import changed_settings, check_same_start, describe_start

LORA = Lora(rank=2, alpha=4.0)


def adapting(lora: Lora | None = LORA, critic: Lora | None = None) -> Config:
    config = get_config()
    algorithm = replace(config.algorithm, critic=replace(config.algorithm.critic, lora=critic))
    return replace(config, actor=replace(config.actor, lora=lora), algorithm=algorithm, cold_start=None)


def trained(workdir, config: Config):
    (workdir / "checkpoints" / "step_2").mkdir(parents=True)
    (workdir / "config.json").write_text(json.dumps(to_json(config)))
    return workdir


@pytest.mark.parametrize(
    "changed",
    [
        {"alpha": 8.0},
        {"rank": 4, "alpha": 8.0},
        {"targets": ("query",)},
        {"rslora": True},
        {"quantize": "nf4"},
    ],
    ids=lambda value: " ".join(value) if isinstance(value, dict) else "",
)
def test_changed_adapters_are_refused(refused, changed, tmp_path):
    with refused():
        check_same_start(trained(tmp_path, adapting()), adapting(replace(LORA, **changed)))


def test_adapters_that_come_or_go_are_refused(refused, tmp_path):
    with refused():
        check_same_start(trained(tmp_path / "had", adapting()), adapting(None))
    with refused():
        check_same_start(trained(tmp_path / "has", adapting()), adapting(critic=LORA))


def small(experts: int = 0, **model: int) -> FromScratch:
    return FromScratch(hidden_size=32, num_layers=2, experts=experts, **model)


@pytest.mark.parametrize(
    ("was", "now"),
    [
        (Pretrained("a"), Pretrained("b")),
        (small(4, experts_per_token=2), small(4, experts_per_token=1)),
        (small(), Pretrained("a")),
        (Nnx(nnx.Linear), small()),
    ],
    ids=["another path", "other experts", "another kind", "no longer one's own"],
)
def test_another_model_is_refused(refused, was, now, tmp_path):
    trained(tmp_path, replace(adapting(None), model=was))
    with refused():
        check_same_start(tmp_path, replace(adapting(None), model=now))


@pytest.mark.parametrize(
    ("was", "now"),
    [
        (ColdStart(2), ColdStart(3)),
        (ColdStart(2), None),
        (None, ColdStart(2)),
    ],
    ids=["longer", "none", "one"],
)
def test_another_cold_start_is_refused(refused, was, now, tmp_path):
    trained(tmp_path, replace(adapting(None), cold_start=was))
    with refused():
        check_same_start(tmp_path, replace(adapting(None), cold_start=now))


def test_a_model_of_ones_own_is_the_same_wherever_its_function_lies(tmp_path):
    first, second = (replace(adapting(None), model=Nnx(partial(nnx.Linear, 2, 3))) for _ in range(2))
    described = to_json(first)
    described["model"]["build"] += "at another address"
    trained(tmp_path, first)
    (tmp_path / "config.json").write_text(json.dumps(described))
    check_same_start(tmp_path, second)


@pytest.fixture
def checkpoint(tmp_path):
    """A checkpoint and a run that started from it."""
    path = tmp_path / "here"
    path.mkdir()
    (path / "config.json").write_text('{"rope_theta": 1e4}')
    (path / "model.safetensors").write_bytes(bytes(range(256)) * 64_000)  # 16 MB; a quarter is compared
    trained(tmp_path / "run", replace(adapting(None), model=Pretrained(str(path))))
    describe_start(tmp_path / "run", replace(adapting(None), model=Pretrained(str(path))))
    return path


def resume(tmp_path, path) -> None:
    check_same_start(tmp_path / "run", replace(adapting(None), model=Pretrained(str(path))))


def test_a_checkpoint_may_be_moved(checkpoint, tmp_path):
    resume(tmp_path, checkpoint)
    resume(tmp_path, checkpoint.rename(tmp_path / "there"))


@pytest.mark.parametrize("moved", [False, True], ids=["at its place", "moved"])
@pytest.mark.parametrize("changed", ["a tensor", "its length", "config.json", "a further file"])
def test_another_checkpoint_is_refused_wherever_it_lies(refused, changed, moved, checkpoint, tmp_path):
    weights = checkpoint / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[9_000_000 : 9_000_000 + len(content) // 1000] = bytes(len(content) // 1000)
    other = {
        "a tensor": lambda: weights.write_bytes(content),
        "its length": lambda: weights.write_bytes(weights.read_bytes()[:-1]),
        "config.json": lambda: (checkpoint / "config.json").write_text('{"rope_theta": 1e6}'),
        "a further file": lambda: (checkpoint / "model-2.safetensors").write_bytes(b""),
    }
    other[changed]()
    path = checkpoint.rename(tmp_path / "there") if moved else checkpoint

    with refused():
        resume(tmp_path, path)


def test_of_a_run_that_did_not_write_down_its_weights_only_the_path_is_known(refused, checkpoint, tmp_path):
    (tmp_path / "run" / "weights.json").unlink()
    resume(tmp_path, checkpoint)
    with refused():
        resume(tmp_path, checkpoint.rename(tmp_path / "there"))


@pytest.mark.parametrize("damage", ["a pipe", "a folder", "bytes", "a list"])
def test_damaged_identity_of_the_weights_is_refused(checkpoint, damage, tmp_path):
    file = tmp_path / "run" / "weights.json"
    file.write_text("null\n")
    resume(tmp_path, checkpoint)  # the weights were not on the machine at the first start
    file.unlink()
    damages = {
        "a pipe": lambda: os.mkfifo(file),
        "a folder": file.mkdir,
        "bytes": lambda: file.write_bytes(b'{"model.safetensors": "\x80"}'),
        "a list": lambda: file.write_text("[]"),
    }
    damages[damage]()
    with pytest.raises(Refusal, match=r"run/weights\.json .*restore the file that the run wrote"):
        resume(tmp_path, checkpoint)


def test_a_phase_that_is_over_is_not_opened_again(tmp_path, monkeypatch):
    opened, config = [], replace(get_config(), workdir=str(tmp_path))
    policy = tmp_path / "cold_start" / "checkpoints" / "step_2" / "actor"

    def run_phase(context, config, pools, start, **_):
        opened.append((config.name, start))
        return config.folder

    monkeypatch.setattr(whole, "run_phase", run_phase)
    monkeypatch.setattr(whole, "_check_workdir", lambda config: None)
    jaxrlhf.run(config)
    assert opened == [("tiny (cold start)", None), ("tiny", tmp_path / "cold_start")]
    opened.clear()
    with closing(Checkpoints(policy.parents[1])) as checkpoints:
        checkpoints.save(2, {"actor": TreeItem(lambda: {"weight": np.ones(3)}, lambda tree: None)}, {})
    jaxrlhf.run(config)
    assert opened == [("tiny", policy)]
    [file] = policy.glob("manifest.ocdbt")
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(Damaged, match="the checkpoint of step 2 is damaged"):
        jaxrlhf.run(config)


def test_a_damaged_phase_that_is_over_is_made_again_from_the_checkpoint_before(tmp_path, monkeypatch, capsys):
    opened, saving = [], Checkpointing(every_steps=2, on_damage="previous")
    config = replace(get_config(), workdir=str(tmp_path), checkpoint=saving)
    folder = tmp_path / "cold_start" / "checkpoints"

    def run_phase(context, config, pools, start, **_):
        opened.append((config.name, config.saving.on_damage, start))
        return config.folder

    monkeypatch.setattr(whole, "run_phase", run_phase)
    monkeypatch.setattr(whole, "_check_workdir", lambda config: None)

    def saved(*steps: int) -> None:
        with closing(Checkpoints(folder)) as checkpoints:
            for step in steps:
                checkpoints.save(step, {"actor": TreeItem(lambda: {"weight": np.ones(3)}, lambda tree: None)}, {})

    saved(1, 2)
    [file] = (folder / "step_2" / "actor").glob("manifest.ocdbt")
    file.write_bytes(file.read_bytes()[:-1])
    jaxrlhf.run(config)
    cold = ("tiny (cold start)", "previous", None)
    assert opened == [cold, ("tiny", "previous", tmp_path / "cold_start")]
    said = capsys.readouterr().out
    assert f"moved the checkpoint to {folder}_damaged/step_2" in said and "on_damage" not in said

    saved(2)
    shutil.rmtree(folder / "step_1")
    [file] = (folder / "step_2" / "actor").glob("manifest.ocdbt")
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(Damaged, match=r"no other checkpoints\. Restore the checkpoint from a copy, or choose another"):
        jaxrlhf.run(config)
    assert len(opened) == 2


def test_what_is_the_same_is_not_refused(tmp_path):
    check_same_start(trained(tmp_path, adapting(critic=LORA)), adapting(critic=LORA))
    described = json.loads((tmp_path / "config.json").read_text())
    # As a version wrote it that had no such settings.
    del described["actor"]["lora"]["quantize"], described["model"]["experts"]
    (tmp_path / "config.json").write_text(json.dumps(described))
    check_same_start(tmp_path, adapting(critic=LORA))


def test_a_run_of_a_version_that_knew_no_pictures_goes_on(refused, tmp_path):
    config = replace(adapting(None), model=Pretrained("a"))
    described = json.loads((trained(tmp_path, config) / "config.json").read_text())
    del described["model"]["vision"]
    (tmp_path / "config.json").write_text(json.dumps(described))
    check_same_start(tmp_path, config)
    with refused():
        check_same_start(tmp_path, replace(config, model=Pretrained("a", vision=True)))


def test_adapters_whose_settings_are_gone_are_refused(refused, tmp_path):
    with refused():
        check_same_start(tmp_path, adapting())
    check_same_start(tmp_path, adapting(None))


def test_settings_that_are_torn_are_refused(refused, tmp_path):
    file = trained(tmp_path, adapting(None)) / "config.json"
    file.write_text(file.read_text()[:100])
    with refused():
        check_same_start(tmp_path, adapting(None))


def test_a_run_is_refused_before_it_begins(refused, tmp_path):
    before = (trained(tmp_path, adapting()) / "config.json").read_bytes()
    with refused():
        jaxrlhf.run(replace(adapting(replace(LORA, alpha=8.0)), workdir=str(tmp_path)))
    assert not (tmp_path / "metrics.jsonl").exists()
    assert (tmp_path / "config.json").read_bytes() == before


def test_what_is_not_as_before_is_named(tmp_path):
    config = adapting()
    assert changed_settings(tmp_path, config) == []  # there was no start
    trained(tmp_path, config)
    now = replace(
        config,
        name="other",
        workdir="elsewhere",
        data=replace(config.data, difficulty=3),
        actor=replace(config.actor, optimizer=replace(config.actor.optimizer, learning_rate=0.5)),
        algorithm=replace(config.algorithm, kl=None),
    )
    assert changed_settings(tmp_path, now) == [
        "algorithm.kl KLInReward -> None",
        "data.difficulty 1 -> 3",
        "actor.optimizer.learning_rate 0.003 -> 0.5",
    ]
    assert changed_settings(tmp_path, replace(config, resume=False)) == []

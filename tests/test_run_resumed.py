"""A run is not resumed with what makes other numbers of its checkpoints."""

import json
from dataclasses import replace
from functools import partial

import pytest
from flax import nnx
from tiny_runs import get_config

import jaxrlhf
from jaxrlhf.config import ColdStart, Config, FromScratch, Lora, Nnx, Pretrained, to_json
from jaxrlhf.controller.resumed import check_same_start

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
    ("changed", "words"),
    [
        ({"alpha": 8.0}, r"actor\.lora of alpha=4\.0, and the configuration has alpha=8\.0"),
        ({"rank": 4, "alpha": 8.0}, r"of rank=2, alpha=4\.0, and the configuration has rank=4, alpha=8\.0"),
        ({"targets": ("query",)}, r"has targets=\['query'\]"),
        ({"rslora": True}, "of rslora=False, and the configuration has rslora=True"),
        ({"quantize": "nf4"}, "of quantize=None, and the configuration has quantize='nf4'"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, dict) else "",
)
def test_changed_adapters_are_refused(changed, words, tmp_path):
    with pytest.raises(ValueError, match=words):
        check_same_start(trained(tmp_path, adapting()), adapting(replace(LORA, **changed)))


def test_adapters_that_come_or_go_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"with actor\.lora of rank=2, .* and the configuration has none"):
        check_same_start(trained(tmp_path / "had", adapting()), adapting(None))
    with pytest.raises(ValueError, match=r"with critic\.lora of none, and the configuration has rank=2"):
        check_same_start(trained(tmp_path / "has", adapting()), adapting(critic=LORA))


def small(experts: int = 0, **model: int) -> FromScratch:
    return FromScratch(hidden_size=32, num_layers=2, experts=experts, **model)


@pytest.mark.parametrize(
    ("was", "now", "words"),
    [
        (Pretrained("a"), Pretrained("b"), "with model of path='a', and the configuration has path='b'"),
        (
            small(4, experts_per_token=2),
            small(4, experts_per_token=1),
            r"of experts_per_token=2, .* experts_per_token=1",
        ),
        (small(), Pretrained("a"), r"of .*class='FromScratch'.* has .*path='a'"),
        (Nnx(nnx.Linear), small(), "of class='Nnx', and the configuration has class='FromScratch', .*num_layers=2"),
    ],
    ids=["another path", "other experts", "another kind", "no longer one's own"],
)
def test_another_model_is_refused(was, now, words, tmp_path):
    trained(tmp_path, replace(adapting(None), model=was))
    with pytest.raises(ValueError, match=words):
        check_same_start(tmp_path, replace(adapting(None), model=now))


@pytest.mark.parametrize(
    ("was", "now", "words"),
    [
        (ColdStart(2), ColdStart(3), "with cold_start of steps=2, and the configuration has steps=3"),
        (ColdStart(2), None, "with cold_start of steps=2, and the configuration has none"),
        (None, ColdStart(2), "with cold_start of none, and the configuration has steps=2"),
    ],
    ids=["longer", "none", "one"],
)
def test_another_cold_start_is_refused(was, now, words, tmp_path):
    trained(tmp_path, replace(adapting(None), cold_start=was))
    with pytest.raises(ValueError, match=words):
        check_same_start(tmp_path, replace(adapting(None), cold_start=now))


def test_a_model_of_ones_own_is_the_same_wherever_its_function_lies(tmp_path):
    first, second = (replace(adapting(None), model=Nnx(partial(nnx.Linear, 2, 3))) for _ in range(2))
    described = to_json(first)
    described["model"]["build"] += "at another address"
    trained(tmp_path, first)
    (tmp_path / "config.json").write_text(json.dumps(described))
    check_same_start(tmp_path, second)


def test_what_is_the_same_is_not_refused(tmp_path):
    check_same_start(trained(tmp_path, adapting(critic=LORA)), adapting(critic=LORA))
    described = json.loads((tmp_path / "config.json").read_text())
    # As a version wrote it that had no such settings.
    del described["actor"]["lora"]["quantize"], described["model"]["experts"]
    (tmp_path / "config.json").write_text(json.dumps(described))
    check_same_start(tmp_path, adapting(critic=LORA))


def test_adapters_whose_settings_are_gone_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"config\.json is gone, .* scale of actor's adapters"):
        check_same_start(tmp_path, adapting())
    check_same_start(tmp_path, adapting(None))


def test_settings_that_are_torn_are_refused(tmp_path):
    file = trained(tmp_path, adapting(None)) / "config.json"
    file.write_text(file.read_text()[:100])
    with pytest.raises(ValueError, match=r"config\.json cannot be read .*; mend it"):
        check_same_start(tmp_path, adapting(None))


def test_a_run_is_refused_before_it_begins(tmp_path):
    before = (trained(tmp_path, adapting()) / "config.json").read_bytes()
    with pytest.raises(ValueError, match=r"has alpha=8\.0; resume with what it was"):
        jaxrlhf.run(replace(adapting(replace(LORA, alpha=8.0)), workdir=str(tmp_path)))
    assert not (tmp_path / "metrics.jsonl").exists()
    assert (tmp_path / "config.json").read_bytes() == before

"""A run is not resumed with adapters that mean something else."""

import json
from dataclasses import replace

import pytest
from tiny_runs import get_config

import jaxrlhf
from jaxrlhf.config import Config, Lora, to_json
from jaxrlhf.controller.resumed import check_same_adapters

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
        check_same_adapters(trained(tmp_path, adapting()), adapting(replace(LORA, **changed)))


def test_adapters_that_come_or_go_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"with actor\.lora of rank=2, .* and the configuration has none"):
        check_same_adapters(trained(tmp_path / "had", adapting()), adapting(None))
    with pytest.raises(ValueError, match=r"with critic\.lora of none, and the configuration has rank=2"):
        check_same_adapters(trained(tmp_path / "has", adapting()), adapting(critic=LORA))


def test_what_is_the_same_is_not_refused(tmp_path):
    check_same_adapters(trained(tmp_path, adapting(critic=LORA)), adapting(critic=LORA))
    described = json.loads((tmp_path / "config.json").read_text())
    del described["actor"]["lora"]["quantize"]  # as a version wrote it that had no such setting
    (tmp_path / "config.json").write_text(json.dumps(described))
    check_same_adapters(tmp_path, adapting(critic=LORA))


def test_adapters_whose_settings_are_gone_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"config\.json is gone, .* scale of actor's adapters"):
        check_same_adapters(tmp_path, adapting())
    check_same_adapters(tmp_path, adapting(None))


def test_a_run_is_refused_before_it_begins(tmp_path):
    before = (trained(tmp_path, adapting()) / "config.json").read_bytes()
    with pytest.raises(ValueError, match=r"has alpha=8\.0; resume with what it was"):
        jaxrlhf.run(replace(adapting(replace(LORA, alpha=8.0)), workdir=str(tmp_path)))
    assert not (tmp_path / "metrics.jsonl").exists()
    assert (tmp_path / "config.json").read_bytes() == before

"""Damaged policies of runs: `export`, `evaluate` and `serve` notice them before they read a weight."""

import json
import re
import shutil

import pytest
from made_runs import LORA, made_config, make_run

from jaxrlhf.checkpoint import Damaged
from jaxrlhf.config import Refusal
from jaxrlhf.trainer.policy import export_policy, policy_roles
from jaxrlhf.trainer.served_policy.flags import EngineSizes
from jaxrlhf.trainer.served_policy.load import load_policy

SIZES = EngineSizes(slots=2, context_tokens=64, response_tokens=16, dtype="float32")


@pytest.fixture(scope="module", params=[None, LORA], ids=["whole weights", "adapters"])
def made(request, tmp_path_factory):
    """A run, and the settings of its adapters."""
    folder = tmp_path_factory.mktemp("made") / "run"
    make_run(folder, request.param)
    return folder, request.param


@pytest.fixture
def run(made, tmp_path):
    """A copy to damage."""
    return shutil.copytree(made[0], tmp_path / "run")


def export(run, lora):
    return export_policy(run, run.parent / "exported", merge=lora is not None)


def evaluate(run, lora):
    return policy_roles(made_config(run, lora), str(run)).saved.step


def serve(run, lora):
    return load_policy(str(run), SIZES).engine.weights.version


COMMANDS = [export, evaluate, serve]


@pytest.mark.parametrize("command", COMMANDS)
def test_flipped_bit_of_the_weights_is_noticed(made, run, command):
    _, lora = made
    item = run / "checkpoints" / "step_2" / ("actor" if lora is None else "actor_adapters")
    file = max((path for path in item.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 4
    file.write_bytes(content)
    words = rf"step 2 is damaged: {re.escape(str(file))} has a wrong checksum.*; no other checkpoints\. Restore"
    with pytest.raises(Damaged, match=words):
        command(run, lora)
    assert not list(run.parent.glob("exported/*"))
    content[len(content) // 2] ^= 4
    file.write_bytes(content)
    assert command(run, lora) == 2


@pytest.mark.parametrize("made", [LORA], indirect=True, ids=["adapters"])
@pytest.mark.parametrize("command", COMMANDS)
def test_flipped_scale_of_the_adapters_is_noticed(made, run, command):
    settings = run / "config.json"
    settings.write_text(settings.read_text().replace('"alpha": 32.0', '"alpha": 36.0'))
    words = r"config\.json has alpha=36\.0 for the adapters of actor, but the checkpoint was trained with 32\.0; the"
    with pytest.raises(Refusal, match=words):
        command(run, LORA)
    assert not list(run.parent.glob("exported/*"))


@pytest.mark.parametrize("made", [LORA], indirect=True, ids=["adapters"])
def test_checkpoint_of_an_earlier_version_names_no_adapters(made, run):
    state = run / "checkpoints" / "step_2" / "host" / "metadata"
    contents = json.loads(state.read_text())
    del contents["state"]["adapters"]
    state.write_text(json.dumps({name: contents[name] for name in ("state", "arrays")}))
    (run / "checkpoints" / "step_2" / "actor_adapters" / "checksums.json").unlink()
    assert evaluate(run, LORA) == 2

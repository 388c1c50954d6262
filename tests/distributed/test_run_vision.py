"""Runs on images by two Ray hosts: the numbers of one process, and no pixels through the controller."""

from dataclasses import replace

import numpy as np
import pytest
import ray_world
import seeing_environments
from placed_runs import assert_same_numbers, run
from tiny_runs import get_config

from jaxrlhf.config import GRPO, Environment, FunctionReward, RayCluster, Rewards, Shapes, Tower
from jaxrlhf.models import model_config, tokenizer_of
from jaxrlhf.models.vision.reader import image_reader
from jaxrlhf.single_controller.ray.cluster import connect, disconnect
from jaxrlhf.trainer.phase import load_problems

pytestmark = pytest.mark.usefixtures("programs", "undrawn")

CLUSTER = RayCluster(devices_per_host=4, platform="cpu", call_timeout_s=300.0)


def settings():
    tiny = get_config()
    tower = Tower(hidden_size=16, intermediate_size=16, num_layers=1, num_heads=2)
    return {
        "steps": 2,
        "model": replace(tiny.model, vision=tower),
        "data": Shapes(train_problems=64, eval_problems=8),
        "algorithm": GRPO(responses_per_update=16, old_logp="trainer"),
        "rollout": replace(tiny.rollout, max_prompt_tokens=32, max_response_tokens=8),
    }


@pytest.fixture
def connection(programs):
    connection = connect(CLUSTER)
    yield
    disconnect(connection)


LAYOUT = {"fsdp": 4, "tensor": 2, "generation_tensor": 1}


@pytest.mark.seeds
def test_pixels_bypass_the_controller(connection, tmp_path, monkeypatch):
    here = run(tmp_path / "here", **settings())
    passing = ray_world.traffic(monkeypatch.setattr)
    there = run(tmp_path / "there", devices=8, cluster=CLUSTER, actor=LAYOUT, **settings())
    assert_same_numbers(there, here)
    config = replace(get_config(), **settings())
    tokenizer = tokenizer_of(config)
    reader = image_reader(config, model_config(config.model, tokenizer), tokenizer)
    problems = load_problems(config.data, tokenizer, split="train", max_prompt_tokens=32, reader=reader).problems
    pixels = reader.patches(problems[0].images[0]).nbytes
    assert pixels == 36 * 3 * 2 * 7 * 7 * np.float32().nbytes
    assert 0 < passing["get"] + passing["put"] < 2 * 8 * pixels / 4, "of two steps of eight pictures each"


@pytest.mark.seeds
def test_images_of_episodes_bypass_the_controller(connection, tmp_path, monkeypatch):
    shows = Environment(
        factory="seeing_environments:ShowsHeavy", max_turns=2, turn_tokens=5, cut_turns="close", observation_tokens=48
    )
    own = settings() | {"environment": shows}
    own["rewards"] = Rewards(parts=(FunctionReward(f"{seeing_environments.__file__}:pictures"),))
    own["rollout"] = replace(own["rollout"], max_response_tokens=64)
    here = run(tmp_path / "here", **own)
    passing = ray_world.message_bytes(monkeypatch.setattr)
    there = run(tmp_path / "there", devices=8, cluster=CLUSTER, actor=LAYOUT, **own)
    assert_same_numbers(there, here)
    assert {path.name for path in (there / "hosts").glob("all-?.log")} == {"all-0.log", "all-1.log"}
    episodes = 2 * 8 * 2
    assert 0 < passing["written"] + passing["read"] < episodes * 2 * seeing_environments.PADDING / 10

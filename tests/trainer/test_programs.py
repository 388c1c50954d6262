"""Every program of a PPO step, lowered and compiled for chips that are not here, by their own compilers."""

import re
from dataclasses import replace

import pytest
from tiny_runs import get_config

from jaxrlhf.config import PRIME, Environment, Layout, ReMax, load_module, override
from jaxrlhf.data.tokenizer import embedded_tokenizer
from jaxrlhf.models.kernels import cpu
from jaxrlhf.planner.hardware import hardware
from jaxrlhf.planner.topology import topology
from jaxrlhf.trainer.programs import lower_programs

SPLIT = {"actor.layout": Layout(fsdp=2, tensor=2, generation_tensor=2), "algorithm.critic.layout": Layout(fsdp=4)}
CHANGES = {"devices": None, "cold_start": None, "compute_dtype": "bfloat16", **SPLIT}
GAME = Environment(factory="games.py:Game")
TRAINED = {"forward", "zero gradient", "gradient", "sum of gradients", "optimizer state", "optimizer update"}
GENERATION = {"unstack", "prefill", "empty pages", "empty slots", "insert", "place", "decode", "add pages"}


@pytest.fixture(scope="module", params=["h100x1", "v5p-16"])
def lowered(request):
    config = override(get_config(), CHANGES)
    devices = topology(hardware(request.param))
    assert len(devices) == 8
    with pytest.MonkeyPatch.context() as patch:
        for written_for_cpu in ("_like", "_matrix", "_is_left_factor"):
            patch.setattr(cpu, written_for_cpu, of_another_platform)
        return lower_programs(config, embedded_tokenizer(), devices)


def of_another_platform(*_):
    raise AssertionError("a chip's program has what is written for CPU")


@pytest.mark.slow
def test_all_programs_of_the_step_are_there(lowered):
    found: dict[str, set[str]] = {}
    for name in lowered:
        role, _, program = name.partition(".")
        found.setdefault(role, set()).add(re.sub(r"\[.*", "", program))
    assert found["critic"] == TRAINED
    # Weights that are split along widths and heads have no replicas whose gradients are summed at the end.
    assert found["actor"] == TRAINED - {"sum of gradients"} | {"to_generation"}
    assert found["reference"] == {"forward"}
    assert found["generation"] == GENERATION


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "environment"),
    [(ReMax, None), (PRIME, None), (load_module("gigpo").GiGPO, GAME), (load_module("rae").RAE, GAME)],
)
def test_algorithms_that_learn_from_more_than_responses_have_the_programs_of_their_step(kind, environment):
    algorithm = kind(responses_per_update=get_config().algorithm.responses_per_update)
    config = replace(get_config(), algorithm=algorithm, environment=environment, cold_start=None)
    config = override(config, {"devices": None})
    programs = lower_programs(config, embedded_tokenizer(), topology(hardware("v5p-8"))[:1], generation=False)
    assert "actor.gradient" in programs


@pytest.mark.slow
def test_the_chips_compiler_takes_an_update_and_a_decode_and_says_their_memory(lowered):
    largest = max((name for name in lowered if ".decode" in name), key=lambda name: int(re.findall(r"\d+", name)[-1]))
    for name in ("actor.gradient", largest):
        memory = lowered[name].compile().memory_analysis()
        assert memory.argument_size_in_bytes > 0 and memory.temp_size_in_bytes > 0

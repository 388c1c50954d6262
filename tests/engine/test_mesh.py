"""One device and eight give the same responses."""

import math
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compiled import named
from tiny_models import SMALL, same_responses, sharp

from jaxrlhf import models
from jaxrlhf.config import Sampling
from jaxrlhf.engine import Engine, Request, compiled
from jaxrlhf.models.config import Experts, LatentAttention, ModelConfig
from jaxrlhf.planner.hardware import hardware
from jaxrlhf.planner.topology import topology
from jaxrlhf.sharding.described import described
from jaxrlhf.sharding.mesh import SLOT_AXES, mesh_of
from jaxrlhf.sharding.rules import GENERATE, shardings

pytestmark = pytest.mark.usefixtures("programs")

MODEL = replace(SMALL, qk_norm=True)
LATENT = ModelConfig(
    family="deepseek_v3",
    vocab_size=32,
    hidden_size=16,
    intermediate_size=32,
    num_layers=2,
    num_heads=4,
    num_kv_heads=4,
    head_dim=8,
    latent=LatentAttention(rank=6, rope_dim=4, value_dim=6, query_rank=10),
    dense_layers=1,
    experts=Experts(4, 2, 8, 8, scores="sigmoid", bias=True),
)


def run(model: ModelConfig, **sizes: int):
    mesh = mesh_of(sizes, jax.devices()[: math.prod(sizes.values())])
    layout = shardings(mesh, models.param_dims(model, "lm"), GENERATE)
    engine = Engine(
        model,
        mesh,
        slots=6,
        max_prompt_tokens=12,
        max_response_tokens=8,
        stop_tokens=(3,),
        decode_tokens_per_dispatch=4,
        slot_axes=SLOT_AXES,
        kv_head_axis="tensor",
    )
    engine.load(jax.device_put(sharp(model), layout), version=0)
    rng = np.random.default_rng(0)
    prompts = [tuple(rng.integers(0, 32, rng.integers(1, 13)).tolist()) for _ in range(5)]
    requests = [Request(3 * group + i, prompt) for group, prompt in enumerate(prompts) for i in range(3)]
    return engine, engine.generate(requests, Sampling(temperature=0.8, top_p=0.95), seed=11)


@pytest.fixture(scope="module")
def expected():
    return run(MODEL)[1]


@pytest.mark.parametrize(
    ("sizes", "replicas"),
    [
        pytest.param({"data": 8}, 8, marks=pytest.mark.slow),
        pytest.param({"data": 2, "tensor": 2, "micro_tensor": 2}, 4, marks=pytest.mark.slow),
        pytest.param({"stage": 2, "micro_stage": 4}, 4, marks=pytest.mark.seeds),  # engine/test_stages.py has stages
    ],
)
def test_eight_devices_generate_what_one_does(sizes, replicas, expected):
    engine, completions = run(MODEL, **sizes)
    assert engine.slots % replicas == 0
    same_responses(completions, expected)


@pytest.mark.slow
def test_heads_are_split_where_the_cache_is_of_latents_that_serve_all_of_them():
    _, completions = run(LATENT, data=2, tensor=2)
    same_responses(completions, run(LATENT)[1])


@pytest.mark.parametrize(
    ("model", "order"),
    [
        (MODEL, ((0, 3, 1, 2), (0, 2, 1, 3))),
        pytest.param(LATENT, ((0, 1, 3, 2), (0, 1, 2, 3)), marks=pytest.mark.slow),
    ],
)
def test_a_cache_that_lies_position_by_position_as_on_tpus_gives_the_same(model, order, expected, monkeypatch):
    monkeypatch.setattr(compiled, "BY_POSITION", ("cpu",))
    engine, completions = run(model)
    same_responses(completions, expected if model is MODEL else run_usual(model, monkeypatch))
    cache, *_ = named(engine, "decode")[0].output_formats
    assert [tuple(leaf.layout.major_to_minor for leaf in stored) for stored in cache] == [order] * model.num_layers


@pytest.mark.slow
def test_decoding_on_a_tpu_holds_its_cache_once():
    """The chip's own compiler says so, asked about a model that is hardly more than its cache."""
    model = replace(MODEL, num_kv_heads=4, head_dim=128, hidden_size=128)
    mesh = mesh_of({"data": 1}, topology(hardware("v5e-1")))
    layout = shardings(mesh, models.param_dims(model, "lm"), GENERATE)
    engine = Engine(
        model,
        mesh,
        slots=64,
        max_prompt_tokens=512,
        max_response_tokens=512,
        stop_tokens=(3,),
        decode_tokens_per_dispatch=4,
        slot_axes=SLOT_AXES,
    )
    engine.load(described(models.param_shapes(model, "lm", jnp.bfloat16), layout), version=0)
    engine.compile_ahead([512])
    memory = engine.compiled.lowered["decode[64, 1024]"].compile().memory_analysis()
    cache = 2 * model.num_layers * 64 * 4 * 128 * 1024 * 4
    assert cache < memory.argument_size_in_bytes < 1.1 * cache
    assert memory.temp_size_in_bytes < 0.1 * cache


def run_usual(model, monkeypatch):
    monkeypatch.setattr(compiled, "BY_POSITION", ())
    return run(model)[1]

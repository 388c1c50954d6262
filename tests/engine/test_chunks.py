"""An engine that runs long prompts in chunks gives what one gives that runs them whole."""

import math
from dataclasses import replace

import jax
import numpy as np
import pytest
from compiled import most_compilations
from tiny_models import SMALL, logits, same_responses, sharp

from jaxrlhf import models
from jaxrlhf.config import Sampling
from jaxrlhf.engine import Engine, Request
from jaxrlhf.models.config import Experts, YarnRope
from jaxrlhf.sharding.mesh import SLOT_AXES, mesh_of
from jaxrlhf.sharding.rules import GENERATE, shardings

pytestmark = pytest.mark.usefixtures("programs")

WINDOWS = replace(SMALL, qk_norm=True, sliding_window=9, sliding_layers=(True, False))
MIXTURE = replace(SMALL, family="qwen3_moe", experts=Experts(6, 2, 8))
LONGEST_PROMPT, LONGEST_RESPONSE = 40, 8


def build(model, monkeypatch, *, chunks: bool, pages: bool = False, **sizes: int) -> Engine:
    """With chunks, prompts of more than 16 tokens are run six at a time, in buckets of 24, 32 and 40."""
    if chunks:
        monkeypatch.setattr("jaxrlhf.engine.prefill.PREFILL_TOKENS", 16)
        monkeypatch.setattr("jaxrlhf.engine.prefill.CHUNK_TOKENS", 6)
    mesh = mesh_of(sizes, jax.devices()[: math.prod(sizes.values())])
    paged = models.ONE_DEVICE
    if pages:
        paged = models.Execution(pages_kernel="xla", mesh=mesh, row_axes=SLOT_AXES, head_axes=("tensor",))
    engine = Engine(
        model,
        mesh,
        slots=4,
        max_prompt_tokens=LONGEST_PROMPT,
        max_response_tokens=LONGEST_RESPONSE,
        stop_tokens=(3,),
        decode_tokens_per_dispatch=4,
        slot_axes=SLOT_AXES,
        kv_head_axis="tensor",
        execution=replace(paged, pipeline=models.pipeline_over(mesh, ("stage",), row_axes=SLOT_AXES)),
        records_routing=model.experts is not None,
    )
    layout = shardings(mesh, models.param_dims(model, "lm"), GENERATE)
    engine.load(jax.device_put(sharp(model), layout), version=0)
    return engine


def requests(*lengths: int) -> list[Request]:
    """Two to each prompt, more than there are slots."""
    rng = np.random.default_rng(sum(lengths))
    prompts = [tuple(rng.integers(4, 32, length).tolist()) for length in lengths]
    return [Request(2 * group + i, prompt) for group, prompt in enumerate(prompts) for i in range(2)]


def greedy(engine: Engine, *lengths: int):
    return engine.generate(requests(*lengths), Sampling(greedy=True), seed=0)


@pytest.fixture(scope="module")
def expected():
    with pytest.MonkeyPatch.context() as patch:
        return greedy(build(WINDOWS, patch, chunks=False), 7, 36, 33, 40)


@pytest.mark.parametrize(
    ("pages", "sizes"),
    [
        pytest.param(False, {"data": 2, "stage": 2, "tensor": 2}, marks=pytest.mark.slow, id="slots and stages"),
        pytest.param(True, {"data": 4, "tensor": 2}, marks=pytest.mark.slow, id="pages"),
    ],
)
def test_eight_devices_in_chunks_generate_what_one_does_whole(expected, pages, sizes, monkeypatch):
    engine = build(WINDOWS, monkeypatch, chunks=True, pages=pages, **sizes)
    same_responses(greedy(engine, 7, 36, 33, 40), expected)


@pytest.mark.slow
def test_experts_are_recorded_and_no_other_length_recompiles(monkeypatch):
    expected = greedy(build(MIXTURE, monkeypatch, chunks=False), 7, 36, 33, 40)
    engine = build(MIXTURE, monkeypatch, chunks=True)
    found = greedy(engine, 7, 36, 33, 40)
    same_responses(found, expected)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one.recorded["routing"][1], other.recorded["routing"][1])
    compilations = len(engine.compiled)
    greedy(engine, 1, 34, 39, 37)
    assert len(engine.compiled) == compilations <= most_compilations(engine)


@pytest.mark.slow
def test_after_a_prompt_of_eight_chunks_the_sampler_gives_what_the_trainer_computes():
    """A window in one layer, everything in the other, and positions past the original context of a scaling."""
    scaling = YarnRope(factor=4.0, original_max_position_embeddings=2048)
    model = replace(WINDOWS, sliding_window=250, rope_scaling=scaling, sliding_rope_theta=1e4)
    longest = 4096
    engine = Engine(
        model,
        mesh_of({}, jax.devices()[:1]),
        slots=1,
        max_prompt_tokens=longest - LONGEST_RESPONSE,
        max_response_tokens=LONGEST_RESPONSE,
        stop_tokens=(3,),
        decode_tokens_per_dispatch=4,
        execution=models.ONE_DEVICE,
    )
    engine.load(jax.device_put(sharp(model), jax.devices()[0]), version=0)
    rng = np.random.default_rng(0)
    prompt = tuple(rng.integers(4, 32, longest - LONGEST_RESPONSE).tolist())
    [sampled] = engine.generate([Request(0, prompt)], Sampling(min_tokens=LONGEST_RESPONSE), seed=0)
    row_RW = np.array([[*prompt, *sampled.tokens]], np.int32)
    logp_RWV = jax.nn.log_softmax(logits(sharp(model), model, row_RW)[:, -1 - len(sampled.tokens) : -1])
    logp_T = np.take_along_axis(np.asarray(logp_RWV[0]), np.array(sampled.tokens)[:, None], axis=-1)[:, 0]
    assert len(sampled.tokens) == LONGEST_RESPONSE
    np.testing.assert_allclose(sampled.logps, logp_T, atol=1e-5)

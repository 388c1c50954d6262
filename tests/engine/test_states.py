"""Layers of several kinds in the engine: slots hold states beside keys and values, or keys and values of several
widths, which later layers borrow, whatever the batch and the mesh."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compiled import most_compilations
from tiny_models import DECODER, logits, random_params

from jaxrlhf.config import Sampling
from jaxrlhf.engine import Engine, Request, prefill
from jaxrlhf.models import choose_execution, empty_cache, param_dims, param_shapes
from jaxrlhf.models.config import FullHeads, LayerInputs, LinearAttention
from jaxrlhf.planner.hardware import hardware
from jaxrlhf.planner.topology import topology
from jaxrlhf.sharding.described import described
from jaxrlhf.sharding.mesh import SLOT_AXES, mesh_of
from jaxrlhf.sharding.rules import GENERATE, shardings

pytestmark = pytest.mark.usefixtures("programs")

STATES = dataclasses.replace(
    DECODER,
    family="qwen3_5_text",
    num_layers=4,
    qk_norm=True,
    unit_offset=True,
    attention_gate=True,
    linear=LinearAttention(key_heads=2, value_heads=4, key_dim=8, value_dim=6),
    linear_layers=(True, False) * 2,
)
SPACES = dataclasses.replace(
    DECODER,
    family="granitemoehybrid",
    num_layers=4,
    embedding_multiplier=3.0,
    linear=LinearAttention(key_heads=4, value_heads=8, key_dim=6, value_dim=8, groups=1),
    linear_layers=(True, False) * 2,
    rope_layers=(False,) * 4,
)
"""State spaces whose only queries and keys serve four heads, which devices divide."""
BORROWING = dataclasses.replace(
    DECODER,
    family="gemma4_text",
    num_layers=7,
    norms="sandwich",
    qk_norm=True,
    value_norm=True,
    layer_scale=True,
    sliding_window=9,
    sliding_layers=(True, True, False, True, True, False, False),
    sliding_rope_theta=100.0,
    full_heads=FullHeads(1, 16, values_are_keys=True),
    borrowing_layers=3,
    borrowing_intermediate_size=96,
    layer_inputs=LayerInputs(8, 96),
)
PARAMS = {config: random_params(config) for config in (STATES, SPACES, BORROWING)}
LONGEST, RESPONSE = 40, 10


def engine(config, sizes, **changes):
    mesh = mesh_of(sizes, jax.devices()[: int(np.prod(list(sizes.values())))])
    settings = {"max_prompt_tokens": LONGEST, "max_response_tokens": RESPONSE, "stop_tokens": (), "slots": 4}
    execution = choose_execution(
        config, "float32", mesh, row_axes=SLOT_AXES, head_axes=("tensor",), stage_axes=("stage",), decodes=True
    )
    made = Engine(
        config,
        mesh,
        decode_tokens_per_dispatch=4,
        slot_axes=SLOT_AXES,
        kv_head_axis="tensor",
        execution=execution,
        **settings | changes,
    )
    layout = shardings(mesh, param_dims(config, "lm"), GENERATE)
    made.load(jax.device_put(PARAMS[config], layout), version=0)
    return made


def requests(**options):
    """Nine prompts, two of one length and one of the greatest length; two responses to each."""
    rng = np.random.default_rng(3)
    prompts = [tuple(rng.integers(1, 96, size).tolist()) for size in (1, 2, 5, 17, 17, 23, 31, 39, LONGEST)]
    return [Request(10 * number + twin, prompt, **options) for number, prompt in enumerate(prompts) for twin in (0, 1)]


def follow_the_model(config, given, completions):
    """Every token is the likeliest of the full forward pass."""
    token_BW = np.zeros((len(given), LONGEST + RESPONSE), np.int32)
    for row, (request, completion) in enumerate(zip(given, completions, strict=True)):
        whole = [*request.prompt_tokens, *completion.tokens]
        token_BW[row, : len(whole)] = whole
    logit_BWV = np.asarray(logits(PARAMS[config], config, token_BW))
    for row, (request, completion) in enumerate(zip(given, completions, strict=True)):
        start = len(request.prompt_tokens) - 1
        logit_TV = logit_BWV[row, start : start + len(completion.tokens)]
        assert list(completion.tokens) == logit_TV.argmax(-1).tolist()
        logp_TV = logit_TV - np.log(np.exp(logit_TV).sum(-1, keepdims=True))
        np.testing.assert_allclose(completion.logps, logp_TV.max(-1), atol=1e-4)


@pytest.mark.parametrize(
    ("config", "sizes"),
    [
        pytest.param(STATES, {"data": 1}, marks=pytest.mark.seeds, id="one"),
        pytest.param(STATES, {"data": 2, "tensor": 2}, marks=pytest.mark.seeds, id="tensor"),
        pytest.param(STATES, {"data": 2, "stage": 2}, marks=pytest.mark.slow, id="stages"),
        pytest.param(SPACES, {"data": 2, "tensor": 2}, marks=pytest.mark.seeds, id="spaces"),
        pytest.param(BORROWING, {"data": 2, "tensor": 2}, marks=pytest.mark.slow, id="borrowing"),
    ],
)
def test_slots_of_all_lengths_follow_the_model(config, sizes):
    made, given = engine(config, sizes), requests()
    follow_the_model(config, given, made.generate(given, Sampling(greedy=True), seed=0))
    assert len(made.compiled) <= most_compilations(made)


@pytest.mark.parametrize(
    "config",
    [
        pytest.param(STATES, marks=pytest.mark.seeds, id="states"),
        pytest.param(SPACES, marks=pytest.mark.slow, id="spaces"),
        pytest.param(BORROWING, marks=pytest.mark.seeds, id="borrowing"),
    ],
)
def test_long_prompts_go_on_chunk_by_chunk(config, monkeypatch):
    monkeypatch.setattr(prefill, "PREFILL_TOKENS", 16)
    monkeypatch.setattr(prefill, "CHUNK_TOKENS", 12)
    made, given = engine(config, {"data": 1}), requests()
    follow_the_model(config, given, made.generate(given, Sampling(greedy=True), seed=0))


@pytest.mark.parametrize(
    ("config", "reused"),
    [
        pytest.param(STATES, 0, marks=pytest.mark.slow, id="states"),
        pytest.param(BORROWING, 36, marks=pytest.mark.seeds, id="borrowing"),
    ],
)
def test_later_turns_go_on_from_keys_and_values_and_not_from_states(config, reused):
    made = engine(config, {"data": 1})
    first = [Request(number, (5, number, 7), keep=True) for number in range(3)]
    done = made.generate(first, Sampling(greedy=True), seed=0)
    second = [
        Request(number, (*each.prompt_tokens, *answer.tokens, 9))
        for number, (each, answer) in enumerate(zip(first, done, strict=True))
    ]
    follow_the_model(config, second, made.generate(second, Sampling(greedy=True), seed=0))
    assert made.prefill.reused_tokens == reused


def test_a_cache_has_no_second_copy_of_what_layers_borrow():
    """Four of seven layers keep keys and values: three with a window, of 2 x 8 numbers, and one of 1 x 16."""
    cache = empty_cache(BORROWING, slots=1, capacity=5)
    assert [stored.key_BKHS.shape for stored in cache] == [(1, 2, 8, 5)] * 2 + [(1, 1, 16, 5), (1, 2, 8, 5)]
    assert [stored.value_BKSH.shape for stored in cache] == [(1, 2, 5, 8)] * 2 + [(1, 1, 5, 16), (1, 2, 5, 8)]
    assert BORROWING.cache_width * BORROWING.num_layers == 4 * 32


@pytest.mark.slow
def test_decoding_compiles_for_an_h100():
    """With the heads of Qwen3-Next; XLA once failed on norms that were fused with concatenated filters."""
    heads = LinearAttention(key_heads=16, value_heads=32, key_dim=128, value_dim=128)
    sizes = {"num_layers": 2, "linear_layers": (True, False), "num_kv_heads": 2, "head_dim": 128, "hidden_size": 512}
    model = dataclasses.replace(STATES, **sizes, linear=heads)
    mesh = mesh_of({"data": 1}, topology(hardware("h100"))[:1])
    limits = {"max_prompt_tokens": 512, "max_response_tokens": 512, "decode_tokens_per_dispatch": 8}
    engine = Engine(model, mesh, slots=32, **limits, stop_tokens=(3,), slot_axes=SLOT_AXES)
    shapes = param_shapes(model, "lm", jnp.bfloat16)
    engine.load(described(shapes, shardings(mesh, param_dims(model, "lm"), GENERATE)), version=0)
    engine.compile_ahead([512])
    memory = engine.compiled.lowered["decode[32, 1024]"].compile().memory_analysis()
    state = 32 * 32 * 128 * 128 * 4  # of the layer with linear attention; a new one is written beside the old one
    assert state < memory.temp_size_in_bytes < 1.1 * state
    assert 2 * state < memory.argument_size_in_bytes < 2.5 * state

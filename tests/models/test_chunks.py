"""Long prompts run chunk by chunk: the numbers of whole ones, in the memory and the time of what is there."""

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compiled import to_read
from jax.sharding import NamedSharding, PartitionSpec
from tiny_models import DECODER, close, random_params

from jaxrlhf import models
from jaxrlhf.models.attention.chunks import Chunk, attend_chunk
from jaxrlhf.models.attention.kv_cache import Prefix
from jaxrlhf.models.attention.score_mod import ScoreMod
from jaxrlhf.sharding.mesh import SLOT_AXES, STAGE_AXES, mesh_of
from jaxrlhf.sharding.rules import GENERATE, shardings
from tests.models.test_families import DEEPSEEK, GEMMA

DENSE = replace(DECODER, qkv_bias=True)
CONFIGS = {"dense": DENSE, "windows and soft caps": GEMMA, "latents and experts": DEEPSEEK}
WIDTH = 23
LENGTHS = np.array([23, 5, 9, 16], np.int32)
"""To the end of the row, to the end of a chunk of 5, and to the end of neither."""
CHUNK = 5
TOKENS = np.random.default_rng(1).integers(0, 96, (4, WIDTH), dtype=np.int32)
REAL = np.arange(WIDTH) < LENGTHS[:, None]


@functools.partial(jax.jit, static_argnums=0, static_argnames=("chunk_tokens", "execution"))
def prefill(config, params, token_PS, length_P, **how):
    return models.prefill(params, config, token_PS, length_P, **how)


def of_tokens(result):
    """Return the entries of tokens, without those of padding."""
    hidden_PD, key_LPSKH, value_LPSKU, *choice = map(np.asarray, jax.tree.leaves(result))
    return hidden_PD, key_LPSKH[:, REAL], value_LPSKU[:, REAL], [choice_PSLk[REAL] for choice_PSLk in choice]


@pytest.fixture(scope="module")
def whole():
    """Parameters of each model, and the result of its prompts run at once."""

    @functools.cache
    def run(config):
        params = random_params(config)
        return params, of_tokens(prefill(config, params, TOKENS, LENGTHS))

    return run


@pytest.mark.parametrize(
    ("name", "chunk_tokens"),
    [
        *((name, CHUNK) for name in CONFIGS),
        pytest.param("dense", 1, marks=pytest.mark.slow),
        pytest.param("windows and soft caps", 22, marks=pytest.mark.slow),
    ],
)
def test_chunks_give_what_whole_prompts_give(whole, name, chunk_tokens):
    params, expected = whole(CONFIGS[name])
    found = of_tokens(prefill(CONFIGS[name], params, TOKENS, LENGTHS, chunk_tokens=chunk_tokens))
    close(found, expected)


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("windows and soft caps", {"data": 2, "stage": 2, "tensor": 2}),
        pytest.param("latents and experts", {"data": 2, "tensor": 4}, marks=pytest.mark.slow),
    ],
)
def test_eight_devices_say_what_one_says(whole, name, sizes):
    """Rows, heads and stages on different devices; the prefix is split as it was."""
    config, mesh = CONFIGS[name], mesh_of(sizes, jax.devices())
    params, expected = whole(config)
    layout = shardings(mesh, models.param_dims(config, "lm"), GENERATE)
    rows = jax.device_put((TOKENS, LENGTHS), NamedSharding(mesh, PartitionSpec(SLOT_AXES)))
    execution = models.Execution(pipeline=models.pipeline_over(mesh, STAGE_AXES, row_axes=SLOT_AXES))
    found = prefill(config, jax.device_put(params, layout), *rows, chunk_tokens=CHUNK, execution=execution)
    close(of_tokens(found), expected)
    key_LPSKH = found[1].key_LPSKH
    stages, data = sizes.get("stage", 1), sizes["data"]
    heads = 1 if config.latent is not None else config.num_kv_heads // 2
    assert key_LPSKH.addressable_shards[0].data.shape[:4] == (config.num_layers // stages, 4 // data, WIDTH, heads)


@jax.jit
def attended(query_PCNH, key_PCKH, value_PCKH, seen, scores):
    def before(at):
        return seen.before(at, tokens=query_PCNH.shape[1])

    return attend_chunk(query_PCNH, key_PCKH, value_PCKH, before, seen.start, scores)


@pytest.mark.parametrize("slides", [None, False, True])
@pytest.mark.parametrize("start", [0, 4, 10])
def test_a_chunk_attends_as_the_formula_says(start, slides):
    """In float64, one query after another; tokens of the chunk and later ones in the prefix are other numbers."""
    draw = np.random.default_rng(2)
    query, key, value = (draw.standard_normal((2, 14, heads, 6)) for heads in (4, 2, 2))
    window = None if slides is None else 3
    expected = np.zeros((2, 4, 4, 6))
    for row in range(2):
        for place in range(4):
            for head in range(4):
                at = start + place
                first = max(0, at - window + 1) if slides else 0
                score = key[row, first : at + 1, head // 2] @ query[row, at, head] / 1.7
                weight = np.exp(0.9 * np.tanh(score / 0.9))
                expected[row, place, head] = weight @ value[row, first : at + 1, head // 2] / weight.sum()
    chunk = (array[:, start : start + 4].astype(np.float32) for array in (query, key, value))
    before = Prefix(*(np.where(np.arange(14)[:, None, None] < start, array, 99.0)[None] for array in (key, value)))
    scores = ScoreMod(divisor=1.7, soft_cap=0.9, window=window, slides=None if slides is None else jnp.array(slides))
    seen = Chunk(jax.tree.map(np.float32, before), np.zeros((), np.int32), np.full((), start, np.int32))
    found = attended(*chunk, seen, scores)
    np.testing.assert_allclose(found, expected, atol=1e-5)


def test_half_precision_is_as_near_to_single_as_whole_prompts_are(whole):
    params, (expected_PD, *_) = whole(DENSE)

    def off(chunk_tokens):
        how = {"chunk_tokens": chunk_tokens, "execution": models.Execution(jnp.bfloat16)}
        hidden_PD, *_ = prefill(DENSE, params, TOKENS, LENGTHS, **how)
        assert hidden_PD.dtype == jnp.bfloat16
        return np.abs(np.float32(hidden_PD) - expected_PD).max()

    assert 0 < off(CHUNK) < 1.5 * off(None)


def test_chunks_past_the_longest_prompt_are_not_run():
    """Their keys stay as they were made."""
    _, prefix, _ = prefill(DENSE, random_params(DENSE), TOKENS, np.minimum(LENGTHS, 7), chunk_tokens=CHUNK)
    assert np.asarray(prefix.key_LPSKH)[:, :, :10].all() and not np.asarray(prefix.key_LPSKH)[:, :, 10:].any()


def test_memory_beside_the_prefix_is_that_of_a_chunk():
    """A prompt four times as long takes no more of it, and a fraction of what it takes whole."""
    params = models.param_shapes(DENSE, "lm")

    def temp_bytes(width, chunk_tokens):
        rows = jax.ShapeDtypeStruct((1, width), jnp.int32), jax.ShapeDtypeStruct((1,), jnp.int32)
        program = to_read(prefill.lower(DENSE, params, *rows, chunk_tokens=chunk_tokens))
        memory = program.memory_analysis()
        assert memory is not None
        return memory.temp_size_in_bytes

    short, long, whole = temp_bytes(1024, 64), temp_bytes(4096, 64), temp_bytes(4096, None)
    assert long < 1.1 * short
    assert long < whole / 20


def test_a_chunk_of_no_tokens_is_refused():
    with pytest.raises(ValueError, match="chunk_tokens=0; expected 1 or more, or None to prefill whole prompts"):
        models.prefill({}, DENSE, TOKENS, LENGTHS, chunk_tokens=0)

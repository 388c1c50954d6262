"""A vocabulary of 97 tokens over 2 and 4 devices: what pads it gets no probability, no gradient and no bytes."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_checkpoints import VOCAB, build, write
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from jaxrlhf import models
from jaxrlhf.config import FromScratch, Layout, Sampling
from jaxrlhf.engine import Engine, Request
from jaxrlhf.models.config import ModelConfig
from jaxrlhf.sharding.mesh import SLOT_AXES, factored_mesh, mesh_of
from jaxrlhf.sharding.rules import GENERATE, TRAIN, check_divisible, shardings
from jaxrlhf.workers.pool_roles import check_vocabulary

ROWS, WIDTH = 4, 12


@pytest.fixture(scope="module")
def given(tmp_path_factory):
    """A checkpoint, its parameters on one device with noise in the padding, and some tokens."""
    sizes = {"num_key_value_heads": 4, "num_hidden_layers": 1, "tie_word_embeddings": False}
    source = write(tmp_path_factory.mktemp("source"), build("qwen2", **sizes))
    config = replace(models.read_config(source), final_logit_softcapping=20.0)
    params = poisoned(models.load_params(source, config, "lm"))
    return source, config, params, np.random.default_rng(0).integers(0, VOCAB, (ROWS, WIDTH), dtype=np.int32)


def small(tokens):
    return ModelConfig("qwen2", tokens, 32, 32, 1, 4, 4, 8, tie_embeddings=True)


def tables(params):
    return [params[name] for name in ("embed", "head") if name in params]


def poisoned(params):
    """Return the parameters with large numbers in the padding of their tables."""
    for table in tables(params):
        assert table.shape == (112, 32) and not table[VOCAB:].any()
    noise = {name: params[name].at[VOCAB:].set(50.0) for name in ("embed", "head") if name in params}
    return {**params, **noise}


def layout_of(config, mesh, rules):
    dims, shapes = models.param_dims(config, "lm"), models.param_shapes(config, "lm")
    check_divisible(mesh, dims, shapes, rules, role="actor")
    return shardings(mesh, dims, rules)


def loss(params, config, token_RW, read):
    position_RW = jnp.broadcast_to(jnp.arange(WIDTH), token_RW.shape)
    hidden_RWD = models.hidden_states(params, config, token_RW, position_RW, jnp.ones_like(token_RW)).hidden_RWD
    logp_RW, entropy_RW, *_ = read(params, config, hidden_RWD, token_RW)
    return (logp_RW + 0.3 * entropy_RW).sum(), (logp_RW, entropy_RW)


def ours(params, config, hidden_RWD, token_RW):
    return models.token_logp(params, config, hidden_RWD, token_RW, temperature=0.7, entropy=True, chunk_tokens=16)


def naive(params, config, hidden_RWD, token_RW):
    """From the rows of the vocabulary alone."""
    table_VD = tables(params)[-1][:VOCAB]
    logp_RWV = jax.nn.log_softmax(20 * jnp.tanh(hidden_RWD @ table_VD.T / 20) / 0.7)[:, :-1]
    logp_RW = jnp.take_along_axis(logp_RWV, token_RW[:, 1:, None], axis=2)[..., 0]
    entropy_RW = -(jnp.exp(logp_RWV) * logp_RWV).sum(-1)
    return jnp.pad(logp_RW, ((0, 0), (1, 0))), jnp.pad(entropy_RW, ((0, 0), (1, 0)))


def test_log_probabilities_and_gradients_are_those_of_the_vocabulary(given):
    program = jax.jit(jax.grad(loss, has_aux=True), static_argnums=(1, 3))
    _, config, params, token_RW = given
    layout = Layout(fsdp=2, tensor=4)
    mesh = factored_mesh(layout, jax.devices())
    split = jax.device_put(params, layout_of(config, mesh, TRAIN))
    shards = {shard.data.shape for table in tables(split) for shard in table.addressable_shards}
    assert shards == {(112 // layout.tensor, 32 // layout.fsdp)}
    expected = program(params, config, token_RW, naive)
    found = program(split, config, token_RW, ours)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5, rtol=2e-4), found[1], expected[1])
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=3e-4, rtol=1e-3), found[0], expected[0])
    assert all(not table[VOCAB:].any() for table in tables(found[0]))


def test_samples_are_of_the_vocabulary(given):
    _, config, params, _ = given
    mesh = mesh_of({"tensor": 4}, jax.devices()[:4])
    engine = Engine(
        config,
        mesh,
        slots=4,
        max_prompt_tokens=8,
        max_response_tokens=16,
        stop_tokens=(),
        decode_tokens_per_dispatch=8,
        slot_axes=SLOT_AXES,
        kv_head_axis="tensor",
    )
    engine.load(jax.device_put(params, layout_of(config, mesh, GENERATE)), version=0)
    requests = [Request(index, (index, 96, 5)) for index in range(8)]
    # So hot that a padded row would be sampled at once, and noise of 50 would be all that is sampled.
    sampled = [
        token for response in engine.generate(requests, Sampling(temperature=5.0), seed=7) for token in response.tokens
    ]
    assert len(sampled) == 8 * 16 and max(sampled) < VOCAB and len(set(sampled)) > 40


def test_logits_have_no_padding(given):
    _, config, params, _ = given
    hidden_D = np.ones((2, 32), np.float32)
    assert models.logits(params, config, hidden_D).shape == (2, VOCAB)
    assert (models.padded_logits(params, config, hidden_D)[:, VOCAB:] == -np.inf).all()


def test_exports_leave_the_padding_out(given, tmp_path):
    source, config, _, _ = given
    layout = layout_of(config, factored_mesh(Layout(fsdp=2, tensor=4), jax.devices()), TRAIN)
    models.save_params(models.load_params(source, config, "lm", layout), config, tmp_path / "out", source=source)
    name = "model.safetensors"
    assert (tmp_path / "out" / name).read_bytes() == (source / name).read_bytes()


@pytest.mark.parametrize("tokens, rows", [(1, 16), (16, 16), (97, 112), (511, 512), (513, 576), (32_001, 32_064)])
def test_tables_are_padded_the_same_whatever_they_are_split_over(tokens, rows):
    assert models.param_shapes(small(tokens), "lm")["embed"].shape == (rows, 32)


def test_random_tables_end_in_zeros():
    sampled = jax.jit(lambda key: models.init_params(small(97), "lm", key)["embed"])(jax.random.key(0))
    assert sampled[:97].all() and not sampled[97:].any()


def test_ids_beyond_the_embedding_are_refused_however_few_tokens_there_are(refused):
    words = Tokenizer(WordLevel({"a": 0, "</s>": VOCAB}, unk_token="a"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="</s>")
    assert len(tokenizer) == 2
    with refused():
        check_vocabulary(tokenizer, models.scratch_config(FromScratch(), vocab_size=VOCAB), role="actor")
    check_vocabulary(tokenizer, models.scratch_config(FromScratch(), vocab_size=VOCAB + 1), role="actor")
